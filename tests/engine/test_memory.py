"""The memory plan: what is given to pages and slots, and what is said when it does not fit."""

from dataclasses import replace

import pytest

from engine.errors import InsufficientMemoryError, UnusableOptionError
from engine.memory import (
    LEAST_CHECKPOINT_SLOTS,
    MAX_AUTOMATIC_PAGES,
    TOKENS_PER_CHECKPOINT,
    Ram,
    cgroup_headrooms,
    cgroup_limits,
    plan_memory,
)
from engine.models.config import AttentionConfig, GatedDeltaNetConfig, LayerKind, ModelConfig, RopeConfig
from engine.options import EngineOptions

GIB = 2**30
CONFIG = ModelConfig(
    architecture="qwen3_5",
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=128,
    layer_kinds=(LayerKind.LINEAR_ATTENTION,) * 3 + (LayerKind.FULL_ATTENTION,),
    attention=AttentionConfig(num_q_heads=4, num_kv_heads=2, head_dim=64),
    gated_delta_net=GatedDeltaNetConfig(
        num_k_heads=2, num_v_heads=4, key_head_dim=128, value_head_dim=128, conv_kernel_size=4
    ),
    rope=RopeConfig(theta=10000.0, rotary_dim=64),
    rms_norm_eps=1e-6,
    max_position_embeddings=4096,
    has_tied_embeddings=True,
)
DEEP = replace(CONFIG, layer_kinds=CONFIG.layer_kinds * 16)
PAGE_BYTES = 16 * 2 * 2 * 64 * 2
SLOT_BYTES = 3 * (4 * 128 * 128 * 4 + (2 * 256 + 512) * 3 * 2)


RAM = Ram(total_bytes=8 * GIB, available_bytes=4 * GIB)


def plan(available_bytes=GIB, *, config=CONFIG, device_type="cpu", ram=RAM, **options):
    return plan_memory(
        config, EngineOptions(**options), available_bytes, element_bytes=2, device_type=device_type, ram=ram
    )


def test_slots_are_those_of_the_running_and_those_of_the_checkpoints():
    memory = plan(max_concurrency=3, device_state_slots=5)
    assert (memory.state_slots, memory.state_bytes) == (8, 8 * SLOT_BYTES)


def test_automatic_pages_hold_several_full_contexts_for_each_seat_where_they_fit():
    memory = plan(max_concurrency=2)
    assert memory.kv_page_bytes == PAGE_BYTES
    assert (memory.kv_pages, memory.full_contexts) == (2 * 4 * 256, 8)


def test_automatic_pages_take_a_share_of_little_memory():
    memory = plan(available_bytes=64 * 2**20)
    left = 64 * 2**20 - memory.step_buffer_bytes - memory.state_bytes
    assert memory.kv_bytes == pytest.approx(0.4 * left, abs=PAGE_BYTES)
    assert memory.max_context_tokens == 4096 or memory.kv_pages * 16 == memory.max_context_tokens


def test_the_context_is_at_most_what_fits():
    assert plan(kv_pages=20).max_context_tokens == 320


@pytest.mark.parametrize("max_context", [2, 100, 4096])
def test_a_context_that_is_asked_for_is_given(max_context):
    assert plan(max_context=max_context).max_context_tokens == max_context


def test_pages_can_be_given_in_mebibytes():
    assert plan(kv_cache_mib=8).kv_pages == 8 * 2**20 // PAGE_BYTES


@pytest.mark.parametrize(
    ("device_type", "page_size", "prefill_chunk"), [("cpu", 16, 512), ("cuda", 64, 2048)], ids=["cpu", "cuda"]
)
def test_automatic_sizes_depend_on_the_device(device_type, page_size, prefill_chunk):
    memory = plan(device_type=device_type)
    assert (memory.page_size, memory.prefill_chunk) == (page_size, prefill_chunk)


@pytest.mark.parametrize(
    ("available_bytes", "options", "flag"),
    [
        (GIB, {"kv_pages": 10**6}, "--kv-pages"),
        (GIB, {"kv_cache_mib": 2000}, "--kv-cache-mib"),
        (GIB, {"device_state_slots": 10**4}, "--device-state-slots"),
        (GIB, {"max_concurrency": 10**4}, "--max-concurrency"),
        (GIB, {"prefill_chunk": 10**7}, "--prefill-chunk"),
        (GIB, {"kv_pages": 10, "max_context": 161}, "--max-context"),
        (GIB, {"kv_cache_mib": 1, "page_size": 4096}, "--page-size"),
        (GIB, {"host_cache_mib": 1024}, "--host-cache-mib"),
        (0, {}, "--prefill-chunk"),
    ],
)
def test_what_does_not_fit_names_its_flag_and_both_sizes(available_bytes, options, flag):
    with pytest.raises(InsufficientMemoryError, match=rf"needs [\d,]+ bytes but [\d,]+ are available; lower {flag}"):
        plan(available_bytes, **options)


