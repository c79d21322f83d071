"""What a prompt is owed: what a plain cache of the same size would have saved, and what no want of room took.

It is the yardstick that tells a fault from a lack of memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from cache.checkpoints import Checkpoint
from cache.costs import Costs
from cache.leases import Match, RequestLease
from cache.matching import restore_bytes, soonest
from cache.types import CacheOptions, CheckpointKind, LossReason

_COUNTED = frozenset(
    {
        CheckpointKind.SHARED_STABLE_PREFIX,
        CheckpointKind.SHARED_BRANCH,
        CheckpointKind.PRIVATE_TURN_CLOSURE,
    }
)
"""Those that every prompt is promised; endpoints and anchors are extras, which such a cache would not keep."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What was to be expected of one prompt."""

    tokens: int = 0
    reason: LossReason = LossReason.STRUCTURAL
    """Why less is reused, where less is."""
    fault_tokens: int = 0
    """Those to be expected whatever a plain cache would have kept, because nothing needed their room."""
    bet_tokens: int = 0
    """Those that a plain cache would have saved, if they were lost to what was worth more, when nothing spoke for its
    choice; else 0."""


@dataclass(slots=True)
class _Entry:
    """What such a cache keeps of one checkpoint. Mutable: only its Expectation may touch it."""

    checkpoint: Checkpoint
    own_pages: int
    """That no other here stands on."""
    has_lines: bool = False
    """Whether turns stand on it; only a shared prefix has any."""
    only_line: int | None = None
    """The one turn that stands on it: that turn makes it needless until another conversation comes."""

    @property
    def is_spared(self) -> bool:
        """Whether it takes no state of its own."""
        return self.only_line is not None


