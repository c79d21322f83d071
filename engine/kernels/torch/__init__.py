"""The `torch` backend: plain torch on the host, the readable reference that is also quick."""

from engine.kernels.torch.backend import TorchKernels

__all__ = ["TorchKernels"]