def plan_gpu(available_bytes=16 * GIB, **options):
    return plan(available_bytes, device_type="cuda", config=options.pop("config", DEEP), **options)


def page_tokens_per_slot(memory):
    return memory.kv_pages * memory.page_size / (memory.state_slots - memory.running_slots)


def test_a_gpu_is_divided_to_the_last_page_with_a_slot_for_so_many_tokens():
    memory = plan_gpu()
    assert 0 <= memory.left_bytes < memory.kv_page_bytes
    assert page_tokens_per_slot(memory) == pytest.approx(TOKENS_PER_CHECKPOINT, rel=0.02)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_there_are_at_least_sixteen_slots_beside_those_of_the_running(device_type):
    memory = plan(2 * GIB, config=DEEP, device_type=device_type, max_concurrency=3)
    assert memory.state_slots == 3 + LEAST_CHECKPOINT_SLOTS == 19


def test_on_the_cpu_automatic_slots_are_sixteen_whatever_there_is():
    assert plan(64 * GIB).state_slots == 8 + 16


def test_slots_that_are_asked_for_leave_the_rest_to_pages():
    memory = plan_gpu(device_state_slots=3)
    assert memory.state_slots == 8 + 3
    assert 0 <= memory.left_bytes < memory.kv_page_bytes


