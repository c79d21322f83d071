"""The application factory: the one place where everything is wired together."""

from __future__ import annotations

from fastapi import FastAPI

from server.boundary import RequestBoundary
from server.daemon import Daemon
from server.errors import install_error_handlers
from server.openapi import install_openapi
from server.routes import chat, health, models
from server.schema.chat import ChatCompletionChunk, ChatCompletionRequest
from server.settings import Settings
from server.version import package_version


def create_app(settings: Settings) -> FastAPI:
    """The HTTP application. `app.state.daemon` is its Daemon, which the caller starts and stops."""
    app = FastAPI(
        title="dalsegno",
        version=package_version(),
        description="An OpenAI-compatible serving daemon for hybrid language models.",
        redoc_url=None,
    )
    app.state.daemon = Daemon(settings)
    for router in (chat.router, models.router, health.router):
        app.include_router(router)
    install_error_handlers(app)
    install_openapi(app, ChatCompletionRequest, ChatCompletionChunk)
    keys = [key.get_secret_value() for key in settings.server.api_keys]
    app.add_middleware(RequestBoundary, api_keys=keys)
    return app
