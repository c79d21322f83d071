"""What the documentation of other servers says about their requests' fields, written down by hand from their pages.

Nothing here is taken from our own tables: a field that we forgot is to be seen.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Documented(NamedTuple):
    """A field, a value by which its server answers otherwise, and the value that it documents as the default."""

    field: str
    effect: Any
    default: Any


OPENAI = (
    Documented("audio", {"voice": "alloy", "format": "wav"}, None),
    Documented("best_of", 3, 1),
    Documented("function_call", {"name": "f"}, "none"),
    Documented("functions", [{"name": "f"}], []),
    Documented("modalities", ["text", "audio"], ["text"]),
    Documented("response_format", {"type": "json_object"}, {"type": "text"}),
    Documented("suffix", "the end", None),
    Documented("web_search_options", {"search_context_size": "low"}, None),
)

VLLM = (
    Documented("allowed_token_ids", [1, 2], None),
    Documented("bad_words", ["no"], []),
    Documented("chat_template", "{{ messages }}", None),
    Documented("continue_final_message", True, False),
    Documented("documents", [{"title": "a", "text": "b"}], None),
    Documented("early_stopping", True, False),
    Documented("ec_transfer_params", {"a": 1}, None),
    Documented("guided_choice", ["yes", "no"], None),
    Documented("guided_grammar", 'root ::= "a"', None),
    Documented("guided_json", {"type": "object"}, None),
    Documented("guided_regex", "a+", None),
    Documented("include_reasoning", False, True),
    Documented("kv_transfer_params", {"do_remote_decode": True}, None),
    Documented("length_penalty", 0.8, 1.0),
    Documented("logits_processors", ["a.b"], None),
    Documented("logprob_token_ids", [5], None),
    Documented("prompt_embeds", "AAAA", None),
    Documented("prompt_logprobs", 1, None),
    Documented("repetition_detection", {"max_pattern_size": 4}, None),
    Documented("return_prompt_text", True, None),
    Documented("return_token_ids", True, None),
    Documented("return_tokens_as_token_ids", True, None),
    Documented("skip_special_tokens", False, True),
    Documented("structured_outputs", {"regex": "a+"}, None),
    Documented("thinking_token_budget", 10, -1),
    Documented("truncate_prompt_tokens", 10, None),
    Documented("use_beam_search", True, False),
    Documented("vllm_xargs", {"a": 1}, None),
    Documented("watermarking", True, None),
)

SGLANG = (
    Documented("bootstrap_host", "10.0.0.1", None),
    Documented("bootstrap_room", 7, None),
    Documented("custom_logit_processor", "{}", None),
    Documented("custom_params", {"a": 1}, None),
    Documented("ebnf", 'root ::= "a"', None),
    Documented("extra_key", "a", None),
    Documented("input_ids", [1, 2], None),
    Documented("json_schema", '{"type": "object"}', None),
    Documented("lora_path", "adapter", None),
    Documented("reasoning", {"enabled": True}, None),
    Documented("regex", "a+", None),
    Documented("return_cached_tokens_details", True, False),
    Documented("return_hidden_states", True, False),
    Documented("return_meta_info", True, False),
    Documented("return_prompt_token_ids", True, False),
    Documented("return_routed_experts", True, False),
    Documented("sampling_params", {"temperature": 0}, None),
    Documented("separate_reasoning", False, True),
    Documented("session_params", {"id": "a"}, None),
    Documented("stop_regex", "a+", None),
    Documented("stream_reasoning", False, True),
    Documented("structural_tag", '{"structures": []}', None),
    Documented("task", "title", None),
    Documented("thinking_budget", 10, None),
)

LLAMA_CPP = (
    Documented("adaptive_target", 0.5, -1.0),
    Documented("dry_multiplier", 0.8, 0.0),
    Documented("dynatemp_range", 0.5, 0.0),
    Documented("grammar", 'root ::= "a"', ""),
    Documented("grammar_triggers", [{"type": 0, "value": "a"}], []),
    Documented("image_data", [{"data": "AAAA", "id": 1}], []),
    Documented("input_extra", [{"filename": "a", "text": "b"}], []),
    Documented("input_prefix", "a", ""),
    Documented("input_suffix", "a", ""),
    Documented("json_schema", {"type": "object"}, {}),
    Documented("lora", [{"id": 0, "scale": 0.5}], []),
    Documented("min_keep", 2, 0),
    Documented("mirostat", 2, 0),
    Documented("multimodal_data", ["AAAA"], []),
    Documented("n_indent", 4, 0),
    Documented("n_probs", 5, 0),
    Documented("parse_tool_calls", False, True),
    Documented("post_sampling_probs", True, False),
    Documented("reasoning_budget", 0, -1),
    Documented("reasoning_format", "none", "auto"),
    Documented("response_fields", ["content"], []),
    Documented("return_progress", True, False),
    Documented("return_tokens", True, False),
    Documented("samplers", ["top_k", "temperature"], []),
    Documented("system_prompt", "Be short.", ""),
    Documented("t_max_predict_ms", 100, 0),
    Documented("t_max_prompt_ms", 100, 0),
    Documented("thinking_budget_tokens", 10, -1),
    Documented("timings_per_token", True, False),
    Documented("top_n_sigma", 1.0, -1.0),
    Documented("typical_p", 0.5, 1.0),
    Documented("xtc_probability", 0.5, 0.0),
)

OLLAMA = (
    Documented("context", [1, 2], []),
    Documented("format", "json", ""),
    Documented("images", ["AAAA"], []),
    Documented("mirostat", 1, 0),
    Documented("raw", True, False),
    Documented("system", "Be short.", ""),
    Documented("template", "{{ .Prompt }}", ""),
    Documented("tfs_z", 0.5, 1.0),
    Documented("typical_p", 0.7, 1),
)

ANTHROPIC = (Documented("thinking", {"type": "enabled", "budget_tokens": 1024}, None),)

EFFECTS = {
    "OpenAI": OPENAI,
    "vLLM": VLLM,
    "SGLang": SGLANG,
    "llama.cpp": LLAMA_CPP,
    "Ollama": OLLAMA,
    "Anthropic": ANTHROPIC,
}

WITHOUT_EFFECT = {
    "OpenAI": {
        "user": "u1",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "safety_identifier": "s1",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "prediction": {"type": "content", "content": "a"},
        "parallel_tool_calls": True,
        "stream_options": {"include_obfuscation": False},
    },
    "vLLM": {
        "priority": 0,
        "request_id": "r1",
        "session_id": "s1",
        "spaces_between_special_tokens": True,
        "mm_processor_kwargs": {},
        "media_io_kwargs": {},
        "truncation_side": "left",
        "guided_decoding_backend": "auto",
        "stream_interval": 1,
    },
    "SGLang": {"rid": "r1", "session_id": "s1", "priority": 1, "custom_labels": {"a": "b"}, "data_parallel_rank": 0},
    # What SillyTavern and its kin send with every request: switches that are off, and what they would be set to.
    "llama.cpp": {
        "cache_prompt": True,
        "id_slot": -1,
        "n_keep": 0,
        "n_cache_reuse": 0,
        "dry_multiplier": 0,
        "dry_base": 1.75,
        "dry_allowed_length": 2,
        "dry_penalty_last_n": 64,
        "dry_sequence_breakers": ["\n"],
        "xtc_probability": 0,
        "xtc_threshold": 0.1,
        "mirostat": 0,
        "mirostat_tau": 5.0,
        "mirostat_eta": 0.1,
        "dynatemp_range": 0,
        "dynatemp_exponent": 1,
        "repeat_penalty": 1,
        "repeat_last_n": 64,
        "seed": -1,
    },
    "Ollama": {"keep_alive": "5m", "options": {"num_ctx": 8192, "num_gpu": 1, "num_thread": 4, "use_mmap": True}},
}
"""Fields that are documented and change no token."""
