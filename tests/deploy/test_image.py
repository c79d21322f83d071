"""The Dockerfile: linted, and held to the repository and the settings, since nothing here can build it."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import threading
import tomllib
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from server.configuration import resolve
from tests.deploy.containers import DOCKERFILE, ROOT, TARGETS, global_arguments, read_stages

STAGES = read_stages()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_hadolint_finds_nothing():
    linter = Path(sysconfig.get_path("scripts")) / "hadolint"
    result = subprocess.run([linter, "--no-color", DOCKERFILE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout + result.stderr) == (0, "")


def copied_paths():
    """What the stage `wheel` takes from the repository."""
    return [path for rest in STAGES["wheel"].all("COPY") for path in rest.split()[:-1]]


@pytest.mark.parametrize("path", copied_paths())
def test_what_is_copied_is_there_and_not_ignored(path):
    assert (ROOT / path).exists()
    ignored = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#") and fnmatch(path, line.lstrip("!").rstrip("/")):
            ignored = not line.startswith("!")
    assert not ignored


def test_the_image_gets_every_package_and_file_that_the_wheel_is_made_of():
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    named = [PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]]
    assert {*packages, *named, "pyproject.toml", "constraints.txt"} == set(copied_paths())


def test_the_requirements_are_those_of_the_project_and_the_pins_those_of_make(tmp_path):
    script = STAGES["wheel"].all("RUN")[0]
    script = script.replace("/requirements", str(tmp_path / "made")).replace("python -c", f"{sys.executable} -c")
    subprocess.run(["sh", "-euc", script], cwd=ROOT, check=True)
    made = {path.name: path.read_text().splitlines() for path in (tmp_path / "made").iterdir()}
    assert made == {
        "base.txt": PROJECT["project"]["dependencies"],
        "cuda.txt": PROJECT["project"]["optional-dependencies"]["cuda"],
        "constraints.txt": (ROOT / "constraints.txt").read_text().splitlines(),
    }


def test_every_base_image_is_pinned_to_a_release():
    for name, image in global_arguments().items():
        assert re.search(r":\d+\.\d+\.\d+-", image), f"{name} is {image}"
    assert {stage.base for stage in STAGES.values()} == {f"${{{name}}}" for name in global_arguments()}


@pytest.mark.parametrize("target", TARGETS)
def test_the_daemon_runs_as_nobody_special_and_gets_its_signals_itself(target):
    stage = STAGES[target]
    assert int(stage.one("USER")) > 999
    assert stage.instructions.index(("USER", stage.one("USER"))) > max(
        place for place, (keyword, _) in enumerate(stage.instructions) if keyword in ("RUN", "COPY")
    )
    assert stage.one("STOPSIGNAL") == "SIGTERM"
    assert json.loads(stage.one("ENTRYPOINT")) == ["dalsegno"]
    assert json.loads(stage.one("CMD")) == ["serve"]
    assert stage.environment["PYTHONUNBUFFERED"] == "1"


@pytest.mark.parametrize("target", TARGETS)
def test_the_settings_of_the_image_are_ones_that_the_daemon_knows(target):
    ours = {name: value for name, value in STAGES[target].environment.items() if name.startswith("DALSEGNO_")}
    settings = resolve(environ=ours).settings
    assert settings.server.host == "0.0.0.0"
    assert STAGES[target].one("EXPOSE") == str(settings.server.port)


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_fetched_or_compiled_later_goes_to_the_volume(target):
    volume = STAGES[target].one("VOLUME")
    caches = {name: value for name, value in STAGES[target].environment.items() if "CACHE" in name}
    assert all(value.startswith(f"{volume}/") for value in caches.values()), caches
    # Where flashinfer, the hub's library and our own model store write by default.
    assert volume == f"{STAGES[target].one('WORKDIR')}/.cache"


def test_no_layer_holds_a_secret():
    for stage in STAGES.values():
        named = [*stage.environment, *(rest.partition("=")[0] for rest in stage.all("ARG"))]
        assert [name for name in named if re.search("KEY|TOKEN|PASSWORD|SECRET", name)] == []


class Answering(BaseHTTPRequestHandler):
    """Answers as the daemon's probes do, with the status that the server was told."""

    def do_GET(self):
        self.send_response(self.server.status if self.path == "/readyz" else 404)
        self.end_headers()

    def log_message(self, *_args):
        pass


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1), (None, 1)])
def test_the_healthcheck_is_the_readiness_of_the_daemon_and_needs_no_program_but_python(target, status, code):
    _options, _cmd, command = STAGES[target].one("HEALTHCHECK").partition(" CMD ")
    program, *arguments = json.loads(command)
    assert program == "python"
    with HTTPServer(("127.0.0.1", 0), Answering) as answering:
        answering.status = status
        port = answering.server_port
        if status is None:
            answering.server_close()
        else:
            threading.Thread(target=answering.handle_request, daemon=True).start()
        environ = os.environ | {"DALSEGNO_SERVER_PORT": str(port)}
        result = subprocess.run([sys.executable, *arguments], env=environ, capture_output=True, check=False)
    assert result.returncode == code
