"""The real npm client against the real daemon, where node is there."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_SECONDS

FOLDER = Path(__file__).parent / "npm"


@pytest.fixture(scope="module")
def node():
    """The `node` command, with the pinned client beside the script. Skips where it is missing, but never in CI."""
    command = shutil.which("node")
    if command is not None and (FOLDER / "node_modules" / "openai").is_dir():
        return command
    reason = "the npm client is not tested: node or npm is missing, or `make test` has not installed the client"
    assert os.environ.get("CI", "").lower() in {"", "0", "false"}, reason
    pytest.skip(reason)


def test_chat_streams_completions_models_and_errors_are_typed(node, daemon):
    command = [node, "client.mjs", daemon.url]
    result = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert result.returncode == 0, result.stderr
    saw = json.loads(result.stdout)
    assert len(saw["whole"]) == len(saw["completion"]) == 8
    assert saw["streamed"] == saw["whole"]
    cached = [usage.pop("prompt_tokens_details")["cached_tokens"] for usage in saw["usages"]]
    assert saw["usages"][0] == saw["usages"][1]
    assert cached[0] <= cached[1] < saw["usages"][0]["prompt_tokens"]
    assert saw["models"] == ["tiny"]
    assert saw["errors"] == {
        "model": {
            "kind": "NotFoundError",
            "status": 404,
            "code": "model_not_found",
            "param": "model",
            "hasId": True,
        },
        "messages": {
            "kind": "BadRequestError",
            "status": 400,
            "code": "invalid_value",
            "param": "messages",
            "hasId": True,
        },
    }
