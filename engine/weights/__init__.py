"""Checkpoints in safetensors: float32, bfloat16, float16, fp8 and NVFP4, mixed within one checkpoint."""
