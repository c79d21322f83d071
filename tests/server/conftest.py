"""The HTTP application around a real engine with a tiny model, in this process."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from server.app import create_app
from server.settings import CacheSettings, EngineSettings, ServerSettings, Settings
from tests.server.tiny_model import write_tiny_model

MAX_CONTEXT = 512


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def settings(tiny_model: Path) -> Settings:
    return Settings(
        server=ServerSettings(model=str(tiny_model)),
        engine=EngineSettings(max_context=MAX_CONTEXT, default_max_tokens=8),
        cache=CacheSettings(kv_cache_mib=4, host_cache_mib=4),
    )


@pytest.fixture(scope="module")
async def client(settings: Settings, anyio_backend: str) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(settings)
    daemon = app.state.daemon
    await daemon.start()
    async with client_of(app) as client:
        yield client
    await daemon.stop()


def client_of(app: object, client: tuple[str, int] | None = ("127.0.0.1", 123)) -> httpx.AsyncClient:
    """`client` is the address from which the requests seem to come."""
    transport = httpx.ASGITransport(app, client=client)  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=transport, base_url="http://daemon")


@pytest.fixture
def quiet_logging() -> Iterator[None]:
    """Puts the loggers back as they were, after a command that set them up."""
    root = logging.getLogger()
    handlers, levels = root.handlers[:], {name: logging.getLogger(name).level for name in ("", "dalsegno", "uvicorn")}
    yield
    root.handlers[:] = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
