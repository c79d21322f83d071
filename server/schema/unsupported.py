"""Fields that are known, would change the output, and are not supported yet: refused by name, unless neutral."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from server.errors import ApiError

_NOTHING: tuple[Any, ...] = (None, [], {}, "", False)

NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "audio": _NOTHING,
    "add_generation_prompt": (None, True),
    "best_of": (None, 1),
    "continue_final_message": _NOTHING,
    "documents": _NOTHING,
    "echo": _NOTHING,
    "frequency_penalty": (None, 0),
    "function_call": (*_NOTHING, "none", "auto"),
    "functions": _NOTHING,
    "grammar": _NOTHING,
    "guided_choice": _NOTHING,
    "guided_grammar": _NOTHING,
    "guided_json": _NOTHING,
    "guided_regex": _NOTHING,
    "ignore_eos": _NOTHING,
    "length_penalty": (None, 1),
    "logit_bias": _NOTHING,
    "logprobs": _NOTHING,
    "min_tokens": (None, 0),
    "modalities": (None, [], ["text"]),
    "n": (None, 1),
    "presence_penalty": (None, 0),
    "reasoning_effort": (None,),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "stop": _NOTHING,
    "structured_outputs": _NOTHING,
    "suffix": _NOTHING,
    "tool_choice": (None, "none", "auto"),
    "tools": _NOTHING,
    "top_logprobs": (None, 0),
    "use_beam_search": _NOTHING,
    "verbosity": (None,),
    "web_search_options": (None,),
}
"""For each field the values that change nothing."""


def refuse_unsupported(body: Mapping[str, Any]) -> None:
    """Raises ApiError (400) for the first field whose value would have an effect that is not built yet."""
    for name, value in body.items():
        neutral = NEUTRAL_VALUES.get(name)
        if neutral is not None and not any(value == same and _is_alike(value, same) for same in neutral):
            raise ApiError(400, f"{name} is not supported yet; leave it out", param=name, code="unsupported_parameter")


def _is_alike(value: Any, same: Any) -> bool:
    """False and 0 are equal in Python but not in JSON; 0 and 0.0 are."""
    return isinstance(value, bool) == isinstance(same, bool)
