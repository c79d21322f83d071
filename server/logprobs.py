"""Log probabilities in the shapes of the two OpenAI APIs."""

from __future__ import annotations

from collections.abc import Sequence

from engine.engine import TokenLogprob
from engine.text.tokenizer import Tokenizer
from server.schema.logprobs import ChatLogprobs, CompletionLogprobs, TokenLogprobBody, TopLogprob


def chat_logprobs(tokenizer: Tokenizer, records: Sequence[TokenLogprob]) -> ChatLogprobs:
    """One entry a token."""
    content = []
    for record in records:
        raw = token_bytes(tokenizer, record.token_id)
        top = [_top(tokenizer, token_id, logprob) for token_id, logprob in record.top]
        content.append(TokenLogprobBody(token=_text(raw), logprob=record.logprob, bytes=list(raw), top_logprobs=top))
    return ChatLogprobs(content=content, refusal=None)


def completion_logprobs(tokenizer: Tokenizer, records: Sequence[TokenLogprob], offset: int) -> CompletionLogprobs:
    """`offset`: characters of the choice before these tokens. The picked token is always among the likeliest."""
    tokens, logprobs, tops, offsets = [], [], [], []
    for record in records:
        token = _text(token_bytes(tokenizer, record.token_id))
        top = {_text(token_bytes(tokenizer, token_id)): logprob for token_id, logprob in record.top}
        tokens.append(token)
        logprobs.append(record.logprob)
        tops.append(top | {token: record.logprob})
        offsets.append(offset)
        offset += len(token)
    return CompletionLogprobs(tokens=tokens, token_logprobs=logprobs, top_logprobs=tops, text_offset=offsets)


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """What a token stands for; a special token for its own name."""
    if token_id in tokenizer.special_token_ids:
        return (tokenizer.token_of(token_id) or "").encode()
    return tokenizer.bytes_of(token_id)


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")


def _top(tokenizer: Tokenizer, token_id: int, logprob: float) -> TopLogprob:
    raw = token_bytes(tokenizer, token_id)
    return TopLogprob(token=_text(raw), logprob=logprob, bytes=list(raw))
