"""nginx and Caddy, as they are shipped to stand before the daemon, and nginx as people write it in a hurry."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
import uvicorn

from server.app import create_app
from server.settings import ServerSettings, Settings
from tests.deploy.prometheus_files import DEPLOY
from tests.deploy.prometheus_process import until
from tests.programs import free_port, needs_program

NAME = "llm.example.com"
NGINX = (DEPLOY / "nginx" / "dalsegno.conf").read_text(encoding="utf-8")
CADDY = (DEPLOY / "caddy" / "Caddyfile").read_text(encoding="utf-8")
BARE = "server { listen 80; location / { proxy_pass http://127.0.0.1:8000; } }"


@pytest.fixture(scope="module")
def server() -> Iterator[uvicorn.Server]:
    """The application without a model: who is let in gets 503. A real server, for a proxy to talk to."""
    app = create_app(Settings(server=ServerSettings(allowed_hosts=(NAME,))))
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        until(lambda: server.started)
        yield server
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def backend(server) -> int:
    """Its port."""
    return server.servers[0].sockets[0].getsockname()[1]


@contextmanager
def running(command: list[str], port: int) -> Iterator[str]:
    """A proxy that listens there, until the block ends."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:

        def listens() -> bool:
            assert process.poll() is None, process.stderr.read()
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        until(listens)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.communicate()


@contextmanager
def nginx(folder, site: str, backend: int) -> Iterator[str]:
    program, port = needs_program("nginx", package="nginx"), free_port()
    temporary = "".join(
        f"{each}_temp_path {folder}/{each};" for each in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    site = site.replace("listen 80", f"listen 127.0.0.1:{port}").replace("127.0.0.1:8000", f"127.0.0.1:{backend}")
    path = folder / "nginx.conf"
    path.write_text(
        f"pid {folder}/pid; error_log stderr warn; worker_processes 1; daemon off; events {{}}\n"
        f"http {{ access_log off; {temporary}\n{site}\n}}"
    )
    command = [program, "-c", str(path), "-p", str(folder), "-e", "stderr"]
    subprocess.run([*command, "-t"], check=True, capture_output=True, text=True)
    with running(command, port) as url:
        yield url


@contextmanager
def caddy(folder, backend: int) -> Iterator[str]:
    program, port = needs_program("caddy", package="caddy"), free_port()
    head = f"{{\n\tadmin off\n\tauto_https off\n\tstorage file_system {folder}\n}}\n"
    site = CADDY.replace(f"{NAME} {{", f"http://:{port} {{\n\tbind 127.0.0.1")
    path = folder / "Caddyfile"
    path.write_text(head + site.replace("127.0.0.1:8000", f"127.0.0.1:{backend}"))
    with running([program, "run", "--config", str(path), "--adapter", "caddyfile"], port) as url:
        yield url


@pytest.fixture(scope="module", params=["nginx", "caddy"])
def proxy(request, tmp_path_factory, backend) -> Iterator[str]:
    """The URL of a proxy with the file that is shipped."""
    folder = tmp_path_factory.mktemp(request.param)
    with nginx(folder, NGINX, backend) if request.param == "nginx" else caddy(folder, backend) as url:
        yield url


@pytest.mark.parametrize(
    ("path", "host", "status"),
    [
        ("/v1/models", NAME, 503),
        ("/v1/models", "evil.example", 403),
        ("/admin/cache", NAME, 403),
        ("/admin/cache", "127.0.0.1", 403),
        ("/livez", NAME, 200),
    ],
)
def test_clients_get_through_and_nobody_is_taken_for_this_machine(proxy, path, host, status):
    assert httpx.get(proxy + path, headers={"host": host}).status_code == status


@pytest.mark.parametrize("claim", ["127.0.0.1", "127.0.0.1, 127.0.0.1"])
def test_what_a_client_claims_opens_nothing(proxy, claim):
    headers = {"host": NAME, "x-forwarded-for": claim, "x-real-ip": claim, "forwarded": f"for={claim}"}
    assert httpx.get(f"{proxy}/admin/cache", headers=headers).status_code == 403


def test_the_daemons_page_may_ask_through_it(proxy):
    headers = {"host": NAME, "origin": f"http://{NAME}", "sec-fetch-site": "same-origin"}
    assert httpx.get(f"{proxy}/v1/models", headers=headers).status_code == 503


def test_a_stream_is_passed_on_event_by_event_and_ends_when_its_client_leaves(proxy, server):
    """The first event comes although the stream says nothing more and does not end."""
    with httpx.stream("GET", f"{proxy}/insights/stream", headers={"host": NAME}, timeout=10) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "event: insights"
        assert server.server_state.tasks
    until(lambda: not server.server_state.tasks)


@pytest.mark.parametrize(("path", "status"), [("/admin/cache", 403), ("/livez", 200), ("/v1/models", 503)])
def test_a_bare_proxy_pass_does_not_open_admin(tmp_path, backend, path, status):
    with nginx(tmp_path, BARE, backend) as url:
        assert httpx.get(url + path).status_code == status
