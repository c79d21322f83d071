"""An engine put together as on a GPU: flashinfer's calls, decode steps that are replayed, copies that end late.

Only what CUDA itself would do is another's: flashinfer's references compute, a tape is the graph, a late stream copies.
"""

from random import Random

import pytest
import torch

from engine import graphs, loading
from engine.engine import Engine, EngineOptions
from engine.kernels.flashinfer.backend import FlashinferKernels
from tests.engine.kernels.flashinfer.reference_library import ReferenceLibrary
from tests.engine.kernels.flashinfer.rig import CPU, HOPPER
from tests.engine.kernels.flashinfer.tape import TapedLibrary
from tests.engine.loop.test_host_tier import PROMPTS, answers, with_one_in_host
from tests.engine.loop.test_late_copies import PacedStream
from tests.engine.models.cases import qwen3_5
from tests.engine.models.driver import make_twin
from tests.engine.test_graphs import TapeRecorder

pytestmark = pytest.mark.anyio

OPTIONS = {
    "max_concurrency": 2,
    "prefill_chunk": 64,
    "page_size": 4,
    "kv_pages": 64,
    "max_context": 128,
    "device_state_slots": 1,
    "host_cache_mib": 8,
}


@pytest.fixture(scope="module")
def folder(tiny_folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("hybrid")
    make_twin(qwen3_5(head_dim=64, linear_key_head_dim=128, linear_value_head_dim=128), path)
    (path / "tokenizer.json").write_bytes((tiny_folder / "tokenizer.json").read_bytes())
    return path


@pytest.fixture
def gpu(monkeypatch):
    """What was made in place of CUDA's."""
    made = {}
    library = TapedLibrary(ReferenceLibrary(torch.float32))

    def select(_backend, config, activations):
        return FlashinferKernels(CPU, torch.float32, config, library, HOPPER, activations)

    def record(_device):
        made["recorder"] = TapeRecorder(library)
        return made["recorder"]

    def open_stream(_device):
        made["stream"] = PacedStream(Random(3))
        return made["stream"]

    monkeypatch.setattr(loading, "select_kernels", select)
    monkeypatch.setattr(loading, "_is_on_gpu", lambda _kernels: True)
    monkeypatch.setattr(loading, "CudaStream", open_stream)
    monkeypatch.setattr(graphs, "CudaRecorder", record)
    return made


async def test_it_answers_as_on_the_cpu_also_what_was_restored(folder, gpu, monkeypatch):
    engine = Engine.load(folder, EngineOptions(**OPTIONS))
    assert {each.kernel: each.implementation for each in engine.kernel_choices}["decode step"].startswith("CUDA graphs")
    await engine.start()
    restored = await with_one_in_host(engine)
    asked = [*PROMPTS, restored]
    tokens, reuse = await answers(engine, asked, max_tokens=6)
    assert reuse[-1].cached_tokens > 0
    assert engine.check() == []
    await engine.stop()
    assert gpu["recorder"].replayed > 20
    assert gpu["stream"].late > 0

    monkeypatch.undo()
    plain = Engine.load(folder, EngineOptions(**OPTIONS, prefix_reuse=False))
    await plain.start()
    expected, _ = await answers(plain, asked, max_tokens=6)
    await plain.stop()
    assert tokens == expected


async def test_it_tells_what_serves_each_layer(folder, gpu, caplog):
    with caplog.at_level("INFO", "dalsegno.engine"):
        Engine.load(folder, EngineOptions(**OPTIONS))
    told = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("linear layers: model.layers.*.mlp.gate_proj+up_proj: dense x 4") for line in told)
    assert any(line.startswith("kernels: decode step by CUDA graphs for 1 to 2 sequences") for line in told)
    assert any(line.startswith("warmed up in") for line in told)
