"""What a match finds, what gives way to what, and what every exit leaves behind, at sizes that a reader can count."""

from __future__ import annotations

import pytest

from cache.context import ContextCache
from cache.leases import CaptureTicket
from cache.ledger import check
from cache.types import CacheOptions, CheckpointKind, CopyObject, Frontier, SkipReason

SHARED, CLOSURE = CheckpointKind.SHARED_STABLE_PREFIX, CheckpointKind.PRIVATE_TURN_CLOSURE
ENDPOINT, ANCHOR = CheckpointKind.PRIVATE_ENDPOINT, CheckpointKind.PRIVATE_LONG_ANCHOR


def hybrid(kv_pages=64, state_slots=8, page_size=4, prefix_reuse=True):
    return ContextCache(CacheOptions(page_size, kv_pages, state_slots, has_state=True, prefix_reuse=prefix_reuse))


def attention_only(kv_pages=64, page_size=4):
    return ContextCache(CacheOptions(page_size, kv_pages, 0, has_state=False))


class Clock:
    now = 0.0

    def __call__(self):
        Clock.now += 1.0
        return Clock.now


tick = Clock()


def serve(cache, name, tokens, wanted=(), output=(), namespace="n", finish=True):
    """Run one request to its end; returns its match as it was found."""
    match = cache.match(name, namespace, tuple(tokens))
    lease = cache.admit(match, len(tokens) + len(output) + 1, list(wanted), tick())
    assert lease is not None
    cache.confirm_resume(lease)
    for frontier in list(lease.wanted):
        ticket = cache.capture(lease, frontier)
        if isinstance(ticket, CaptureTicket):
            cache.publish(ticket, tick())
    everything = (*tokens, *output)
    if finish:
        cache.finish(lease, everything, max(len(everything) - 1, len(tokens)), tick())
    else:
        cache.abort(lease, everything, 0, tick())
    assert check(cache) == []
    return match


def closure(tokens):
    return [Frontier(tokens, CLOSURE)]


@pytest.mark.parametrize("frontier", [1, 2, 3, 4, 5, 7, 8, 9, 11, 12])
def test_same_prompt_again_hits_its_closure_wherever_the_page_ends(frontier):
    cache, prompt = hybrid(), range(13)
    assert serve(cache, "r1", prompt, closure(frontier), finish=False).cached_tokens == 0
    again = serve(cache, "r2", prompt, closure(frontier), finish=False)
    assert (again.cached_tokens, again.path) == (frontier, CLOSURE)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 9])
def test_a_prompt_as_long_as_a_checkpoint_reuses_at_most_all_but_one_token(length):
    cache = hybrid()
    serve(cache, "r1", range(length), [Frontier(max(length - 1, 1), CLOSURE)])
    assert serve(cache, "r2", range(length)).cached_tokens == length - 1


def test_a_resumed_partial_page_is_copied_before_it_is_written():
    cache = hybrid()
    serve(cache, "r1", range(8), closure(6), finish=False)
    match = cache.match("r2", "n", tuple(range(9)))
    lease = cache.admit(match, 10, [], tick())
    page_copy, state_copy = lease.resume
    assert page_copy.what is CopyObject.KV_PAGE
    assert page_copy.destination.unit == lease.page_units[1] != page_copy.source.unit
    assert state_copy.what is CopyObject.STATE
    assert state_copy.destination.unit == lease.state_unit != state_copy.source.unit
    cache.finish(lease, tuple(range(9)), 9, tick())


def test_the_endpoint_takes_over_the_slot_without_a_copy():
    cache = hybrid()
    serve(cache, "r1", range(6), output=range(50, 54))
    assert cache.slots.counts().cached == 1
    longer = (*range(6), *range(50, 53), 99)
    assert cache.match("r2", "n", longer).path == ENDPOINT


def test_a_full_pool_never_keeps_the_newest_out():
    cache = hybrid(state_slots=3)
    for number in range(12):
        prompt = tuple(range(number * 100, number * 100 + 10))
        serve(cache, f"a{number}", prompt, closure(8))
        assert serve(cache, f"b{number}", prompt, closure(8)).cached_tokens >= 8


def test_an_older_turn_gives_way_before_another_conversation():
    cache = hybrid(state_slots=4, kv_pages=200)
    serve(cache, "other", range(500, 520), closure(18), finish=False)
    for turn in range(1, 8):
        serve(cache, f"t{turn}", range(turn * 10), closure(turn * 10 - 1), finish=False)
    assert serve(cache, "other2", range(500, 520), finish=False).cached_tokens == 18


@pytest.mark.parametrize(("echoes", "short_of_the_turn"), [(True, 0), (False, 2)])
def test_a_growing_chat_reuses_its_last_turn_at_every_turn_on_two_spare_slots(echoes, short_of_the_turn):
    cache, reused = hybrid(state_slots=4, kv_pages=400), []
    for turn in range(1, 41):
        wanted = [Frontier(5, SHARED), Frontier(turn * 10 - 2, CLOSURE)]
        reused.append(serve(cache, f"t{turn}", range(turn * 10), wanted, finish=echoes).cached_tokens)
    assert reused == [0, *(turn * 10 - short_of_the_turn for turn in range(1, 40))]


