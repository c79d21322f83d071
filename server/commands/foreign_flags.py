"""Flags of vLLM, SGLang and llama.cpp that have no counterpart here of the same meaning, and what to do instead.

Those that have one are aliases in server/settings.py.
"""

from __future__ import annotations

from collections.abc import Mapping

_ALWAYS = "it is always so here; leave it out"
_MEMORY = "say how much memory keys and values may have with --kv-cache-mib; by itself the daemon takes what is free"
_HOST = "say how much host memory the cache may have with --host-cache-mib"
_ONE_DEVICE = "a model is served on one device here; leave it out"
_REUSE = "prompts are reused by default here; --no-prefix-reuse switches that off"
_WEIGHTS = "weights are read as the checkpoint stores them; leave it out"
_SLOTS = "say how many checkpoints of recurrent state are kept with --device-state-slots"
_KERNELS = "kernels are chosen with --backend"
_THREADS = "set the environment variable OMP_NUM_THREADS"
_GGUF = "the model is the argument: a folder in Hugging Face layout, a hub id, or a short name"
_TEMPLATE = "the chat template is the checkpoint's; leave it out"
_NO_TOOLS = "calls are not read out of a model's text yet; leave it out"
_NO_LORA = "adapters are not served; merge them into the checkpoint"
_NO_DRAFT = "there is no speculative decoding here; leave it out"
_SAMPLING = "sampling is said in each request, or in the checkpoint's generation_config.json"

HINTS: Mapping[str, tuple[str, str]] = {
    "--attention-backend": ("vLLM, SGLang", _KERNELS),
    "--api-key-file": ("llama.cpp", "say --api-key @FILE"),
    "--batch-size": ("llama.cpp", "say how many prompt tokens are computed in one step with --prefill-chunk"),
    "--cache-reuse": ("llama.cpp", _REUSE),
    "--cache-type-k": ("llama.cpp", "say --kv-cache-dtype fp8, or leave it out"),
    "--cache-type-v": ("llama.cpp", "say --kv-cache-dtype fp8, or leave it out"),
    "--chat-template": ("vLLM, SGLang, llama.cpp", _TEMPLATE),
    "--chat-template-file": ("llama.cpp", _TEMPLATE),
    "--cont-batching": ("llama.cpp", _ALWAYS),
    "--context-shift": ("llama.cpp", "a full context ends the answer here; leave it out"),
    "--cpu-offload-gb": ("vLLM", _ONE_DEVICE),
    "--ctx-checkpoints": ("llama.cpp", _SLOTS),
    "--data-parallel-size": ("vLLM", _ONE_DEVICE),
    "--disable-cuda-graph": ("SGLang", _KERNELS),
    "--dp-size": ("SGLang", _ONE_DEVICE),
    "--dtype": ("vLLM, SGLang", _WEIGHTS),
    "--enable-auto-tool-choice": ("vLLM", _NO_TOOLS),
    "--enable-cache-report": ("SGLang", _ALWAYS),
    "--enable-chunked-prefill": ("vLLM", _ALWAYS),
    "--enable-hierarchical-cache": ("SGLang", _HOST),
    "--enable-lora": ("vLLM, SGLang", _NO_LORA),
    "--enable-metrics": ("SGLang", _ALWAYS),
    "--enable-prefix-caching": ("vLLM", _REUSE),
    "--enable-prompt-tokens-details": ("vLLM", _ALWAYS),
    "--enforce-eager": ("vLLM", _KERNELS),
    "--flash-attn": ("llama.cpp", _KERNELS),
    "--generation-config": ("vLLM", _SAMPLING),
    "--gpu-layers": ("llama.cpp", _ONE_DEVICE),
    "--gpu-memory-utilization": ("vLLM", _MEMORY),
    "--hf-repo": ("llama.cpp", _GGUF),
    "--hicache-ratio": ("SGLang", _HOST),
    "--hicache-size": ("SGLang", _HOST),
    "--jinja": ("llama.cpp", _ALWAYS),
    "--kv-cache-memory-bytes": ("vLLM", _MEMORY),
    "--kv-offloading-size": ("vLLM", _HOST),
    "--lora": ("llama.cpp", _NO_LORA),
    "--max-mamba-cache-size": ("SGLang", _SLOTS),
    "--max-num-batched-tokens": ("vLLM", "say how many prompt tokens are computed in one step with --prefill-chunk"),
    "--max-total-tokens": ("SGLang", "say --kv-pages, in pages, or --kv-cache-mib"),
    "--mem-fraction-static": ("SGLang", _MEMORY),
    "--metrics": ("llama.cpp", _ALWAYS),
    "--mlock": ("llama.cpp", "the system decides what stays in memory; leave it out"),
    "--model-draft": ("llama.cpp", _NO_DRAFT),
    "--n-gpu-layers": ("llama.cpp", _ONE_DEVICE),
    "--no-mmap": ("llama.cpp", "the system decides what stays in memory; leave it out"),
    "--override-generation-config": ("vLLM", _SAMPLING),
    "--quantization": ("vLLM, SGLang", _WEIGHTS),
    "--reasoning-format": ("llama.cpp", "thinking comes as reasoning_content here; leave it out"),
    "--speculative-algorithm": ("SGLang", _NO_DRAFT),
    "--speculative-config": ("vLLM", _NO_DRAFT),
    "--swap-space": ("vLLM", _HOST),
    "--tensor-parallel-size": ("vLLM", _ONE_DEVICE),
    "--threads": ("llama.cpp", _THREADS),
    "--tokenizer": ("vLLM", "the tokenizer is the checkpoint's; leave it out"),
    "--tokenizer-path": ("SGLang", "the tokenizer is the checkpoint's; leave it out"),
    "--tool-call-parser": ("vLLM, SGLang", _NO_TOOLS),
    "--tp-size": ("SGLang", _ONE_DEVICE),
    "--trust-remote-code": ("vLLM, SGLang", "no code of a checkpoint is ever run; leave it out"),
    "--ubatch-size": ("llama.cpp", "say how many prompt tokens are computed in one step with --prefill-chunk"),
    "-b": ("llama.cpp", "say how many prompt tokens are computed in one step with --prefill-chunk"),
    "-fa": ("llama.cpp", _KERNELS),
    "-hf": ("llama.cpp", _GGUF),
    "-ngl": ("llama.cpp", _ONE_DEVICE),
    "-t": ("llama.cpp", _THREADS),
    "-tp": ("vLLM", _ONE_DEVICE),
}
"""By flag: whose it is, and what to do."""
