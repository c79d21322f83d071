"""The application factory: the one place where everything is wired together."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from server.boundary import RequestBoundary
from server.daemon import Daemon
from server.drill import NO_DRILL, FireDrill
from server.errors import install_error_handlers
from server.openapi import install_openapi
from server.paths import CanonicalPaths, answer_head
from server.routes import admin, chat, completions, dashboard, health, insights, metrics, models, records, tokens
from server.schema.admin import FaultsRequest, ResetRequest
from server.schema.chat import ChatCompletionChunk, ChatCompletionRequest
from server.schema.completion import CompletionChunk, CompletionRequest
from server.schema.tokens import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest
from server.settings import Settings
from server.trust import Trust
from server.version import package_version

_BODIES = (
    ChatCompletionRequest,
    ChatCompletionChunk,
    CompletionRequest,
    CompletionChunk,
    TokenizeTextRequest,
    TokenizeChatRequest,
    DetokenizeRequest,
    ResetRequest,
    FaultsRequest,
)
"""What no route declares as a parameter or an answer of its own."""


def create_app(settings: Settings, drill: FireDrill = NO_DRILL) -> FastAPI:
    """The HTTP application. `app.state.daemon` is its Daemon, which the caller starts and stops."""
    app = FastAPI(
        title="dalsegno",
        version=package_version(),
        description="An OpenAI-compatible serving daemon for hybrid language models.",
        # The page at /docs is our own: FastAPI's asks another host for its script.
        docs_url=None,
        redoc_url=None,
    )
    app.state.daemon = daemon = Daemon(settings, drill)
    parts = (chat, completions, models, tokens, health, metrics, insights, admin, records, dashboard)
    routers = [part.router for part in parts]
    for router in routers:
        app.include_router(router)
    answer_head(app, routers)
    install_error_handlers(app)
    install_openapi(app, *_BODIES)
    app.add_middleware(
        RequestBoundary,
        api_keys=[key.get_secret_value() for key in settings.server.api_keys],
        admin_key=settings.server.admin_key.get_secret_value(),
        trust=Trust((settings.server.host, *settings.server.allowed_hosts), settings.server.cors_origins),
        on_end=daemon.request_ended,
    )
    app.add_middleware(CanonicalPaths)
    if settings.server.cors_origins:
        # Outermost: a preflight carries no key, and a page can read why it was refused.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.server.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    return app