class Expectation:
    """The turns and shared prefixes that were computed or used last, as many as the larger tier can hold.

    It only keeps books: whether anything is really there is not asked, so that a leak, a refusal or a lost state does
    not lower it. Mutable: only the engine loop's task may touch it.
    """

    def __init__(
        self, options: CacheOptions, leases: Mapping[str, RequestLease], place: Callable[[Checkpoint], None]
    ) -> None:
        """`leases` are those of the requests that run: they take slots and pages on the device. `place` is told of
        each checkpoint that it would begin or no longer go on to hold."""
        self._options = options
        self._leases = leases
        self._place = place
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        """By the numbers of checkpoints, the one used longest ago first."""
        self._pages = 0
        self._spared: dict[int, set[int]] = {}
        """By the number of a turn, the shared prefixes of which it is the only line."""
        self._spared_states = 0

    def __contains__(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.is_plain

    @property
    def held_tokens(self) -> int:
        """Of all that it holds, shared ones once."""
        return self._pages * self._options.page_size

    def computed(self, checkpoint: Checkpoint, ancestors: Sequence[Checkpoint], lease: RequestLease) -> None:
        """Its frontier was computed by `lease`, whether it was kept or not; `ancestors` are those on its path, deepest
        first."""
        if checkpoint.kind not in _COUNTED:
            return
        if checkpoint.kind is CheckpointKind.PRIVATE_TURN_CLOSURE:
            self._stand(checkpoint, ancestors)
            for each in ancestors:
                if not each.kind.is_shared:
                    self._drop(each.number)
        former = self._entries.pop(checkpoint.number, None)
        self._pages -= former.own_pages if former is not None else 0
        below = next((each.frontier_tokens for each in ancestors if each.number in self._entries), 0)
        entry = former or _Entry(checkpoint, 0)
        entry.own_pages = self._options.pages_of(checkpoint.frontier_tokens) - below // self._options.page_size
        self._entries[checkpoint.number] = entry
        self._pages += entry.own_pages
        self._mark(entry)
        self.used(each for each in ancestors if each.kind.is_shared)
        self._trim({lease.request_id: checkpoint.frontier_tokens})

    def admitted(self) -> None:
        """A request was let in: what it needs for itself is no longer there for others."""
        self._trim({})

    def used(self, checkpoints: Iterable[Checkpoint]) -> None:
        """A request began with these; deepest first, so that what others stand on outlives them."""
        for each in checkpoints:
            if each.number in self._entries:
                self._entries.move_to_end(each.number)

    def of(self, match: Match, costs: Costs) -> Expected:
        """What the prompt is owed. What would have to be copied and was left alone, because to compute is quicker, is
        no loss; what lies ready and was not used is one."""
        kept, on_path = self.plain(match), _on_path(match)
        fault = self._lost_without_need(match, on_path) or self._left_alone(match, on_path, costs)
        if fault is None:
            return kept
        tokens, reason = fault
        reason = reason if tokens >= kept.tokens else kept.reason
        return replace(kept, tokens=max(tokens, kept.tokens), reason=reason, fault_tokens=tokens)

    def clear(self) -> None:
        entries = tuple(self._entries.values())
        self._entries.clear()
        self._spared.clear()
        self._pages = self._spared_states = 0
        for entry in entries:
            self._mark(entry)

    def plain(self, match: Match) -> Expected:
        """What a plain cache would have saved."""
        found = next((each for each in _on_path(match) if each in self), None)
        if found is None:
            return Expected()
        if self._options.has_state:
            is_left_alone = found.loss is None and restore_bytes(found, self._options) > 0
        else:
            is_left_alone = match.known.reason is LossReason.STRUCTURAL
        tokens = min(found.frontier_tokens, match.cached_tokens) if is_left_alone else found.frontier_tokens
        is_bet = found.loss is not None and found.is_bet
        return Expected(tokens, found.loss or LossReason.STRUCTURAL, bet_tokens=tokens if is_bet else 0)

    @staticmethod
    def _lost_without_need(match: Match, on_path: Sequence[Checkpoint]) -> tuple[int, LossReason] | None:
        """The deepest frontier that is gone although nothing needed its room. What a later turn, which gave way, had
        made needless is not asked."""
        has_given_way = False
        for each in on_path:
            if each.frontier_tokens <= match.cached_tokens:
                return None
            if each.loss is None or (has_given_way and not each.kind.is_shared):
                continue
            if not each.gave_way:
                return each.frontier_tokens, each.loss
            has_given_way = has_given_way or each.kind is CheckpointKind.PRIVATE_TURN_CLOSURE
        return None

    def _left_alone(self, match: Match, on_path: Sequence[Checkpoint], costs: Costs) -> tuple[int, LossReason] | None:
        """What is there, would have been quicker to resume, and was not found."""
        if not match.is_chosen:
            return None
        if self._options.has_state:
            live = [each for each in on_path if each.loss is None]
            if not live or live[0].frontier_tokens <= match.cached_tokens:
                return None
            best = soonest(live, len(match.tokens), self._options, costs)
            is_better = best is not None and best.frontier_tokens > match.cached_tokens
            return (best.frontier_tokens, LossReason.STRUCTURAL) if best is not None and is_better else None
        ready = 0
        for node in match.known.nodes[1:]:
            if node.page is None:
                break
            ready += self._options.page_size
        return (ready, LossReason.STRUCTURAL) if ready > match.cached_tokens else None

    def _stand(self, turn: Checkpoint, ancestors: Sequence[Checkpoint]) -> None:
        """Note which conversations go on from the shared prefixes above a turn."""
        own = {turn.number, *(each.number for each in ancestors if not each.kind.is_shared)}
        for each in ancestors:
            entry = self._entries.get(each.number)
            if entry is None or not each.kind.is_shared:
                continue
            is_alone = not entry.has_lines or entry.only_line in own
            self._let_stand(each.number, entry, turn.number if is_alone else None)
            self._mark(entry)
            entry.has_lines = True

    def _drop(self, number: int) -> None:
        entry = self._entries.pop(number, None)
        if entry is None:
            return
        self._pages -= entry.own_pages
        self._let_stand(number, entry, None)
        self._mark(entry)
        for each in tuple(self._spared.get(number, ())):
            self._drop(each)

    def _let_stand(self, number: int, entry: _Entry, line: int | None) -> None:
        """`line` alone stands on it from now on; None for no turn, or several."""
        if entry.only_line is not None:
            spared = self._spared[entry.only_line]
            spared.remove(number)
            self._spared_states -= 1
            if not spared:
                del self._spared[entry.only_line]
        if line is not None:
            self._spared.setdefault(line, set()).add(number)
            self._spared_states += 1
        entry.only_line = line

    def _mark(self, entry: _Entry) -> None:
        """Tell it whether it is held here, if that has changed."""
        checkpoint = entry.checkpoint
        is_held = checkpoint.number in self._entries and not entry.is_spared
        if checkpoint.is_plain is not is_held:
            checkpoint.is_plain = is_held
            self._place(checkpoint)

    def _trim(self, counted_tokens: Mapping[str, int]) -> None:
        """Drop what does not fit beside the pages that running requests have for themselves alone; `counted_tokens` of
        a request are among those here, of any other those that it reused."""
        size = self._options.page_size
        running_pages = sum(
            len(lease.pages) - counted_tokens.get(name, lease.cached_tokens) // size
            for name, lease in self._leases.items()
        )
        while self._entries and not self._fits(running_pages):
            self._drop(next(iter(self._entries)))

    def _fits(self, running_pages: int) -> bool:
        """Whether all of it would fit on the device beside what runs, or else in host memory."""
        options = self._options
        states = len(self._entries) - self._spared_states
        has_slots = not options.has_state or states <= options.state_slots - len(self._leases)
        if has_slots and self._pages <= options.kv_pages - running_pages:
            return True
        units = self._pages + (states * options.host_units_per_state if options.has_state else 0)
        return units <= options.host_units and (not options.has_state or states <= options.host_states)


def _on_path(match: Match) -> list[Checkpoint]:
    """What was ever kept on the prompt's way, deepest first."""
    known = match.known
    limit = len(match.tokens) - 1
    return [] if known.tree is None else list(known.tree.checkpoints_on(known.nodes, match.tokens, limit))
