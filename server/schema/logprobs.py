"""Log probabilities as clients get them, in the shapes of chat and of text completions."""

from __future__ import annotations

from server.schema.base import AnswerModel


class TopLogprob(AnswerModel):
    """One of the likeliest tokens at a place. `bytes`: a token may hold a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobBody(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(AnswerModel):
    """Of every token of the answer, thinking included."""

    content: list[TokenLogprobBody]
    refusal: None


class CompletionLogprobs(AnswerModel):
    """OpenAI's older shape; `text_offset` counts characters from the start of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]
