"""Fields of OpenAI, vLLM, SGLang, llama.cpp and Ollama that no schema here has, with the servers that document them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NOTHING: tuple[Any, ...] = (None, [], {}, "", False)
"""What a client sends that does not want a thing."""

_UNSET: tuple[Any, ...] = (None,)
_ON: tuple[Any, ...] = (None, True)
_ZERO: tuple[Any, ...] = (None, 0)
_ONE: tuple[Any, ...] = (None, 1)

RENAMED: Mapping[str, tuple[str, str]] = {
    "max_completion_tokens": ("OpenAI", "max_tokens"),
    "max_new_tokens": ("SGLang", "max_tokens"),
    "min_new_tokens": ("SGLang", "min_tokens"),
    "n_cmpl": ("llama.cpp", "n"),
    "n_predict": ("llama.cpp", "max_tokens"),
    "no_stop_trim": ("SGLang", "include_stop_str_in_output"),
    "num_predict": ("Ollama", "max_tokens"),
    "repeat_penalty": ("llama.cpp, Ollama", "repetition_penalty"),
    "sampling_seed": ("SGLang", "seed"),
    "stop_sequences": ("Anthropic", "stop"),
    "think": ("Ollama", "enable_thinking"),
}
"""By a field's name elsewhere: where, and what it is called here. Where a schema has the name itself, that holds."""

FLATTENED: Mapping[str, str] = {"extra_body": "the OpenAI client", "options": "Ollama"}
"""Objects whose fields are meant as if they stood outside."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that would change the answer. `neutral`: the values that would not; nor would the value of the field
    `same_as` (1 where that is left out), nor any while the field `beside` is left out or 1. `hint`: what to do.
    `is_half_built`: a schema that has the field does no more than the neutral values say."""

    servers: str
    neutral: tuple[Any, ...]
    same_as: str = ""
    beside: str = ""
    hint: str = "leave it out"
    is_half_built: bool = False


_THINKING = "say enable_thinking: true or false"
_MESSAGE = "send it as the first message"

