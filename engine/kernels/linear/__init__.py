"""Linear layers on a GPU: a small class for each way to multiply by NVFP4, fp8 and plain weights."""

from engine.kernels.linear.room import CensusLine, LinearRoom

__all__ = ["CensusLine", "LinearRoom"]
