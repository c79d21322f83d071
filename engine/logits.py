"""What is done to a row of logits before a token is picked from it, and what is read from it for log probabilities."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.request import GenerationRequest, SamplingParams, TokenLogprob
from engine.uploads import upload

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot write."""


class LogitEdits:
    """One request's penalties, biases and masks, with the tokens that they count. Mutable: the scheduler adds tokens
    between steps, the runner applies it during one.

    Penalties come first, then biases, then the mask: a bias is added to the final logit, as OpenAI documents it.
    """

    def __init__(self, params: SamplingParams, prompt_token_ids: Sequence[int], end_token_ids: Iterable[int]) -> None:
        self._params = params
        self._counts_tokens = has_penalties(params)
        self._bias_ids = torch.tensor([token_id for token_id, _ in params.logit_bias], dtype=torch.int64)
        self._biases = torch.tensor([bias for _, bias in params.logit_bias], dtype=torch.float32)
        self._end_ids = torch.tensor(sorted(end_token_ids), dtype=torch.int64)
        self._output_tokens = 0
        # Only the repetition penalty looks at the prompt.
        seen = dict.fromkeys(prompt_token_ids) if params.repetition_penalty != 1.0 else {}
        self._place_of = {token_id: place for place, token_id in enumerate(seen)}
        self._ids: npt.NDArray[np.int64] = np.fromiter(seen, np.int64, len(seen))
        self._counts: npt.NDArray[np.float32] = np.zeros(len(seen), np.float32)

    @classmethod
    def of(cls, request: GenerationRequest, end_token_ids: Iterable[int]) -> LogitEdits | None:
        """None for a request whose logits stay as they are. `end_token_ids` end this request."""
        params = request.sampling
        if not (has_penalties(params) or params.logit_bias or params.min_tokens):
            return None
        return cls(params, request.prompt_token_ids, end_token_ids)

    def add(self, token_id: int) -> None:
        """Count a token of the output."""
        self._output_tokens += 1
        if not self._counts_tokens:
            return
        place = self._place_of.setdefault(token_id, len(self._place_of))
        if place == len(self._ids):
            self._ids, self._counts = _with_room(self._ids), _with_room(self._counts)
        self._ids[place] = token_id
        self._counts[place] += 1

    def apply(self, row: torch.Tensor) -> None:
        """row [vocab] float32, in place.

        Repetition: Keskar et al., 2019, section 4.1, over prompt and output. Presence and frequency: OpenAI's
        `logit - count * frequency - (count > 0) * presence`, over the output.
        """
        if self._place_of:
            self._penalise(row)
        if len(self._bias_ids):
            row[upload(self._bias_ids, row.device)] += upload(self._biases, row.device)
        if self._output_tokens < self._params.min_tokens:
            row[upload(self._end_ids, row.device)] = -torch.inf

    def _penalise(self, row: torch.Tensor) -> None:
        params, size = self._params, len(self._place_of)
        ids = upload(torch.from_numpy(self._ids[:size]), row.device)
        counts = upload(torch.from_numpy(self._counts[:size]), row.device)
        logits = row[ids]
        repetition = params.repetition_penalty
        if repetition != 1.0:
            logits = torch.where(logits > 0, logits / repetition, logits * repetition)
        row[ids] = logits - counts * params.frequency_penalty - (counts > 0) * params.presence_penalty


def has_penalties(params: SamplingParams) -> bool:
    """Whether the tokens so far change what is picked next."""
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)


def read_logprobs(logprobs: torch.Tensor, token_ids: Sequence[int], top_counts: Sequence[int]) -> list[TokenLogprob]:
    """logprobs [n, vocab] of the model, one picked token and one number of likeliest tokens a row -> a record a row."""
    picked = logprobs.gather(1, torch.tensor(token_ids, device=logprobs.device).unsqueeze(1)).squeeze(1).tolist()
    widest = min(max(top_counts), logprobs.shape[1])
    values, ids = (each.tolist() for each in logprobs.topk(widest)) if widest else ([[]] * len(picked),) * 2
    return [
        TokenLogprob(
            token_id,
            max(logprob, LEAST_LOGPROB),
            tuple((other, max(value, LEAST_LOGPROB)) for other, value in zip(row_ids[:top], row[:top], strict=True)),
        )
        for token_id, logprob, top, row_ids, row in zip(token_ids, picked, top_counts, ids, values, strict=True)
    ]


def _with_room(array: np.ndarray) -> np.ndarray:
    """A copy of twice the length, zeros behind."""
    larger = np.zeros(max(2 * len(array), 64), array.dtype)
    larger[: len(array)] = array
    return larger
