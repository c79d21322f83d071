"""`dalsegno doctor` about a GPU: what is there, what is missing, what to do."""

import pytest

from engine.kernels import KernelChoice
from engine.kernels.flashinfer.library import load_library
from server.commands import gpu_checks
from server.commands.findings import Verdict
from server.commands.gpu_checks import check_flashinfer, check_gpu, check_triton, kernel_findings, linear_findings
from server.settings import EngineSettings, Settings
from tests.machine import BLACKWELL, HOPPER, TURING, pretend


def told(findings):
    return [f"{finding.verdict} {finding.subject}: {finding.what} | {finding.advice}" for finding in findings]


@pytest.mark.parametrize(
    ("here", "said"),
    [
        (
            {"gpu": HOPPER},
            "ok gpu: H200 (sm90, 132 multiprocessors), 1.0 of 140.0 GiB free; torch for CUDA 13.0, driver 580.95.05",
        ),
        ({"gpu": TURING}, "note gpu: a driver (580.95.05), but idle | a GPU that these kernels run on is missing: T4"),
        ({"cuda": None}, "note gpu: a driver (580.95.05), but idle | a GPU that torch can use is missing: torch"),
        ({"cuda": None, "has_driver": False}, "note gpu: none that torch can use | the CPU serves"),
    ],
)
def test_the_gpu_is_named_or_why_it_is_idle(monkeypatch, here, said):
    pretend(monkeypatch, **here)
    [line] = told(check_gpu(Settings()))
    assert line.startswith(said)


@pytest.mark.parametrize(
    ("here", "nvcc", "said"),
    [
        ({"without": ["flashinfer"]}, None, ["note flashinfer: not installed | only a GPU needs it"]),
        (
            {"gpu": HOPPER, "without": ["flashinfer"]},
            None,
            ["note flashinfer: not installed | pip install 'dalsegno[cuda]': without it the CPU serves"],
        ),
        ({}, None, ["ok flashinfer", "note nvcc: none | only a GPU needs it"]),
        ({"gpu": HOPPER}, None, ["ok flashinfer", "note nvcc: none | flashinfer compiles its kernels at first use"]),
        ({"gpu": HOPPER}, "13.0", ["ok flashinfer", "ok nvcc: {nvcc}, CUDA 13.0 | flashinfer compiles with it"]),
    ],
)
def test_flashinfer_and_its_compiler_are_named_or_what_to_install(monkeypatch, tmp_path, here, nvcc, said):
    pretend(monkeypatch, **here)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    program = tmp_path / "bin" / "nvcc"
    if nvcc is not None:
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\necho Cuda compilation tools, release {nvcc}, V{nvcc}.48\n")
        program.chmod(0o755)
    lines = told(check_flashinfer(Settings()))
    assert len(lines) == len(said)
    for line, expected in zip(lines, said, strict=True):
        assert line.startswith(expected.format(nvcc=program))


@pytest.mark.parametrize(
    ("variable", "place"), [("CUDA_HOME", "home/bin"), ("CUDA_PATH", "home/bin"), ("PATH", "path")]
)
def test_the_compiler_is_looked_for_where_flashinfer_looks(monkeypatch, tmp_path, variable, place):
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setenv(variable, str(tmp_path / place.split("/")[0]))
    program = tmp_path / place / "nvcc"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert gpu_checks.find_nvcc() == program


@pytest.mark.parametrize(
    ("here", "said"),
    [
        ({"gpu": HOPPER}, "ok triton: "),
        ({"gpu": HOPPER, "without": ["triton"]}, "note triton: not installed | pip install 'dalsegno[cuda]' brings it"),
        ({"without": ["triton"]}, "note triton: not installed | only a GPU needs it"),
    ],
)
def test_triton_is_named_or_what_brings_it(monkeypatch, here, said):
    pretend(monkeypatch, **here)
    [line] = told(check_triton(Settings()))
    assert line.startswith(said)


def test_a_kernel_that_is_not_the_first_choice_is_noted_with_the_reason():
    findings = list(kernel_findings((KernelChoice("rope", "flashinfer"), KernelChoice("conv", "torch", "none has it"))))
    assert [finding.verdict for finding in findings] == [Verdict.OK, Verdict.NOTE]
    assert told(findings)[1] == "note kernel: conv: torch | none has it"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what flashinfer's imports say of each other
@pytest.mark.parametrize(
    ("gpu", "activations", "said"),
    [
        (HOPPER, "auto", "note kernel: linear (nvfp4, with activation scales): nvfp4 w4a16 (triton) | mm_fp4 has no"),
        (BLACKWELL, "auto", "ok kernel: linear (nvfp4, with activation scales): nvfp4 w4a4 (flashinfer mm_fp4)"),
        (
            BLACKWELL,
            "bf16",
            "note kernel: linear (nvfp4, with activation scales): nvfp4 w4a16 (flashinfer mm_bf16_fp4) | activ",
        ),
    ],
)
def test_what_multiplies_by_each_format_of_weights_is_named(monkeypatch, gpu, activations, said):
    load_library()  # the real one, while this machine is still itself
    pretend(monkeypatch, gpu=gpu)
    lines = told(linear_findings(Settings(engine=EngineSettings(activations=activations))))
    assert [line for line in lines if line.startswith(said)], lines