def test_a_shared_prefix_in_use_outlives_the_conversations_that_use_it():
    cache = hybrid(state_slots=3, kv_pages=400)
    for user in range(50):
        prompt = (*range(20), *range(1000 + user * 10, 1008 + user * 10))
        match = serve(cache, f"u{user}", prompt, [Frontier(20, SHARED), Frontier(27, CLOSURE)])
        assert match.cached_tokens == (20 if user else 0)


def test_namespaces_share_nothing():
    cache = hybrid()
    serve(cache, "r1", range(12), closure(10), namespace="one")
    assert serve(cache, "r2", range(12), namespace="two").cached_tokens == 0


def test_another_prefix_of_the_same_length_never_matches():
    cache = hybrid()
    serve(cache, "r1", [1, 2, 3, 4, 5, 6, 7], closure(6), finish=False)
    assert cache.match("r2", "n", (1, 2, 9, 4, 5, 6, 7)).cached_tokens == 0


def test_only_one_of_two_equal_captures_is_kept():
    cache = hybrid()
    leases = [cache.admit(cache.match(name, "n", tuple(range(9))), 10, closure(8), tick()) for name in ("a", "b")]
    tickets = [cache.capture(lease, Frontier(8, CLOSURE)) for lease in leases]
    for ticket in tickets:
        cache.publish(ticket, tick())
    assert len(cache.tiers.store) == 1
    assert cache.stats.publish_skipped[SkipReason.ALREADY_CACHED] == 1
    assert check(cache) == []


def test_a_capture_that_finds_every_slot_pinned_says_so():
    cache = hybrid(state_slots=1)
    lease = cache.admit(cache.match("r", "n", tuple(range(9))), 10, closure(8), tick())
    assert cache.capture(lease, Frontier(8, CLOSURE)) is SkipReason.SLOTS_PINNED


def test_nothing_can_be_found_before_it_is_published():
    cache = hybrid()
    lease = cache.admit(cache.match("r", "n", tuple(range(9))), 10, closure(8), tick())
    ticket = cache.capture(lease, Frontier(8, CLOSURE))
    assert cache.match("s", "n", tuple(range(9))).cached_tokens == 0
    assert cache.slots.counts().in_flight == 1
    cache.discard(ticket)
    assert cache.slots.counts().in_flight == 0


def test_admission_waits_only_for_what_running_requests_hold():
    cache = hybrid(kv_pages=8)
    serve(cache, "old", range(28), closure(20))
    first = cache.admit(cache.match("a", "n", tuple(range(100, 116))), 20, [], tick())
    assert first is not None
    assert cache.admit(cache.match("b", "n", tuple(range(200, 216))), 20, [], tick()) is None
    cache.finish(first, tuple(range(100, 116)), 16, tick())
    assert cache.admit(cache.match("b", "n", tuple(range(200, 216))), 20, [], tick()) is not None


def test_a_refused_admission_evicts_nothing():
    cache = hybrid(kv_pages=12)
    serve(cache, "old", range(12), closure(10))
    cache.admit(cache.match("a", "n", tuple(range(100, 120))), 24, [], tick())
    assert cache.admit(cache.match("b", "n", tuple(range(200, 230))), 40, [], tick()) is None
    assert cache.match("again", "n", tuple(range(12))).cached_tokens >= 10


def test_growth_evicts_in_proportion_in_a_model_without_states():
    cache = attention_only(kv_pages=16)
    serve(cache, "old", range(40))
    lease = cache.admit(cache.match("new", "n", tuple(range(900, 920))), 24, [], tick())
    assert cache.grow(lease, 32)
    assert cache.match("again", "n", tuple(range(41))).cached_tokens == 32


@pytest.mark.parametrize("shared", [1, 3, 4, 5, 8, 10])
def test_attention_alone_resumes_at_any_token(shared):
    cache = attention_only()
    serve(cache, "r1", range(12))
    assert serve(cache, "r2", (*range(shared), *range(70, 80))).cached_tokens == shared


def test_a_request_that_is_about_to_publish_a_prefix_is_known():
    cache = hybrid()
    lease = cache.admit(cache.match("a", "n", tuple(range(20))), 21, closure(18), tick())
    assert cache.pending_frontier("n", (*range(19), 77)) == 18
    assert cache.pending_frontier("other", (*range(19), 77)) == 0
    cache.publish(cache.capture(lease, Frontier(18, CLOSURE)), tick())
    assert cache.pending_frontier("n", (*range(19), 77)) == 0


def test_an_aborted_request_leaves_what_it_computed_for_the_retry():
    cache = hybrid()
    lease = cache.admit(cache.match("a", "n", tuple(range(20))), 21, closure(18), tick())
    cache.abort(lease, tuple(range(20)), 9, tick())
    assert cache.match("b", "n", tuple(range(20))).cached_tokens == 9


def test_reuse_can_be_switched_off():
    cache = hybrid(prefix_reuse=False)
    serve(cache, "r1", range(12), closure(10))
    assert serve(cache, "r2", range(12), closure(10)).cached_tokens == 0
    assert cache.pages.free == cache.pages.capacity


