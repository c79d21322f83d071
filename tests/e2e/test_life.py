"""How the daemon starts, refuses to start, and ends."""

import concurrent.futures
import json
import signal
import subprocess
import sys

import httpx
import openai
import pytest

from server.cli import run
from tests.deploy.prometheus_process import until
from tests.e2e.conftest import LONG, SMALL, run_daemon
from tests.programs import free_port
from tests.server.tiny_model import write_tiny_model
from tests.waiting import PATIENCE_SECONDS

HELLO = [{"role": "user", "content": "Hello"}]
KEY = "sk-very-secret"


def stream(client, tokens):
    return client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=tokens, temperature=0, stream=True)


def test_sigterm_lets_running_requests_finish_and_takes_no_more(tiny_model):
    with run_daemon(tiny_model, *SMALL, "--api-key", KEY) as daemon:
        client = daemon.client(api_key=KEY)
        with pytest.raises(openai.AuthenticationError):
            daemon.client(api_key="wrong").models.list()
        chunks = iter(stream(client, 100))
        next(chunks)
        daemon.signal(signal.SIGTERM)
        daemon.wait_for_log("draining")
        with pytest.raises((openai.InternalServerError, openai.APIConnectionError)):
            stream(client, 1)
        *_, last = chunks
        assert last.choices[0].finish_reason == "length"
        assert last.usage.completion_tokens == 100
        assert daemon.process.wait(PATIENCE_SECONDS) == 0
        assert KEY not in "".join(daemon.log)


def test_a_second_signal_ends_running_streams_with_an_error(tiny_model):
    with run_daemon(tiny_model, *SMALL) as daemon:
        chunks = iter(stream(daemon.client(), LONG))
        next(chunks)
        daemon.signal(signal.SIGTERM)
        daemon.wait_for_log("draining")
        assert httpx.get(f"{daemon.url}/health", timeout=PATIENCE_SECONDS).json()["status"] == "draining"
        daemon.signal(signal.SIGINT)
        with pytest.raises(openai.APIError):
            list(chunks)
        assert daemon.process.wait(PATIENCE_SECONDS) == 0
        assert "Traceback" not in "".join(daemon.log)


def is_ready(port):
    try:
        return httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200
    except httpx.TransportError:
        return False


def test_neither_a_hangup_nor_outputs_that_nobody_reads_end_the_daemon(tiny_model):
    """There never was a standard output, and who read the log has left before it says anything."""
    port = free_port()
    command = f"exec {sys.executable} -m server serve {tiny_model} --port {port} {' '.join(SMALL)} >&-"
    with subprocess.Popen(["bash", "-c", command], stderr=subprocess.PIPE) as process:
        process.stderr.close()
        until(lambda: is_ready(port))
        for _ in range(2):
            process.send_signal(signal.SIGHUP)
            assert httpx.get(f"http://127.0.0.1:{port}/nothing").status_code == 404
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def broken_config(folder):
    (folder / "config.json").write_text("{", encoding="utf-8")


def truncated_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def unsupported_architecture(folder):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "gpt_neox"}), encoding="utf-8")


def missing_tokenizer(folder):
    (folder / "tokenizer.json").unlink()


def broken_template(folder):
    (folder / "chat_template.jinja").write_text("{% for %}", encoding="utf-8")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (broken_config, "config.json"),
        (truncated_weights, "model.safetensors"),
        (unsupported_architecture, "gpt_neox"),
        (missing_tokenizer, "tokenizer.json"),
        (broken_template, "template"),
    ],
)
@pytest.mark.usefixtures("quiet_logging")
def test_a_model_that_cannot_be_loaded_is_code_3(tmp_path, capsys, damage, said):
    damage(write_tiny_model(tmp_path / "model"))
    assert run(["serve", str(tmp_path / "model"), "--port", "0"]) == 3
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("dalsegno: ")]
    assert said in line


@pytest.mark.usefixtures("quiet_logging")
def test_a_context_longer_than_the_model_s_is_wrong_usage(tiny_model, capsys):
    assert run(["serve", str(tiny_model), "--port", "0", "--max-context", "100000000"]) == 2
    assert "--max-context" in capsys.readouterr().err


def test_a_limit_on_the_address_space_is_code_5_in_one_line(tiny_model):
    limited = f"ulimit -v 2500000; exec {sys.executable} -m server serve {tiny_model} --port 0 --kv-cache-mib 2000"
    result = subprocess.run(
        ["bash", "-c", limited], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert (result.returncode, "Traceback" in result.stderr) == (5, False), result.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--kv-cache-mib", "99999999"], "--kv-cache-mib"),
        (["--kv-pages", "99999999999"], "--kv-pages"),
        (["--max-context", "60000", "--kv-cache-mib", "1"], "--max-context"),
    ],
)
@pytest.mark.usefixtures("quiet_logging")
def test_too_little_memory_is_code_5_and_names_the_flag(tiny_model, capsys, flags, said):
    assert run(["serve", str(tiny_model), "--port", "0", *flags]) == 5
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("dalsegno: ")]
    assert said in line
    assert "bytes" in line


def test_a_daemon_that_cannot_start_ends_with_one_line_and_its_code(daemon, tiny_model):
    port = daemon.url.rpartition(":")[2]
    command = [sys.executable, "-m", "server", "serve"]
    cases = {4: [str(tiny_model), "--port", port], 3: ["/no/such/folder", "--port", "0"], 2: ["--prot", "1"]}

    def start(arguments):
        return subprocess.run(
            [*command, *arguments], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
        )

    with concurrent.futures.ThreadPoolExecutor(len(cases)) as pool:
        for code, result in zip(cases, pool.map(start, cases.values()), strict=True):
            assert result.returncode == code
            assert "Traceback" not in result.stderr
            assert result.stdout == ""
