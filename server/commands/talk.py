"""Somebody to talk to: a model in this process, or a daemon elsewhere. `chat` and `generate` share it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import httpx
from pydantic import ValidationError

from engine.errors import EngineError
from server.commands.options import api_key_for
from server.configuration import Resolved
from server.daemon_url import base_url
from server.schema.chat import ChatCompletionChunk

if TYPE_CHECKING:
    from engine.engine import Engine
    from server.sampling import SamplingDefaults

_CONNECT_SECONDS = 10.0
_KEY_ADVICE = "; give it with --api-key, or in DALSEGNO_SERVER_API_KEYS"


class DaemonUnreachableError(EngineError):
    """The daemon at --url does not answer, or answers with an error."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """How to answer; None leaves it to the model's defaults."""

    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    enable_thinking: bool | None = None


@dataclass(frozen=True, slots=True)
class Spoken:
    """A piece of an answer; the last one has the reason of the end and the cost as the HTTP API writes it."""

    reasoning: str = ""
    content: str = ""
    finish_reason: str | None = None
    cost: Mapping[str, Any] = field(default_factory=dict)


Message = Mapping[str, str]


class Talker(Protocol):
    """Answers conversations, one at a time."""

    async def open(self) -> str:
        """Get ready, and say who answers: loads the model, or looks whether the daemon is there."""
        ...

    def answer(self, messages: Sequence[Message], wishes: Wishes) -> AsyncGenerator[Spoken, None]:
        """Stream an answer; closing the generator cancels it."""
        ...

    async def close(self) -> None: ...


class LocalTalker:
    """A model in this process."""

    def __init__(self, resolved: Resolved) -> None:
        self._settings = resolved.settings
        self._engine: Engine | None = None
        self._defaults: SamplingDefaults | None = None

    async def open(self) -> str:
        from server.daemon import load_engine, model_names
        from server.sampling import SamplingDefaults

        engine = load_engine(self._settings)
        await engine.start()
        self._engine = engine
        self._defaults = SamplingDefaults.from_folder(engine.model_folder, self._settings)
        return f"{model_names(self._settings)[0]} in this process"

    async def answer(self, messages: Sequence[Message], wishes: Wishes) -> AsyncGenerator[Spoken, None]:
        from engine.request import Thinking
        from engine.text.slices import in_one_go
        from server.chat import Prompt, pieces, render_prompt, submit

        assert self._engine is not None
        assert self._defaults is not None
        sampling = self._defaults.choose(max_tokens=wishes.max_tokens, temperature=wishes.temperature, seed=wishes.seed)
        if self._engine.chat_template is None and len(messages) == 1:
            token_ids = self._engine.tokenizer.encode(messages[0]["content"], add_special_tokens=True)
            prompt = Prompt(tuple(token_ids), Thinking.MAY_COME)
        else:
            variables = {} if wishes.enable_thinking is None else {"enable_thinking": wishes.enable_thinking}
            prompt = in_one_go(render_prompt(self._engine, messages, variables))
        generation = submit(self._engine, prompt, sampling)
        answer = pieces(generation)
        try:
            async for piece in answer:
                cost = piece.cost.model_dump(mode="json") if piece.cost else {}
                reason = piece.finish_reason.value if piece.finish_reason else None
                yield Spoken(piece.reasoning, piece.content, reason, cost)
        finally:
            await answer.aclose()

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.stop()


class RemoteTalker:
    """A daemon at `url`, with or without http:// and the ending /v1."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._base = base_url(url)
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(None, connect=_CONNECT_SECONDS)
        self._client = httpx.AsyncClient(headers=headers, timeout=timeout, trust_env=False)

    async def open(self) -> str:
        try:
            response = await self._client.get(f"{self._base}/v1/models")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise DaemonUnreachableError(f"no daemon answers at {self._base}: {error}") from error
        if response.is_error:
            advice = _KEY_ADVICE if response.status_code == httpx.codes.UNAUTHORIZED else ""
            raise DaemonUnreachableError(f"{self._base} refuses: {_error_message(response.content)}{advice}")
        try:
            return f"{response.json()['data'][0]['id']} at {self._base}"
        except (ValueError, KeyError, TypeError, IndexError):
            raise DaemonUnreachableError(f"{self._base} does not answer as dalsegno does; check the URL") from None

    async def answer(self, messages: Sequence[Message], wishes: Wishes) -> AsyncGenerator[Spoken, None]:
        body: dict[str, Any] = {"messages": [dict(message) for message in messages], "stream": True}
        given = {
            "max_tokens": wishes.max_tokens,
            "temperature": wishes.temperature,
            "seed": wishes.seed,
            "enable_thinking": wishes.enable_thinking,
        }
        body |= {name: value for name, value in given.items() if value is not None}
        try:
            async with self._client.stream("POST", f"{self._base}/v1/chat/completions", json=body) as response:
                if response.is_error:
                    raise DaemonUnreachableError(_error_message(await response.aread()))
                async for line in response.aiter_lines():
                    data = line.removeprefix("data: ")
                    if data == "[DONE]":
                        return
                    if data != line:
                        yield _spoken(data)
        except httpx.HTTPError as error:
            raise DaemonUnreachableError(f"{self._base} ended the answer: {error}") from error
        raise DaemonUnreachableError(f"{self._base} ended the answer before it was whole")

    async def close(self) -> None:
        await self._client.aclose()


def make_talker(resolved: Resolved, url: str | None) -> Talker:
    """The daemon at `url` with the first configured API key, or the configured model in this process."""
    api_key = api_key_for(resolved, url)
    return LocalTalker(resolved) if url is None else RemoteTalker(url, api_key)


def _spoken(data: str) -> Spoken:
    try:
        chunk = ChatCompletionChunk.model_validate_json(data)
    except ValidationError:
        raise DaemonUnreachableError(_error_message(data.encode())) from None
    cost = chunk.model_dump(mode="json", include={"usage", "timings", "reuse"}, exclude_none=True)
    if not chunk.choices:
        return Spoken(cost=cost)
    choice = chunk.choices[0]
    return Spoken(choice.delta.reasoning_content or "", choice.delta.content or "", choice.finish_reason, cost)


def _error_message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "the answer is not one of dalsegno's"
