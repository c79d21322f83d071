"""`python -m bench.gpu.build`: do flashinfer's CUDA modules for our shapes compile? It needs nvcc, and no GPU."""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.gpu.built import Built, print_table

ARCHITECTURES = ("9.0a", "12.0f")
"""CUDA's names of SM90 and SM120 as flashinfer writes them on such a GPU: `a` and `f` open what only these have."""
_RESULT_MARK = "build-result "
_HEADERS = {"curand_kernel.h": "nvidia-curand", "cublasLt.h": "nvidia-cublas"}
"""What flashinfer includes beside the runtime's headers, and NVIDIA's wheel that has it."""


@dataclass(frozen=True, slots=True)
class Module:
    """One extension module of flashinfer: `make` returns its JitSpec, which can build without loading."""

    name: str
    kind: str
    make: Callable[[], Any]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.build", description=__doc__)
    parser.add_argument(
        "--architectures", nargs="+", default=list(ARCHITECTURES), help="as CUDA writes them (default 9.0a 12.0f)"
    )
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="modules by name, such as 'norm'")
    jobs = max(1, (os.cpu_count() or 1) // 2)
    parser.add_argument("--jobs", type=int, default=jobs, help=f"compilers at a time (default half the cores: {jobs})")
    parser.add_argument("--folder", type=Path, help="where to build, and to keep what was built (default: thrown away)")
    parser.add_argument("--include", type=Path, nargs="+", default=[], help="folders of headers that the toolkit lacks")
    parser.add_argument(
        "--fetch-headers", action="store_true", help="get headers that are nowhere here from NVIDIA's wheels, by pip"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument("--list", action="store_true", help="only name the modules")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        return _build_here(options)
    if reason := _why_not():
        print(f"check-cuda-build: skipped: {reason}")
        return 0
    if options.list:
        print("\n".join(name for name, _ in _names(options)))
        return 0
    return _build_all(options)


def _why_not() -> str:
    if shutil.which("nvcc") is None:
        return "there is no nvcc here; install the CUDA toolkit to compile flashinfer's modules"
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer is not installed; pip install 'dalsegno[cuda]'"
    return ""


def _build_all(options: argparse.Namespace) -> int:
    """One process for each architecture: flashinfer reads it once, when it is imported."""
    results: list[Built] = []
    with tempfile.TemporaryDirectory(prefix="dalsegno-cuda-build-") as scratch:
        folder: Path = (options.folder or Path(scratch)).resolve()
        includes = _header_folders(options.include, folder if options.fetch_headers else None)
        for architecture in options.architectures:
            results += _in_child(options, architecture, folder, includes)
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    print_table("flashinfer's modules for our shapes", results)
    failed = [result for result in results if result.error]
    if not results:
        print("check-cuda-build: nothing was built")
    return 1 if failed or not results else 0


def _in_child(options: argparse.Namespace, architecture: str, folder: Path, includes: Sequence[Path]) -> list[Built]:
    command = [sys.executable, str(Path(__file__).resolve()), "--child", "--architectures", architecture]
    command += ["--jobs", str(options.jobs), "--only", *options.only]
    found: list[Built] = []
    environment = _environment(architecture, folder, includes)
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if not line.startswith(_RESULT_MARK):
                print(line, end="", flush=True)
                continue
            result = Built(**json.loads(line.removeprefix(_RESULT_MARK)))
            found.append(result)
            verdict = "FAILED" if result.error else f"{result.size_bytes / 2**20:.1f} MiB"
            print(f"{architecture} {result.module}: {result.seconds:.0f} s, {verdict}", flush=True)
    if child.returncode:
        found.append(Built(architecture, "flashinfer", "import", 0.0, 0, f"the build ended with {child.returncode}"))
    return found


def _environment(architecture: str, folder: Path, includes: Sequence[Path]) -> dict[str, str]:
    """For flashinfer's build: its own workspace, the toolkit behind nvcc, and a stub where no driver is installed."""
    environment = dict(os.environ)
    environment["FLASHINFER_CUDA_ARCH_LIST"] = architecture
    environment["FLASHINFER_WORKSPACE_BASE"] = str(folder)
    environment["FLASHINFER_LOGGING_LEVEL"] = "error"
    toolkit = _toolkit()
    environment["CUDA_HOME"] = str(toolkit)
    if includes:
        environment["CPATH"] = os.pathsep.join([*map(str, includes), *filter(None, [environment.get("CPATH")])])
    stubs = _driver_stub(toolkit, folder)
    if stubs is not None:
        flags = environment.get("FLASHINFER_EXTRA_LDFLAGS", "")
        environment["FLASHINFER_EXTRA_LDFLAGS"] = f"{flags} -L{stubs}".strip()
    return environment


def _toolkit() -> Path:
    """The folder of the nvcc that runs: the one on PATH may only be a script that calls it."""
    text = subprocess.run(["nvcc", "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True).stderr
    top = next((line.split("TOP=", 1)[1].strip() for line in text.splitlines() if "TOP=" in line), None)
    nvcc = shutil.which("nvcc")
    assert nvcc is not None, "_why_not has looked for it"
    return Path(top).resolve() if top else Path(nvcc).resolve().parents[1]


def _header_folders(given: Sequence[Path], fetch_into: Path | None) -> list[Path]:
    """Where the headers are that a bare compiler lacks: as told, in NVIDIA's wheels that are installed, or in wheels
    that pip fetches."""
    toolkit = _toolkit()
    spec = importlib.util.find_spec("nvidia")
    roots = [] if spec is None else [Path(root) for root in spec.submodule_search_locations or ()]
    candidates = [toolkit / "include", *given, *(path for root in roots for path in sorted(root.glob("*/include")))]
    folders: list[Path] = []
    suffix = (
        "-cu12" if "release 12." in subprocess.run(["nvcc", "--version"], capture_output=True, text=True).stdout else ""
    )
    for header, name in _HEADERS.items():
        package = name + suffix
        found = next((folder for folder in candidates if (folder / header).is_file()), None)
        if found is None and fetch_into is not None:
            found = _fetch(header, package, fetch_into)
        if found is None:
            print(f"{header} is nowhere here: pip install {package}, or --include, or --fetch-headers", flush=True)
        elif found != toolkit / "include" and found not in folders:
            folders.append(found)
    return folders


def _fetch(header: str, package: str, folder: Path) -> Path | None:
    """Only the headers of a wheel are kept: its libraries are hundreds of megabytes."""
    unpacked = folder / "headers"
    kept = next(unpacked.rglob(header), None)
    if kept is not None:
        return kept.parent
    print(f"{header} is nowhere here: pip fetches {package}", flush=True)
    with tempfile.TemporaryDirectory(prefix="dalsegno-wheel-") as wheels:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", wheels, package]
        if subprocess.run(command).returncode:
            return None
        for wheel in Path(wheels).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(unpacked, [name for name in archive.namelist() if "/include/" in name])
    found = next(unpacked.rglob(header), None)
    return None if found is None else found.parent


def _driver_stub(toolkit: Path, folder: Path) -> Path | None:
    """A folder with an empty libcuda.so where neither the toolkit nor a driver has one: it only names what is linked
    to."""
    if (toolkit / "lib64" / "stubs" / "libcuda.so").is_file():
        return None
    stubs = folder / "stubs"
    stubs.mkdir(parents=True, exist_ok=True)
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return None
    subprocess.run(
        [compiler, "-shared", "-x", "c", os.devnull, "-Wl,-soname,libcuda.so.1", "-o", str(stubs / "libcuda.so")],
        check=True,
    )
    return stubs


def _build_here(options: argparse.Namespace) -> int:
    architecture = options.architectures[0]
    os.environ["MAX_JOBS"] = str(options.jobs)
    wanted = {name for name, _ in _names(options)}
    for module in modules(architecture):
        if module.name not in wanted:
            continue
        started = time.perf_counter()
        size_bytes, error = 0, ""
        try:
            spec = module.make()
            spec.build()
            size_bytes = spec.jit_library_path.stat().st_size
        except Exception as problem:  # noqa: BLE001 - one module that does not compile must not hide the others
            error = _tail(str(problem))
        result = Built(architecture, module.name, module.kind, time.perf_counter() - started, size_bytes, error)
        print(_RESULT_MARK + json.dumps(asdict(result)), flush=True)
    return 0


def modules(architecture: str) -> list[Module]:
    """Those that the backend loads on this architecture, the quick ones first. Imports flashinfer."""
    import torch
    from flashinfer.jit import activation, norm, page, rope, sampling
    from flashinfer.jit.attention import modules as attention

    bf16, fp8, index = torch.bfloat16, torch.float8_e4m3fn, torch.int32
    # flashinfer's wrapper builds this for pages whose keys and values have equal strides, as ours have; it is not
    # public, and the public one is the same kernel with more cases.
    fa2 = getattr(attention, "_gen_batch_prefill_primary_module", None) or attention.gen_batch_prefill_module

    def decode(kv: torch.dtype, dim: int) -> Callable[[], Any]:
        return lambda: attention.gen_batch_decode_module(bf16, kv, bf16, index, dim, dim, 0, False, False)

    def prefill(kv: torch.dtype, dim: int) -> Callable[[], Any]:
        return lambda: fa2("fa2", bf16, kv, bf16, index, dim, dim, 0, False, False, False)

    def hopper(dim: int) -> Callable[[], Any]:
        return lambda: attention.gen_batch_prefill_module(
            "fa3", bf16, bf16, bf16, index, dim, dim, 0, False, False, False
        )

    makers: dict[str, Callable[[], Any]] = {
        "norm": norm.gen_norm_module,
        "rope": rope.gen_rope_module,
        "silu_and_mul": lambda: activation.gen_act_and_mul_module("silu"),
        "append": page.gen_page_module,
        "sampling": sampling.gen_sampling_module,
    }
    for dim in (256, 128):
        for kv in (bf16, fp8):
            name = "bf16" if kv is bf16 else "fp8"
            makers[f"decode_{name}_{dim}"] = decode(kv, dim)
            makers[f"prefill_fa2_{name}_{dim}"] = prefill(kv, dim)
        if architecture.startswith("9."):
            makers[f"prefill_fa3_bf16_{dim}"] = hopper(dim)
    return [Module(name, name.split("_")[0], makers[name]) for name, _ in catalog(architecture)]


def compile_modules(architecture: str) -> tuple[int, float]:
    """Build those that a model with grouped queries loads on the GPU that is here, at once and on all cores, where
    flashinfer will look for them: how many, and seconds. Imports flashinfer; raises what its build raises."""
    from flashinfer.jit.core import build_jit_specs

    specs = [module.make() for module in modules(architecture) if module.kind != "decode"]
    started = time.perf_counter()
    build_jit_specs(specs, skip_prebuilt=True)
    return len(specs), time.perf_counter() - started


def catalog(architecture: str) -> list[tuple[str, str]]:
    """(name, kind) of every module, without flashinfer: what `--list` prints and `--only` chooses from."""
    attention = [
        f"{kernel}_{kv}_{dim}"
        for dim in (256, 128)
        for kernel, kv in (
            ("decode", "bf16"),
            ("decode", "fp8"),
            ("prefill_fa2", "bf16"),
            ("prefill_fa2", "fp8"),
            *([("prefill_fa3", "bf16")] if architecture.startswith("9.") else []),
        )
    ]
    return [(name, name.split("_")[0]) for name in ("norm", "rope", "silu_and_mul", "append", "sampling", *attention)]


def _names(options: argparse.Namespace) -> list[tuple[str, str]]:
    found = {
        name: kind
        for architecture in options.architectures
        for name, kind in catalog(architecture)
        if any(fnmatch.fnmatch(name, pattern) for pattern in options.only)
    }
    return list(found.items())


def _tail(text: str, lines: int = 30) -> str:
    """The compiler's errors, or else its last words."""
    all_lines = text.splitlines()
    errors = [line for line in all_lines if "error" in line.lower() and len(line) < 1000]
    return "\n".join((errors or [line[:1000] for line in all_lines])[-lines:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
