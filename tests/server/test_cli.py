import re
import socket
import subprocess
import sys

import pytest

from server.cli import run
from server.commands.inspect import parse_size
from server.configuration import ConfigurationError
from server.listener import listen, url_of

pytestmark = pytest.mark.usefixtures("quiet_logging")

VERBS = {
    *("serve", "chat", "generate", "pull", "quantize", "inspect", "bench"),
    *("watch", "drill", "doctor", "config", "replay", "list", "rm", "completion"),
}


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["config", "--prot", "1"], 2, "--port"),
        (["nope"], 2, "No such command"),
        (["generate"], 2, "Missing argument"),
        (["generate", " "], 2, "PROMPT is empty"),
        (["config", "--port", "x"], 2, "server.port is 'x' (flag --port)"),
        (["serve", "--fault", "leak_host_state"], 2, "--fault needs --allow-faults"),
        (["serve", "--allow-faults", "--fault", "leak"], 2, "--fault is 'leak'; expected one of leak_host_state"),
        (["config", "--admin-key", "a", "--api-key", "a"], 2, "give operators a key of their own"),
        (["serve", "--disk-cache-mib=5"], 2, "--disk-cache-mib is not built yet"),
        (["serve", "--host", "no such host"], 2, "server.host is 'no such host'"),
        (["serve", "--port", "0", "--event-log", "/no/such/log"], 2, "--event-log /no/such/log: cannot be opened"),
        (["inspect", "demo", "--memory", "much"], 2, "--memory is 'much'"),
        (["inspect", "demo", "--context", "0"], 2, "--context"),
        (["inspect", "/no/such/folder"], 3, "there is no such folder"),
        (["pull", "smollm3"], 3, "did you mean 'smollm2'"),
        (["chat", "--url", "http://127.0.0.1:1"], 1, "no daemon answers at http://127.0.0.1:1"),
        (["generate", "Hi", "--url", "127.0.0.1:1"], 1, "no daemon answers at http://127.0.0.1:1"),
        (["chat", "--api-key", "sk-1"], 2, "--api-key was given without --url"),
        (["bench", "--api-key", "sk-1"], 2, "--api-key was given without --url"),
        (["list", "/no/such/folder"], 2, "/no/such/folder: there is no such folder"),
        (["completion", "tcsh"], 2, "'tcsh' is not one of"),
    ],
)
def test_a_wrong_command_line_gets_its_code_and_one_line(capsys, arguments, code, said):
    assert run(arguments) == code
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


def test_a_taken_port_is_told_before_the_model_is_looked_for(capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert run(["serve", "/no/such/folder", "--port", str(port)]) == 4
    assert f"port {port} on 127.0.0.1 is taken" in capsys.readouterr().err


def test_a_listener_says_where_it_is():
    with listen("::1", 0) as listener:
        assert re.fullmatch(r"http://\[::1\]:\d+", url_of(listener))
    with listen("localhost", 0) as listener:
        assert re.fullmatch(r"http://(127\.0\.0\.1|\[::1\]):\d+", url_of(listener))


def test_an_address_of_another_machine_is_a_wrong_setting(capsys):
    assert run(["serve", "--host", "192.0.2.1"]) == 2
    assert "server.host is '192.0.2.1', which cannot be listened on" in capsys.readouterr().err


def test_a_context_beyond_the_models_is_refused(capsys, tiny_model):
    assert run(["inspect", str(tiny_model), "--context", "65537"]) == 2
    assert "expected at most 65536" in capsys.readouterr().err


def test_config_prints_where_each_value_came_from(capsys, monkeypatch):
    monkeypatch.setenv("DALSEGNO_ENGINE_MAX_CONTEXT", "99")
    assert run(["config", "--port", "9"]) == 0
    printed = capsys.readouterr().out
    assert "# flag --port\nport = 9" in printed
    assert "# env DALSEGNO_ENGINE_MAX_CONTEXT\nmax_context = 99" in printed
    assert '# default\nhost = "127.0.0.1"' in printed


def test_help_lists_what_is_built_and_needs_no_torch():
    script = "import sys; from server.cli import run; code = run(['--help']); sys.exit('torch' in sys.modules or code)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    first_words = {line.strip("│ ").split(" ")[0] for line in result.stdout.splitlines() if line.startswith("│")}
    assert {word for word in first_words if word.isalpha()} >= VERBS


def test_inspect_counts_the_conversations_that_fit(capsys, tiny_model):
    assert run(["inspect", str(tiny_model), "--memory", "1MiB", "--context", "512"]) == 0
    # 1 MiB less 416,736 bytes of weights, by 32 pages of 4 KiB and a state image of 5.5 KiB.
    lines = {line.split("  ")[0].strip(): line for line in capsys.readouterr().out.splitlines()}
    assert "4.00 KiB" in lines["KV page of 16 tokens"]
    assert "5.50 KiB" in lines["state image"]
    assert " 4," in lines["conversations in 1.00 MiB"]


def test_doctor_fails_as_serve_would(capsys, tiny_model):
    assert run(["doctor", str(tiny_model), "--port", "0"]) == 0
    assert run(["doctor", str(tiny_model), "--port", "0", "--kv-cache-mib", "99999999"]) == 5
    assert run(["doctor", "/no/such/folder", "--port", "0"]) == 3
    assert "bad   model" in capsys.readouterr().out


def test_generate_prints_the_answer_and_its_cost(capsys, tiny_model):
    options = ["--model", str(tiny_model), "--max-context", "512", "--kv-cache-mib", "4", "--temperature", "0"]
    assert run(["generate", "Hello", "--max-tokens", "6", *options]) == 0
    answer = capsys.readouterr().out
    assert len(answer.strip()) == 6
    assert run(["generate", "Hello", "--max-tokens", "6", "--json", *options]) == 0
    printed = capsys.readouterr().out
    assert f'"content": "{answer.strip()}"' in printed
    assert '"completion_tokens": 6' in printed


def test_quantize_and_then_the_copy_is_there(capsys, tiny_model, tmp_path):
    assert run(["quantize", str(tiny_model), str(tmp_path / "copy")]) == 0
    assert (tmp_path / "copy" / "config.json").is_file()
    assert "relative error" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "size"), [("8GiB", 8 * 2**30), ("80GB", 80 * 10**9), ("1.5 MiB", 3 * 2**19), ("512b", 512)]
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["8", "GiB", "8GiBs", "-1GiB", ""])
def test_what_is_not_a_size(text):
    with pytest.raises(ConfigurationError):
        parse_size(text)


def test_a_switch_takes_no_value(capsys):
    assert run(["config", "--no-prefix-reuse", "--device-state-slots", "3"]) == 0
    printed = capsys.readouterr().out
    assert "prefix_reuse = false" in printed
    assert "device_state_slots = 3" in printed
