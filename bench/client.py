"""One streamed request over HTTP, and what its answer's pieces tell: times, tokens, reuse, or the kind of error."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from bench.conversations import WORDS, Material
from engine.errors import EngineError
from server.daemon_url import base_url

_CONNECT_SECONDS = 10.0


class LoadError(EngineError):
    """The daemon cannot be put under load: it does not answer, or refuses what the load is made of."""


@dataclass(slots=True)
class Measurement:
    """One request. Mutable while its answer comes; times are of `time.perf_counter`."""

    started_at: float
    ended_at: float = 0.0
    piece_times: list[float] = field(default_factory=list)
    """When each piece of text came; a piece has a token or more."""
    text: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reuse_path: str = ""
    error: str = ""
    """Its kind: the code of the daemon's error, or the name of what went wrong on the way. Empty: none."""


class LoadClient:
    """Talks to the daemon at `url`, with or without http:// and the ending /v1. Close it with `close`."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._base = base_url(url)
        self._client = httpx.AsyncClient(
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def material(self) -> Material:
        """What the model makes of WORDS. Raises LoadError where no daemon answers, or not as dalsegno does."""
        body = {"prompt": " " + " ".join(WORDS), "add_special_tokens": False}
        try:
            response = await self._client.post(f"{self._base}/tokenize", json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise LoadError(f"no daemon answers at {self._base}: {error}") from error
        if response.is_error:
            raise LoadError(f"{self._base} refuses /tokenize: {_kind_of(response.content, response.status_code)}")
        try:
            token_ids = response.json()["tokens"]
            return Material(sorted(set(token_ids)), len(token_ids) / len(WORDS))
        except (ValueError, KeyError, TypeError) as error:
            raise LoadError(f"{self._base}/tokenize does not answer as dalsegno does; check --url") from error

    async def ask(self, path: str, body: Mapping[str, Any]) -> Measurement:
        """Send one request and read its whole answer. A failure is in the result, not raised."""
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        measurement = Measurement(time.perf_counter())
        try:
            async with self._client.stream("POST", f"{self._base}{path}", json=streamed) as response:
                if response.is_error:
                    measurement.error = _kind_of(await response.aread(), response.status_code)
                else:
                    await _read(response, measurement)
        except httpx.HTTPError as error:
            measurement.error = type(error).__name__
        except (ValueError, KeyError, TypeError, AttributeError):
            measurement.error = "malformed_answer"
        measurement.ended_at = time.perf_counter()
        return measurement


async def _read(response: httpx.Response, measurement: Measurement) -> None:
    texts = []
    is_whole = False
    async for line in response.aiter_lines():
        data = line.removeprefix("data: ")
        if data == line:
            continue
        if data == "[DONE]":
            is_whole = True
            break
        chunk = json.loads(data)
        if "error" in chunk:
            measurement.error = str(chunk["error"].get("code") or chunk["error"].get("type"))
            continue
        for choice in chunk["choices"]:
            delta = choice.get("delta", {})
            text = choice.get("text") or delta.get("reasoning_content") or delta.get("content")
            if text:
                measurement.piece_times.append(time.perf_counter())
                texts.append(delta.get("content") or choice.get("text") or "")
        if chunk.get("usage"):
            _note_cost(chunk, measurement)
    measurement.text = "".join(texts)
    if not is_whole and not measurement.error:
        measurement.error = "cut_off"


def _note_cost(chunk: Mapping[str, Any], measurement: Measurement) -> None:
    usage = chunk["usage"]
    measurement.prompt_tokens = usage["prompt_tokens"]
    measurement.completion_tokens = usage["completion_tokens"]
    measurement.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    measurement.reuse_path = (chunk.get("reuse") or {}).get("path", "")


def _kind_of(body: bytes, status: int) -> str:
    try:
        error = json.loads(body)["error"]
        return str(error.get("code") or error["type"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"http_{status}"
