"""Paths as clients write them: one spelling for each that is answered, and a word about those of other APIs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Receive, Scope, Send

_ENDLESS = frozenset({"/insights/stream"})
"""Whose answer has no end, so that HEAD would have none either."""

_OPENAI = re.compile(r"/(?:v1/)*(chat/completions|completions|models(?:/.*)?|responses(?:/.*)?|messages(?:/.*)?)")
_UNVERSIONED = re.compile(r"/(?:v1/)+(health|metrics|tokenize|detokenize|version|ping)")

_SPOKEN = "OpenAI's API is spoken here: POST /v1/chat/completions or /v1/completions"

FOREIGN: Mapping[str, str] = {
    "/api": "Ollama's own API",
    "/apply-template": "llama.cpp's own API",
    "/classify": "classification",
    "/completion": "llama.cpp's own API",
    "/embed": "embedding",
    "/embedding": "embedding",
    "/embeddings": "embedding",
    "/encode": "embedding",
    "/flush_cache": "SGLang's own API",
    "/generate": "SGLang's own API",
    "/generate_stream": "Text Generation Inference's own API",
    "/get_model_info": "SGLang's own API",
    "/get_server_info": "SGLang's own API",
    "/infill": "llama.cpp's own API",
    "/invocations": "SageMaker's API",
    "/lora-adapters": "llama.cpp's own API",
    "/pooling": "embedding",
    "/props": "llama.cpp's own API",
    "/rerank": "reranking",
    "/reranking": "reranking",
    "/score": "reranking",
    "/slots": "llama.cpp's own API",
    "/v1/assistants": "OpenAI's Assistants API",
    "/v1/audio": "OpenAI's audio API",
    "/v1/batches": "OpenAI's batch API",
    "/v1/complete": "Anthropic's older API",
    "/v1/embeddings": "embedding",
    "/v1/files": "OpenAI's files API",
    "/v1/fine_tuning": "OpenAI's fine-tuning API",
    "/v1/images": "OpenAI's images API",
    "/v1/infill": "llama.cpp's own API",
    "/v1/moderations": "OpenAI's moderation API",
    "/v1/realtime": "OpenAI's realtime API",
    "/v1/rerank": "reranking",
    "/v1/score": "reranking",
    "/v1/threads": "OpenAI's Assistants API",
    "/v1/vector_stores": "OpenAI's vector stores",
    "/v2/embed": "embedding",
    "/v2/rerank": "reranking",
}
"""What clients look for that know the path, or one below it."""


class CanonicalPaths:
    """ASGI middleware: one spelling for each path, before anything looks at it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["path"] = canonical(scope["path"])
        await self._app(scope, receive, send)


def canonical(path: str) -> str:
    """Without a slash at the end or two in a row; OpenAI's paths below /v1 once, whatever the client's base URL is."""
    path = re.sub(r"/{2,}", "/", path)
    path = path.rstrip("/") or "/"
    if match := _OPENAI.fullmatch(path):
        return f"/v1/{match[1]}"
    if match := _UNVERSIONED.fullmatch(path):
        return f"/{match[1]}"
    return path


def nothing_at(path: str) -> str:
    """What to tell a client that asks for a path which is not there."""
    parts = path.split("/")
    for length in range(len(parts), 1, -1):
        if found := FOREIGN.get("/".join(parts[:length])):
            return f"this path belongs to {found}, which is not served; {_SPOKEN}"
    return "there is nothing at this path; /docs lists what there is"


def answer_head(app: FastAPI, routers: Iterable[APIRouter]) -> None:
    """Let HEAD ask for whatever GET does: monitors and load balancers do. The server leaves the body out."""
    routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    methods = [(route, route.methods or set()) for route in routes]
    taken = {route.path for route, found in methods if "HEAD" in found}
    for route, found in methods:
        if "GET" in found and route.path not in taken | _ENDLESS:
            app.add_api_route(
                route.path, route.endpoint, methods=["HEAD"], include_in_schema=False, response_model=None
            )
