"""How tokens are picked when a request does not say: the checkpoint's own advice, then OpenAI's defaults."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine.request import SamplingParams
from server.errors import ApiError
from server.schema.sampling import SamplingRequest
from server.settings import Settings

_RANGES = {
    "temperature": (0.0, 2.0),
    "top_p": (1e-6, 1.0),
    "top_k": (0, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 10.0),
}

logger = logging.getLogger("dalsegno.model")


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Defaults of one model; `generation_config.json` may hold them."""

    params: SamplingParams = field(default_factory=SamplingParams)

    @classmethod
    def from_folder(cls, folder: Path, settings: Settings) -> SamplingDefaults:
        """Read `generation_config.json`; a broken file, or a value out of range, is logged and left out."""
        params = SamplingParams(max_tokens=settings.engine.default_max_tokens)
        path = folder / "generation_config.json"
        try:
            advice: Any = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        except (OSError, ValueError) as error:
            logger.warning("%s cannot be read, so OpenAI's sampling defaults hold: %s", path, error)
            advice = {}
        found: dict[str, Any] = {}
        for name, (low, high) in _RANGES.items():
            value = advice.get(name) if isinstance(advice, dict) else None
            if value is None:
                continue
            if isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high:
                found[name] = int(value) if name == "top_k" else float(value)
            else:
                logger.warning("%s: %s is not from %g to %g and is left out", path, name, low, high)
        return cls(replace(params, **found))

    def for_request(self, request: SamplingRequest) -> SamplingParams:
        """The request's own values, with the defaults where it has none. Raises ApiError (400) when they disagree."""
        params = self.choose(
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=None if request.top_k is None else max(request.top_k, 0),
            min_p=request.min_p,
            seed=None if request.seed == -1 else request.seed,
            max_tokens=request.wanted_tokens,
            min_tokens=request.min_tokens,
            stop=None if request.stop is None else tuple(request.stop),
            stop_token_ids=None if request.stop_token_ids is None else tuple(request.stop_token_ids),
            includes_stop=request.include_stop_str_in_output,
            ignore_eos=request.ignore_eos,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            repetition_penalty=request.repetition_penalty,
            logit_bias=tuple((int(token_id), bias) for token_id, bias in (request.logit_bias or {}).items()),
            logprobs=request.wanted_logprobs,
        )
        if params.min_tokens > params.max_tokens:
            raise ApiError(
                400,
                f"min_tokens is {params.min_tokens}, more than the {params.max_tokens} of max_tokens",
                param="min_tokens",
                code="invalid_value",
            )
        return params

    def choose(self, **given: Any) -> SamplingParams:
        """The defaults with what is given; None counts as not given."""
        return replace(self.params, **{name: value for name, value in given.items() if value is not None})