REFUSED: Mapping[str, Refused] = {
    # How the answer is constrained.
    "ebnf": Refused("SGLang", NOTHING),
    "format": Refused("Ollama", NOTHING),
    "grammar": Refused("llama.cpp", NOTHING),
    "grammar_triggers": Refused("llama.cpp", NOTHING),
    "guided_choice": Refused("vLLM", NOTHING),
    "guided_grammar": Refused("vLLM", NOTHING),
    "guided_json": Refused("vLLM", NOTHING),
    "guided_regex": Refused("vLLM", NOTHING),
    "json_schema": Refused("SGLang, llama.cpp", NOTHING),
    "regex": Refused("SGLang", NOTHING),
    "response_format": Refused("OpenAI", (None, {"type": "text"})),
    "structural_tag": Refused("SGLang, vLLM", NOTHING),
    "structured_outputs": Refused("vLLM", NOTHING),
    # Tools.
    "function_call": Refused("OpenAI", (*NOTHING, "none", "auto")),
    "functions": Refused("OpenAI", NOTHING),
    "tool_choice": Refused("OpenAI", (None, "none", "auto"), is_half_built=True),
    "tools": Refused("OpenAI", NOTHING, hint="tools belong to /v1/chat/completions"),
    "web_search_options": Refused("OpenAI", _UNSET),
    # How tokens are picked.
    "adaptive_target": Refused("llama.cpp", (None, -1)),
    "allowed_token_ids": Refused("vLLM", NOTHING),
    "bad_words": Refused("vLLM", NOTHING),
    "best_of": Refused("OpenAI", _UNSET, same_as="n"),
    "custom_logit_processor": Refused("SGLang", NOTHING),
    "custom_params": Refused("SGLang", NOTHING),
    "dry_multiplier": Refused("llama.cpp", _ZERO),
    "dynatemp_range": Refused("llama.cpp", _ZERO),
    "early_stopping": Refused("vLLM", NOTHING),
    "length_penalty": Refused("vLLM", _ONE),
    "logits_processors": Refused("vLLM", NOTHING),
    "min_keep": Refused("llama.cpp", _ZERO),
    "mirostat": Refused("llama.cpp, Ollama", _ZERO),
    "penalize_nl": Refused("llama.cpp", _ON, beside="repetition_penalty"),
    "penalize_newline": Refused("Ollama", _ON, beside="repetition_penalty"),
    "repeat_last_n": Refused("llama.cpp, Ollama", (None, -1), beside="repetition_penalty"),
    "repetition_detection": Refused("vLLM", NOTHING),
    "samplers": Refused("llama.cpp", NOTHING),
    "sampling_params": Refused("SGLang", NOTHING, hint="its fields stand by themselves here"),
    "tfs_z": Refused("Ollama", _ONE),
    "top_n_sigma": Refused("llama.cpp", (None, -1, 0)),
    "typical_p": Refused("llama.cpp, Ollama", _ONE),
    "use_beam_search": Refused("vLLM", NOTHING),
    "vllm_xargs": Refused("vLLM", NOTHING),
    "watermarking": Refused("vLLM", NOTHING),
    "xtc_probability": Refused("llama.cpp", _ZERO),
    # When the answer ends, and what is left of it.
    "include_reasoning": Refused("vLLM", _ON, hint=_THINKING),
    "n_indent": Refused("llama.cpp", _ZERO),
    "parse_tool_calls": Refused("llama.cpp", _ON),
    "reasoning_format": Refused("llama.cpp", (None, "auto", "deepseek")),
    "separate_reasoning": Refused("SGLang", _ON),
    "skip_special_tokens": Refused("vLLM, SGLang", _ON),
    "stop_regex": Refused("SGLang", NOTHING),
    "stream_reasoning": Refused("SGLang", _ON),
    "t_max_predict_ms": Refused("llama.cpp", _ZERO),
    "t_max_prompt_ms": Refused("llama.cpp", _ZERO),
    # Thinking.
    "reasoning": Refused("SGLang", NOTHING, hint=_THINKING),
    "reasoning_budget": Refused("llama.cpp", (None, -1)),
    "reasoning_effort": Refused("OpenAI", _UNSET),
    "thinking": Refused("Anthropic", NOTHING, hint=_THINKING),
    "thinking_budget": Refused("SGLang", (None, -1)),
    "thinking_budget_tokens": Refused("llama.cpp", (None, -1)),
    "thinking_token_budget": Refused("vLLM", (None, -1)),
    "verbosity": Refused("OpenAI", _UNSET),
    # What the model is given to read.
    "add_generation_prompt": Refused("vLLM", _ON),
    "add_special_tokens": Refused("vLLM", NOTHING),
    "audio": Refused("OpenAI", NOTHING),
    "chat_template": Refused("vLLM, llama.cpp", NOTHING, hint="the template is the checkpoint's"),
    "context": Refused("Ollama", NOTHING),
    "continue_final_message": Refused("vLLM, SGLang", NOTHING),
    "documents": Refused("vLLM", NOTHING, hint="send them in chat_template_kwargs"),
    "echo": Refused("vLLM", NOTHING),
    "image_data": Refused("llama.cpp, SGLang", NOTHING),
    "images": Refused("Ollama", NOTHING),
    "input_extra": Refused("llama.cpp", NOTHING),
    "input_ids": Refused("SGLang", NOTHING, hint="/v1/completions takes tokens as prompt"),
    "input_prefix": Refused("llama.cpp", NOTHING),
    "input_suffix": Refused("llama.cpp", NOTHING),
    "instructions": Refused("OpenAI", NOTHING, hint=_MESSAGE),
    "modalities": Refused("OpenAI", (None, [], ["text"])),
    "multimodal_data": Refused("llama.cpp", NOTHING),
    "prompt_embeds": Refused("vLLM", NOTHING),
    "raw": Refused("Ollama", NOTHING, hint="/v1/completions takes prompts that no template changes"),
    "session_params": Refused("SGLang", NOTHING),
    "suffix": Refused("OpenAI, Ollama", NOTHING),
    "system": Refused("Anthropic, Ollama", NOTHING, hint=_MESSAGE),
    "system_prompt": Refused("llama.cpp", NOTHING, hint=_MESSAGE),
    "task": Refused("SGLang", NOTHING),
    "template": Refused("Ollama", NOTHING, hint="the template is the checkpoint's"),
    "truncate_prompt_tokens": Refused("vLLM", (None, -1)),
    # What is computed with, and where.
    "bootstrap_host": Refused("SGLang", NOTHING),
    "bootstrap_room": Refused("SGLang", NOTHING),
    "ec_transfer_params": Refused("vLLM", NOTHING),
    "extra_key": Refused("SGLang", NOTHING, hint="say cache_salt"),
    "kv_transfer_params": Refused("vLLM", NOTHING),
    "lora": Refused("llama.cpp", NOTHING),
    "lora_path": Refused("SGLang", NOTHING),
    # What the answer is to tell.
    "logprob_token_ids": Refused("vLLM", NOTHING),
    "n_probs": Refused("llama.cpp", _ZERO, hint="say logprobs"),
    "post_sampling_probs": Refused("llama.cpp", NOTHING),
    "prompt_logprobs": Refused("vLLM", NOTHING),
    "response_fields": Refused("llama.cpp", NOTHING),
    "return_cached_tokens_details": Refused("SGLang", NOTHING, hint="reuse.source in each answer tells it"),
    "return_hidden_states": Refused("SGLang", NOTHING),
    "return_meta_info": Refused("SGLang", NOTHING),
    "return_progress": Refused("llama.cpp", NOTHING),
    "return_prompt_text": Refused("vLLM", NOTHING),
    "return_prompt_token_ids": Refused("SGLang", NOTHING, hint="/tokenize gives them"),
    "return_routed_experts": Refused("SGLang", NOTHING),
    "return_token_ids": Refused("vLLM", NOTHING),
    "return_tokens": Refused("llama.cpp", NOTHING),
    "return_tokens_as_token_ids": Refused("vLLM", NOTHING),
    "stream_options.continuous_usage_stats": Refused("vLLM, SGLang", NOTHING),
    "timings_per_token": Refused("llama.cpp", NOTHING, hint="the last chunk has timings"),
    "top_logprobs": Refused("OpenAI", _ZERO, hint="/v1/completions has logprobs"),
}
"""By name, a dot before that of a field inside another. A schema that has the field itself takes what it says."""