def test_pages_that_are_asked_for_get_the_slots_that_go_with_them_and_the_rest_is_left():
    memory = plan_gpu(kv_pages=4096)
    assert (memory.kv_pages, memory.state_slots) == (4096, 8 + 4096 * 64 // TOKENS_PER_CHECKPOINT)
    assert memory.left_bytes > GIB


def test_slots_that_go_with_the_pages_asked_for_are_no_more_than_fit():
    beside_twenty = plan_gpu(device_state_slots=20)
    memory = plan_gpu(kv_pages=beside_twenty.kv_pages)
    assert (memory.state_slots, memory.left_bytes) == (beside_twenty.state_slots, beside_twenty.left_bytes)


def test_a_model_with_tiny_pages_gets_no_more_of_them_than_the_cache_keeps_account_of():
    memory = plan_gpu(64 * GIB, config=CONFIG)
    assert memory.kv_pages == MAX_AUTOMATIC_PAGES
    assert page_tokens_per_slot(memory) == TOKENS_PER_CHECKPOINT


def test_without_states_pages_take_all_of_a_gpu():
    memory = plan_gpu(config=replace(CONFIG, layer_kinds=(LayerKind.FULL_ATTENTION,) * 4, gated_delta_net=None))
    assert memory.state_bytes == 0
    assert 0 <= memory.left_bytes < memory.kv_page_bytes


def test_fp8_halves_the_pages_and_not_the_states():
    plain, fp8 = plan_gpu(kv_pages=512), plan_gpu(kv_pages=512, kv_cache_dtype="fp8")
    assert (2 * fp8.kv_bytes, fp8.state_slot_bytes) == (plain.kv_bytes, plain.state_slot_bytes)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_the_parts_of_a_plan_add_up_to_what_there_was(device_type):
    memory = plan(8 * GIB, config=DEEP, device_type=device_type)
    assert sum(part.nbytes for part in memory.parts()) == 8 * GIB == memory.available_bytes


@pytest.mark.parametrize(
    ("available_bytes", "options", "flag"),
    [
        (GIB // 4, {}, "the model's size"),
        (GIB, {"prefill_chunk": 10**7}, "--prefill-chunk"),
        (GIB + GIB // 8, {}, "--device-state-slots"),
        (4 * GIB, {"max_concurrency": 1024}, "--max-concurrency"),
        (4 * GIB, {"kv_pages": 10**4}, "--kv-pages"),
        (4 * GIB, {"host_cache_mib": 10**5}, "--host-cache-mib"),
    ],
)
def test_what_does_not_fit_on_a_gpu_names_its_flag_too(available_bytes, options, flag):
    with pytest.raises(InsufficientMemoryError, match=rf"needs [\d,]+ bytes but [\d,]+ are available; lower {flag}"):
        plan_gpu(available_bytes, **options)


UNITS_PER_STATE = -(-SLOT_BYTES // PAGE_BYTES)


def test_host_memory_is_cut_in_units_of_a_page_and_a_state_takes_several():
    memory = plan(host_cache_mib=10)
    assert (memory.host_unit_bytes, memory.host_units) == (PAGE_BYTES, 10 * 2**20 // PAGE_BYTES)
    assert memory.host_bytes <= 10 * 2**20
    assert memory.host_units_per_state == UNITS_PER_STATE


def test_automatic_host_memory_is_a_share_of_what_the_pages_leave_on_the_cpu():
    memory = plan(ram=Ram(100 * GIB, GIB))
    left = GIB - memory.step_buffer_bytes - memory.state_bytes - memory.kv_bytes
    assert memory.host_bytes == pytest.approx(0.25 * left, abs=PAGE_BYTES)


def test_automatic_host_memory_is_at_most_half_of_the_available_ram_beside_a_gpu():
    memory = plan(device_type="cuda", ram=Ram(100 * GIB, GIB))
    assert memory.host_bytes == pytest.approx(GIB / 2, abs=4 * PAGE_BYTES)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_automatic_host_memory_is_at_most_a_quarter_of_the_ram(device_type):
    memory = plan(device_type=device_type, ram=Ram(2**26, GIB))
    assert memory.host_bytes == pytest.approx(2**24, abs=4 * PAGE_BYTES)


@pytest.mark.parametrize(
    "options", [{"host_cache_mib": 0}, {"prefix_reuse": False}, {"prefix_reuse": False, "host_cache_mib": 10}]
)
def test_host_memory_can_be_off(options):
    memory = plan(**options)
    assert (memory.host_units, memory.host_bytes, memory.host_full_contexts) == (0, 0, 0)
    assert "host memory off" in memory.describe()


def test_automatic_host_memory_in_which_nothing_fits_is_off():
    assert plan(ram=Ram(4 * UNITS_PER_STATE * PAGE_BYTES, GIB)).host_units == 0


def test_host_memory_that_is_asked_for_and_holds_nothing_is_refused_with_what_it_takes():
    wide = replace(CONFIG, layer_kinds=(LayerKind.LINEAR_ATTENTION,) * 30 + (LayerKind.FULL_ATTENTION,))
    least_mib = -(-(-(-10 * SLOT_BYTES // PAGE_BYTES) + 1) * PAGE_BYTES // 2**20)
    with pytest.raises(UnusableOptionError, match=f"is 2, but one checkpoint of this model takes {least_mib} MiB"):
        plan(config=wide, host_cache_mib=2)
    assert plan(config=wide, host_cache_mib=least_mib).host_units >= plan(config=wide).host_units_per_state + 1


@pytest.mark.parametrize(("cap", "expected"), [(None, 3), (2, 2), (9, 3)])
def test_conversations_in_host_memory_have_a_state_each(cap, expected):
    units = 3 * (10 + UNITS_PER_STATE) + 9
    memory = plan(max_context=160, host_cache_mib=-(-units * PAGE_BYTES // 2**20), host_state_slots=cap)
    assert memory.host_full_contexts == expected
    assert f"and {expected} in host memory" in memory.describe_room()


def test_without_states_host_memory_holds_pages_alone():
    plain = replace(CONFIG, layer_kinds=(LayerKind.FULL_ATTENTION,) * 4, gated_delta_net=None)
    memory = plan(config=plain, max_context=160, host_cache_mib=4)
    assert (memory.host_units_per_state, memory.host_full_contexts) == (1, memory.host_units // 10)


def test_a_context_longer_than_the_model_s_is_refused_with_both_numbers():
    with pytest.raises(UnusableOptionError, match=r"4097.*4096"):
        plan(max_context=4097)


def test_the_plan_says_itself_in_one_line():
    line = plan(max_concurrency=2, kv_pages=512).describe()
    assert "512 KV pages of 16 tokens (4 MiB)" in line
    assert "18 state slots" in line
    assert "2 full conversations fit on the device" in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("limit", "stat", "expected"),
    [("1000", "inactive_file 50\n", [350]), ("max", "inactive_file 50\n", []), ("600", "", [0]), (None, "", [])],
)
def test_a_cgroup_s_limit_counts_and_its_droppable_page_cache_does_not(tmp_path, limit, stat, expected):
    group = tmp_path / "system.slice" / "dalsegno.service"
    group.mkdir(parents=True)
    if limit is not None:
        (group / "memory.max").write_text(limit + "\n")
    (group / "memory.current").write_text("700\n")
    (group / "memory.stat").write_text(stat)
    assert cgroup_headrooms(tmp_path, "/system.slice/dalsegno.service") == expected
    assert cgroup_limits(tmp_path, "/system.slice/dalsegno.service") == ([int(limit)] if expected else [])


def test_a_version_1_cgroup_counts_too(tmp_path):
    (tmp_path / "memory").mkdir()
    for name, content in [("limit_in_bytes", "1000"), ("usage_in_bytes", "700"), ("stat", "total_inactive_file 50")]:
        (tmp_path / "memory" / f"memory.{name}").write_text(content)
    assert cgroup_headrooms(tmp_path, "") == [350]


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_concurrency": 0},
        {"page_size": 0},
        {"max_context": 1},
        {"host_cache_mib": -1},
        {"kv_pages": 1, "kv_cache_mib": 1},
    ],
)
def test_options_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        EngineOptions(**wrong)


def test_conversations_that_fit_are_bounded_by_the_states_too():
    assert plan(max_concurrency=1, device_state_slots=0, kv_pages=4096).full_contexts == 1
