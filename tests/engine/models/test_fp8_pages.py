"""Models over fp8 pages: which scales reach the kernels, and how far the answer is from that over plain pages."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.kernels import UNSCALED, KvScales, StateCapture
from engine.kernels.torch import TorchKernels
from engine.models.registry import load_model
from tests.engine.models import cases
from tests.engine.models.driver import Driver, Sequence, make_twin
from tests.engine.weights.published import write_published

FP8 = torch.float8_e4m3fn
PROMPT = [token * 37 % 256 for token in range(1, 200)]
SPELLINGS = [
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("k_scale", "v_scale"),
    ("attn.k_scale", "attn.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
]


class Recording(TorchKernels):
    """Keeps the scales of every call."""

    def __init__(self):
        super().__init__()
        self.written, self.read = [], []

    def append_paged_kv(self, k, v, kv_cache, scales=UNSCALED):
        self.written.append(scales)
        super().append_paged_kv(k, v, kv_cache, scales)

    def paged_attention(self, q, kv_cache, scale, scales=UNSCALED):
        self.read.append(scales)
        return super().paged_attention(q, kv_cache, scale, scales)


def add_scales(folder, names, layers) -> list[KvScales]:
    """Other scales for the keys and the values of each layer of `layers`."""
    path = folder / "model.safetensors"
    tensors, scales = load_file(path), []
    for i, layer in enumerate(layers):
        scales.append(KvScales(k=0.25 + i, v=0.5 + i))
        for name, value in zip(names, (scales[-1].k, scales[-1].v), strict=True):
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor(value)
    save_file(tensors, path, metadata={"format": "pt"})
    return scales


def test_a_model_says_whether_its_checkpoint_has_kv_scales(tmp_path):
    make_twin(cases.qwen3(), tmp_path)
    assert not load_model(tmp_path, TorchKernels()).has_kv_scales
    add_scales(tmp_path, SPELLINGS[0], range(4))
    assert load_model(tmp_path, TorchKernels()).has_kv_scales


def scales_used(folder, kv_dtype) -> list[KvScales]:
    kernels = Recording()
    driver = Driver(load_model(folder, kernels), kernels, kv_dtype=kv_dtype)
    driver.step([(driver.open(), [1, 2, 3])])
    assert kernels.written == kernels.read
    return kernels.read


@pytest.mark.parametrize("names", SPELLINGS)
@pytest.mark.parametrize("architecture", cases.MAIN)
def test_each_layers_scales_go_to_fp8_pages_and_to_no_others(tmp_path, architecture, names):
    make_twin(cases.MAIN[architecture](), tmp_path)
    layers = [3] if architecture == "qwen3_5" else range(4)
    expected = add_scales(tmp_path, names, layers)
    assert scales_used(tmp_path, FP8) == expected
    assert scales_used(tmp_path, None) == [UNSCALED] * len(expected)


@pytest.mark.parametrize("architecture", cases.MAIN)
def test_fp8_pages_of_a_checkpoint_without_scales_use_one(tmp_path, architecture):
    make_twin(cases.MAIN[architecture](), tmp_path)
    assert set(scales_used(tmp_path, FP8)) == {KvScales(1.0, 1.0)}


def test_one_scale_for_keys_and_values_serves_both(tmp_path):
    make_twin(cases.qwen3_5(), tmp_path)
    add_scales(tmp_path, ("kv_scale", "kv_scale"), [3])
    assert scales_used(tmp_path, FP8) == [KvScales(0.5, 0.5)]


@pytest.mark.parametrize("layout", ["llm-compressor mixed", "modelopt mixed with kv scales"])
def test_the_scales_of_a_published_layout_go_to_fp8_pages(tmp_path, layout):
    published = write_published(layout, tmp_path)
    assert scales_used(tmp_path, FP8) == [KvScales(*pair) for pair in published.kv_scales]


@pytest.mark.parametrize("names", [None, SPELLINGS[0]])
def test_the_answer_over_fp8_pages_is_near_that_over_plain_ones(tmp_path, names):
    make_twin(cases.qwen3_5(), tmp_path)
    if names is not None:
        # A power of two: what it scales is rounded to the same values, but for those beyond fp8's range.
        add_scales(tmp_path, names, [3])
    kernels = TorchKernels()
    model = load_model(tmp_path, kernels)
    logits = []
    for kv_dtype in (None, FP8):
        driver = Driver(model, kernels, kv_dtype=kv_dtype)
        sequence = driver.open()
        steps = [driver.step([(sequence, piece)]) for piece in (PROMPT[:70], PROMPT[70:], [5], [6])]
        logits.append(torch.cat(steps))
    plain, fp8 = logits
    error = ((fp8 - plain).norm() / plain.norm()).item()
    # Half or twice a key's scale makes it 20 to 40 times as much.
    assert 1e-5 < error < 0.01


@pytest.mark.parametrize("frontier", [64, 128])
def test_over_fp8_pages_a_hit_answers_as_a_cold_run(tmp_path, frontier):
    make_twin(cases.qwen3_5(), tmp_path)
    kernels = TorchKernels()
    driver = Driver(load_model(tmp_path, kernels), kernels, kv_dtype=FP8)
    cold, image = driver.open(), driver.free_slots.pop()
    expected = driver.step([(cold, PROMPT)], captures=(StateCapture(0, frontier, image),))
    # The pages in front of the frontier are the other sequence's own.
    hit = Sequence(slot=image, pages=cold.pages[: frontier // driver.page_size], length=frontier)
    got = driver.step([(hit, PROMPT[frontier:])])
    # A key that lies on the border of two fp8 values may fall to the other one: a few elements of thousands.
    torch.testing.assert_close(got, expected, atol=5e-3, rtol=5e-3)
