"""Pages and state images move between the device and host memory to the bit, whatever their sizes and layouts."""

import itertools

import pytest
import torch

from cache import Copy, CopyObject, Tier, UnitHandle
from engine.models.config import AttentionConfig, GatedDeltaNetConfig, LayerKind, ModelConfig, RopeConfig
from engine.storage import HostMemory, ModelState, Storage, allocate_host_memory, allocate_state, cut_image

PAGES, SLOTS, HOST_UNITS = 5, 4, 23
CPU = torch.device("cpu")


def config(*, head_dim=8, kv_heads=2, conv_kernel=4, value_dim=8, attention_layers=2, linear_layers=3) -> ModelConfig:
    kinds = (LayerKind.LINEAR_ATTENTION,) * linear_layers + (LayerKind.FULL_ATTENTION,) * attention_layers
    return ModelConfig(
        architecture="qwen3_5" if linear_layers else "qwen3",
        vocab_size=10,
        hidden_size=16,
        intermediate_size=16,
        layer_kinds=kinds,
        attention=AttentionConfig(num_q_heads=kv_heads, num_kv_heads=kv_heads, head_dim=head_dim),
        gated_delta_net=GatedDeltaNetConfig(
            num_k_heads=1, num_v_heads=3, key_head_dim=5, value_head_dim=value_dim, conv_kernel_size=conv_kernel
        )
        if linear_layers
        else None,
        rope=RopeConfig(theta=10000.0, rotary_dim=2),
        rms_norm_eps=1e-6,
        max_position_embeddings=64,
        has_tied_embeddings=True,
    )


SHAPES = {
    "even": {"page_size": 4},
    "odd": {"page_size": 3, "head_dim": 7, "kv_heads": 3, "value_dim": 11, "conv_kernel": 3},
    "a state of many pages": {"page_size": 1, "head_dim": 2, "kv_heads": 1, "attention_layers": 1},
    "a state smaller than a page": {"page_size": 32, "head_dim": 32, "linear_layers": 1},
}


def fill_with_noise(state: ModelState) -> None:
    """Bits of every kind, NaNs among them: what is compared below is bytes."""
    torch.manual_seed(3)
    for tensor in (*state.kv, *state.conv, *state.recurrent):
        kind = {1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize]
        tensor.copy_(torch.randint(-(2**15), 2**15, tensor.shape).to(kind).view(tensor.dtype))


def make(dtype, *, page_size=4, host_units=HOST_UNITS, **sizes) -> Storage:
    dtype, kv_dtype = (torch.bfloat16, dtype) if dtype == torch.float8_e4m3fn else (dtype, None)
    options = {"page_size": page_size, "dtype": dtype, "kv_dtype": kv_dtype, "device": CPU}
    state = allocate_state(config(**sizes), num_pages=PAGES, num_slots=SLOTS, **options)
    fill_with_noise(state)
    unit_bytes = Storage(state).image_bytes(CopyObject.KV_PAGE)
    return Storage(state, allocate_host_memory(max(host_units, 2 * state_units(state, unit_bytes)), unit_bytes, CPU))


