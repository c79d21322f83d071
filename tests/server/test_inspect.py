"""`dalsegno inspect`: what a checkpoint is, and the memory plan of a device that need not be here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engine.gpus import KNOWN_GPUS
from server.cli import run
from tests.engine.sparse_checkpoint import write_sparse_27b
from tests.server.printed import printed_bytes

pytestmark = pytest.mark.usefixtures("quiet_logging")

GIB = 2**30
STATE_IMAGE_BYTES = 48 * (48 * 128 * 128 * 4 + 10240 * 3 * 2)


@pytest.fixture(scope="module")
def big_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sparse_27b(tmp_path_factory.mktemp("models") / "27b")


@pytest.fixture
def planned(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Runs `inspect` and gives the bytes that it printed, by line."""
    monkeypatch.setenv("COLUMNS", "300")

    def plan(*arguments: str) -> dict[str, int]:
        assert run(["inspect", *arguments]) == 0
        return printed_bytes(capsys.readouterr().out)

    return plan


@pytest.mark.parametrize("target", [["--gpu", "h200"], ["--gpu", "9.0", "--memory", "80GB"], ["--device", "cpu"]])
def test_the_lines_of_a_plan_add_up_to_the_device(planned, tiny_model, target):
    printed = planned(str(tiny_model), *target)
    outer = [name for name in list(printed)[: list(printed).index("while loading")] if not name.startswith("  ")]
    assert printed["device"] == sum(printed[name] for name in outer[1:])
    assert printed["weights"] == sum(size for name, size in printed.items() if name.startswith("  "))


def test_memory_is_all_that_a_gpu_has(planned, tiny_model):
    assert planned(str(tiny_model), "--gpu", "h200", "--memory", "24GiB")["device"] == 24 * GIB


def test_the_settings_of_the_engine_and_the_cache_apply(planned, big_model):
    machine = [str(big_model), "--gpu", "h200", "--ram", "64GiB"]
    plain = planned(*machine)
    fewer = planned(*machine, "--max-concurrency", "2", "--device-state-slots", "4", "--host-cache-mib", "1024")
    assert fewer["state slots"] == 6 * STATE_IMAGE_BYTES
    assert fewer["host cache"] == GIB
    assert fewer["KV pages"] > plain["KV pages"]


def test_pages_of_fp8_take_half(planned, big_model):
    machine = [str(big_model), "--gpu", "h200", "--ram", "64GiB", "--kv-pages", "1000"]
    assert planned(*machine)["KV pages"] == 2 * planned(*machine, "--kv-cache-dtype", "fp8")["KV pages"]


def test_fp8_layers_are_unpacked_where_activations_stay_in_bf16(planned, big_model):
    machine = [str(big_model), "--gpu", "h200", "--ram", "64GiB"]
    assert planned(*machine, "--activations", "bf16")["  unpacked"] == 2 * planned(*machine)["  fp8"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--device", "cuda"], 2, "or name a GPU to plan for, e.g. --gpu h200"),
        (
            ["--gpu", "voodoo2"],
            2,
            "--gpu is 'voodoo2'; expected rtx4090, rtx5090, h100, rtxpro6000, h200, or a compute",
        ),
        (["--gpu", "9.0"], 2, "give it with --memory"),
        (["--gpu", "7.5", "--memory", "16GB"], 2, "expected 8.0 or newer"),
        (["--gpu", "h200", "--device", "cpu"], 2, "--gpu is 'h200', but --device is cpu"),
        (["--gpu", "h200", "--ram", "lots"], 2, "--ram is 'lots'"),
        (["--gpu", "h200", "--memory", "20GB"], 5, "keeping the weights on NVIDIA H200 needs 20,217,"),
        (["--gpu", "h200", "--memory", "22GB"], 5, "the largest block of layers twice over, needs 21,6"),
        (["--gpu", "h200", "--memory", "24GB"], 5, "the recurrent state of 24 slots needs 3,694,657,536 bytes"),
        (["--gpu", "rtx5090", "--kv-pages", "2000"], 5, "needs 8,388,608,000 bytes but"),
        (["--gpu", "rtx5090", "--max-context", "131072"], 5, "lower --max-context"),
        (["--gpu", "h200", "--ram", "64GiB", "--host-cache-mib", "99999"], 5, "lower --host-cache-mib"),
    ],
)
def test_what_cannot_be_gets_its_code_and_says_what_it_needs(capsys, big_model, arguments, code, said):
    assert run(["inspect", str(big_model), *arguments]) == code
    assert said in capsys.readouterr().err


def test_the_help_names_each_gpu_that_is_known(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    run(["inspect", "--help"])
    assert f"{', '.join(KNOWN_GPUS)}, or a" in capsys.readouterr().out


def test_without_a_device_the_conversations_are_counted_and_no_plan_is_made(capsys, tiny_model):
    assert run(["inspect", str(tiny_model), "--memory", "1MiB", "--context", "512", "--kv-cache-dtype", "fp8"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"KV page of 16 tokens +1\.00 KiB", printed)
    assert "while loading" not in printed
