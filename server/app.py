"""The application factory: the one place where everything is wired together."""

from __future__ import annotations

from fastapi import FastAPI

from server.boundary import RequestBoundary
from server.daemon import Daemon
from server.errors import install_error_handlers
from server.openapi import install_openapi
from server.routes import chat, completions, health, metrics, models, tokens
from server.schema.chat import ChatCompletionChunk, ChatCompletionRequest
from server.schema.completion import CompletionChunk, CompletionRequest
from server.schema.tokens import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest
from server.settings import Settings
from server.version import package_version

_BODIES = (
    ChatCompletionRequest,
    ChatCompletionChunk,
    CompletionRequest,
    CompletionChunk,
    TokenizeTextRequest,
    TokenizeChatRequest,
    DetokenizeRequest,
)
"""What no route declares as a parameter or an answer of its own."""


def create_app(settings: Settings) -> FastAPI:
    """The HTTP application. `app.state.daemon` is its Daemon, which the caller starts and stops."""
    app = FastAPI(
        title="dalsegno",
        version=package_version(),
        description="An OpenAI-compatible serving daemon for hybrid language models.",
        redoc_url=None,
    )
    app.state.daemon = Daemon(settings)
    for router in (chat.router, completions.router, models.router, tokens.router, health.router, metrics.router):
        app.include_router(router)
    install_error_handlers(app)
    install_openapi(app, *_BODIES)
    keys = [key.get_secret_value() for key in settings.server.api_keys]
    metered = app.state.daemon.metrics

    def on_end(path: str, status: int, seconds: float, has_failed: bool) -> None:
        metered.request_ended(path, status, seconds, has_failed=has_failed)

    app.add_middleware(RequestBoundary, api_keys=keys, on_end=on_end)
    return app