def test_lost_tokens_and_reused_ones_add_up_to_the_last_frontier():
    cache = hybrid()
    serve(cache, "r1", range(24), closure(22), finish=False)
    match = cache.match("r2", "n", (*range(12), *range(50, 60)))
    report = cache.report(match, closure(20))
    assert (report.cached_tokens, report.achievable_tokens) == (0, 0)
    assert report.lost == {"no_checkpoint": 12, "cold": 8}


def test_chats_that_take_turns_keep_their_newest_and_not_its_ancestors():
    cache = hybrid(state_slots=3)
    for turn in range(1, 6):
        for first in (0, 1000):
            prompt = range(first, first + 10 * turn)
            match = serve(cache, f"c{first}t{turn}", prompt, closure(10 * turn - 2), output=(7, 8))
            assert match.cached_tokens == (10 * turn - 12 if turn > 1 else 0)


def test_an_anchor_takes_a_free_slot_but_drives_out_nothing_that_is_worth_more():
    cache = hybrid(state_slots=2)
    lease = cache.admit(cache.match("a", "n", tuple(range(30))), 31, [], tick())
    assert isinstance(cache.capture(lease, Frontier(10, ANCHOR)), CaptureTicket)
    cache.abort(lease, tuple(range(30)), 0, tick())
    serve(cache, "other", range(500, 510), closure(8), finish=False)
    lease = cache.admit(cache.match("b", "n", tuple(range(30))), 31, [], tick())
    assert cache.capture(lease, Frontier(10, ANCHOR)) is SkipReason.SLOTS_WORTH_MORE
    assert isinstance(cache.capture(lease, Frontier(28, CLOSURE)), CaptureTicket)


def test_what_a_request_would_reuse_can_leave_no_room_for_it_and_is_left_out_then():
    cache = hybrid(kv_pages=3)
    serve(cache, "old", range(8), closure(6), finish=False)
    prompt = (*range(6), *range(50, 55))
    assert cache.admit(cache.match("r", "n", prompt), 12, [], tick()) is None
    lease = cache.admit(cache.miss("r", "n", prompt), 12, [], tick())
    assert (lease.cached_tokens, len(lease.pages)) == (0, 3)
    assert check(cache) == []


def test_attention_alone_can_evict_the_checkpoint_next_to_what_it_reuses():
    cache = attention_only(kv_pages=4)
    serve(cache, "r0", range(5))
    serve(cache, "r1", range(9))
    match = cache.match("r2", "n", (*range(6), 70))
    assert (match.cached_tokens, match.nearest.frontier_tokens) == (6, 5)
    assert cache.admit(match, 12, [], tick()) is not None
    assert check(cache) == []


def test_a_request_that_comes_back_after_suspension_does_not_count_as_reuse():
    cache = hybrid()
    serve(cache, "r1", range(12), closure(10), finish=False)
    before = (cache.stats.reused_tokens, cache.stats.selections.copy())
    lease = cache.admit(cache.match("r2", "n", tuple(range(12))), 13, [], tick(), is_first=False)
    assert lease.cached_tokens == 10
    assert (cache.stats.reused_tokens, cache.stats.selections) == before


def test_a_request_grows_by_whole_pages_and_only_when_it_needs_them():
    cache = hybrid(kv_pages=5)
    lease = cache.admit(cache.match("r", "n", tuple(range(10))), 11, [], tick())
    assert (cache.grow(lease, 12), len(lease.pages)) == (True, 3)
    assert (cache.grow(lease, 13), len(lease.pages)) == (True, 4)
    assert (cache.grow(lease, 24), len(lease.pages)) == (False, 4)
    assert cache.pages.free == 1


@pytest.mark.parametrize(("tokens", "fits"), [(12, True), (13, False)])
def test_a_request_that_is_larger_than_the_pool_never_fits(tokens, fits):
    assert hybrid(kv_pages=3).fits_alone(tokens) is fits


def test_of_several_prefixes_that_are_about_to_be_published_the_longest_is_known():
    cache = hybrid()
    wanted = [Frontier(4, SHARED), Frontier(18, CLOSURE), Frontier(9, ANCHOR)]
    cache.admit(cache.match("a", "n", tuple(range(20))), 21, wanted, tick())
    assert cache.pending_frontier("n", tuple(range(19))) == 18
    assert cache.pending_frontier("n", tuple(range(18))) == 9, "one token is left to compute"
    assert cache.pending_frontier("n", (*range(12), 99, 98)) == 9
    assert cache.pending_frontier("n", (99, *range(1, 20))) == 0, "their last tokens alone are the same"


def test_with_reuse_off_a_capture_is_refused_and_says_so():
    cache = hybrid(prefix_reuse=False)
    lease = cache.admit(cache.match("r", "n", tuple(range(9))), 10, closure(8), tick())
    assert cache.capture(lease, Frontier(8, CLOSURE)) is SkipReason.REUSE_OFF
    assert cache.stats.publish_skipped == {SkipReason.REUSE_OFF: 1}