def state_units(state: ModelState, unit_bytes: int) -> int:
    return -(-Storage(state).image_bytes(CopyObject.STATE) // unit_bytes)


def image(storage: Storage, what: CopyObject, unit: int) -> list[bytes]:
    """The unit's bytes, tensor by tensor."""
    state = storage.state
    tensors = state.kv if what is CopyObject.KV_PAGE else (*state.conv, *state.recurrent)
    return [tensor[unit].contiguous().flatten().view(torch.uint8).numpy().tobytes() for tensor in tensors]


def everything(storage: Storage) -> dict[tuple[CopyObject, int], list[bytes]]:
    units = [(CopyObject.KV_PAGE, page) for page in range(PAGES)]
    units += [(CopyObject.STATE, slot) for slot in range(SLOTS)] if storage.state.conv else []
    return {unit: image(storage, *unit) for unit in units}


def device(unit: int) -> UnitHandle:
    return UnitHandle(Tier.DEVICE, (unit,))


def host_of(storage: Storage, what: CopyObject) -> UnitHandle:
    """As many units as it takes, from the end and never side by side, so far as there are enough."""
    unit_bytes = storage.image_bytes(CopyObject.KV_PAGE)
    count = 1 if what is CopyObject.KV_PAGE else -(-storage.image_bytes(what) // unit_bytes)
    order = itertools.chain(range(1, len(storage._host), 2), range(0, len(storage._host), 2))
    return UnitHandle(Tier.HOST, tuple(itertools.islice(order, count))[::-1])


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=["float32", "bfloat16", "fp8 pages"])
def dtype(request):
    return request.param


@pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("what", CopyObject)
class TestEachObject:
    def test_comes_back_from_host_memory_to_the_bit_and_nothing_else_changes(self, dtype, sizes, what):
        storage = make(dtype, **sizes)
        expected, host = everything(storage), host_of(storage, what)
        storage.run([Copy(what, device(3), host)])
        assert everything(storage) == expected
        storage.run([Copy(what, host, device(1))])
        expected[what, 1] = expected[what, 3]
        assert everything(storage) == expected

    def test_is_copied_on_the_device_to_the_bit_and_nothing_else_changes(self, dtype, sizes, what):
        storage = make(dtype, **sizes)
        expected = everything(storage)
        storage.run([Copy(what, device(2), device(0))])
        expected[what, 0] = expected[what, 2]
        assert everything(storage) == expected

    def test_writes_only_the_host_units_that_it_was_given(self, dtype, sizes, what):
        storage = make(dtype, **sizes)
        storage._host.fill(171)
        host = host_of(storage, what)
        storage.run([Copy(what, device(0), host)])
        others = sorted(set(range(len(storage._host))) - set(host.units))
        assert (storage._host[others] == 171).all()

    def test_says_how_many_bytes_were_moved(self, dtype, sizes, what):
        storage = make(dtype, **sizes)
        host = host_of(storage, what)
        moved = storage.run([Copy(what, device(0), host), Copy(what, host, device(1))])
        assert moved == 2 * sum(map(len, image(storage, what, 0)))


def test_copies_run_in_their_order(dtype):
    storage = make(dtype)
    expected, page = everything(storage), CopyObject.KV_PAGE
    host = UnitHandle(Tier.HOST, (4,))
    steps = [(device(0), host), (device(1), device(0)), (host, device(1))]
    storage.run(Copy(page, source, destination) for source, destination in steps)
    assert everything(storage)[page, 0] == expected[page, 1]
    assert everything(storage)[page, 1] == expected[page, 0]


def test_a_model_without_states_uses_host_memory_for_its_pages(dtype):
    storage = make(dtype, linear_layers=0)
    expected, host = image(storage, CopyObject.KV_PAGE, 4), UnitHandle(Tier.HOST, (HOST_UNITS - 1,))
    storage.run([Copy(CopyObject.KV_PAGE, device(4), host), Copy(CopyObject.KV_PAGE, host, device(0))])
    assert image(storage, CopyObject.KV_PAGE, 0) == expected


@pytest.mark.parametrize(
    ("copy", "message"),
    [
        (Copy(CopyObject.STATE, device(0), UnitHandle(Tier.HOST, (1,))), r"state takes \d+ host units, 1 were given"),
        (Copy(CopyObject.KV_PAGE, device(0), UnitHandle(Tier.HOST, (1, 2))), r"kv_page takes 1 host units, 2"),
        (Copy(CopyObject.KV_PAGE, UnitHandle(Tier.HOST, (0,)), UnitHandle(Tier.HOST, (1,))), "from host to host"),
        (Copy(CopyObject.KV_PAGE, UnitHandle(Tier.DISK, (0,)), device(1)), "from disk to device"),
    ],
)
def test_a_copy_that_makes_no_sense_is_refused(copy, message):
    storage = make(torch.float32, page_size=1)
    with pytest.raises(ValueError, match=message):
        storage.run([copy])


def test_host_units_of_another_size_are_refused_with_both_sizes():
    state = make(torch.float32).state
    with pytest.raises(ValueError, match=r"has 12 bytes, expected those of a KV page: \d+"):
        Storage(state, HostMemory(torch.zeros((3, 12), dtype=torch.uint8)))


def test_without_host_memory_the_device_is_copied_within():
    storage = Storage(make(torch.float32).state)
    expected = image(storage, CopyObject.STATE, 1)
    storage.run([Copy(CopyObject.STATE, device(1), device(2))])
    assert image(storage, CopyObject.STATE, 2) == expected


@pytest.mark.parametrize(
    ("rows", "unit_bytes", "expected"),
    [
        ([4], 4, [(0, 0, 0, 0, 4)]),
        ([3, 5], 4, [(0, 0, 0, 0, 3), (1, 0, 0, 3, 1), (1, 1, 1, 0, 4)]),
        ([9], 4, [(0, 0, 0, 0, 4), (0, 4, 1, 0, 4), (0, 8, 2, 0, 1)]),
        ([], 4, []),
    ],
)
def test_an_image_is_cut_where_units_end(rows, unit_bytes, expected):
    assert [tuple(piece) for piece in cut_image(rows, unit_bytes)] == expected


def test_untouched_host_memory_is_zero():
    assert not allocate_host_memory(2, 8, CPU).units.any()