HARMLESS: Mapping[str, str] = {
    "adaptive_decay": "llama.cpp",
    "bootstrap_port": "SGLang",
    "cache_prompt": "llama.cpp",
    "chat_template_kwargs": "vLLM",
    "custom_labels": "SGLang",
    "data_parallel_rank": "SGLang",
    "disagg_prefill_dp_rank": "SGLang",
    "dry_allowed_length": "llama.cpp",
    "dry_base": "llama.cpp",
    "dry_penalty_last_n": "llama.cpp",
    "dry_sequence_breakers": "llama.cpp",
    "dynatemp_exponent": "llama.cpp",
    "enable_thinking": "SGLang",
    "f16_kv": "Ollama",
    "guided_decoding_backend": "vLLM",
    "guided_whitespace_pattern": "vLLM",
    "id_slot": "llama.cpp",
    "images_config": "SGLang",
    "keep_alive": "Ollama",
    "low_vram": "Ollama",
    "main_gpu": "Ollama",
    "max_dynamic_patch": "SGLang",
    "media_io_kwargs": "vLLM",
    "metadata": "OpenAI",
    "min_dynamic_patch": "SGLang",
    "mirostat_eta": "llama.cpp, Ollama",
    "mirostat_tau": "llama.cpp, Ollama",
    "mm_processor_kwargs": "vLLM",
    "n_cache_reuse": "llama.cpp",
    "n_keep": "llama.cpp",
    "num_batch": "Ollama",
    "num_ctx": "Ollama",
    "num_gpu": "Ollama",
    "num_keep": "Ollama",
    "num_thread": "Ollama",
    "numa": "Ollama",
    "parallel_tool_calls": "OpenAI",
    "prediction": "OpenAI",
    "priority": "vLLM, SGLang",
    "prompt_cache_key": "OpenAI",
    "prompt_cache_retention": "OpenAI",
    "request_id": "vLLM",
    "return_mm_kwargs": "vLLM",
    "return_token_offsets": "vLLM",
    "rid": "SGLang",
    "routed_dp_rank": "SGLang",
    "routed_experts_prompt_start": "vLLM",
    "routed_experts_start_len": "SGLang",
    "safety_identifier": "OpenAI",
    "service_tier": "OpenAI",
    "session_id": "vLLM, SGLang",
    "spaces_between_special_tokens": "vLLM",
    "sse_ping_interval": "llama.cpp",
    "store": "OpenAI",
    "stream_interval": "vLLM",
    "truncation_side": "vLLM",
    "use_audio_in_video": "SGLang",
    "use_mlock": "Ollama",
    "use_mmap": "Ollama",
    "user": "OpenAI",
    "vocab_only": "Ollama",
    "xtc_threshold": "llama.cpp",
}
"""Fields without an effect on the answer: about who asks, about where things lie, or only beside another field that is
refused. They are accepted with any value."""
