"""What a plain cache of the same size would have saved: the yardstick that tells a fault from a lack of memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cache.checkpoints import Checkpoint
from cache.leases import Match, RequestLease
from cache.matching import restore_bytes
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


class Expectation:
    """The turns and shared prefixes that were computed or used last, as many as the larger tier can hold.

    It only keeps books: whether anything is really there is not asked, so that a leak, a refusal or a lost state does
    not lower it. Mutable: only the engine loop's task may touch it.
    """

    def __init__(self, options: CacheOptions, leases: Mapping[str, RequestLease]) -> None:
        """`leases` are those of the requests that run: they take slots and pages on the device."""
        self._options = options
        self._leases = leases
        self._own_pages: OrderedDict[int, int] = OrderedDict()
        """By the numbers of checkpoints, the one used longest ago first: pages that no other here stands on."""
        self._pages = 0

    def __contains__(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.number in self._own_pages

    def computed(self, checkpoint: Checkpoint, ancestors: Sequence[Checkpoint], lease: RequestLease) -> None:
        """Its frontier was computed by `lease`, whether it was kept or not; `ancestors` are those on its path, deepest
        first."""
        if checkpoint.kind not in _COUNTED:
            return
        if checkpoint.kind is CheckpointKind.PRIVATE_TURN_CLOSURE:
            for each in ancestors:
                if not each.kind.is_shared:
                    self._drop(each.number)
        self._drop(checkpoint.number)
        below = next((each.frontier_tokens for each in ancestors if each in self), 0)
        own = self._options.pages_of(checkpoint.frontier_tokens) - below // self._options.page_size
        self._own_pages[checkpoint.number] = own
        self._pages += own
        self.used(each for each in ancestors if each.kind.is_shared)
        self._trim({lease.request_id: checkpoint.frontier_tokens})

    def admitted(self) -> None:
        """A request was let in: what it needs for itself is no longer there for others."""
        self._trim({})

    def used(self, checkpoints: Iterable[Checkpoint]) -> None:
        """A request began with these; deepest first, so that what others stand on outlives them."""
        for each in checkpoints:
            if each in self:
                self._own_pages.move_to_end(each.number)

    def of(self, match: Match) -> Expected:
        """What such a cache would have saved of the prompt. What would have to be copied and was left alone, because to
        compute is quicker, is no loss; what lies ready and was not used is one."""
        known = match.known
        if known.tree is None:
            return Expected()
        on_path = known.tree.checkpoints_on(known.nodes, match.tokens, len(match.tokens) - 1)
        found = next((each for each in on_path if each in self), None)
        if found is None:
            return Expected()
        if self._options.has_state:
            is_left_alone = found.loss is None and restore_bytes(found, self._options) > 0
        else:
            is_left_alone = known.reason is LossReason.STRUCTURAL
        tokens = min(found.frontier_tokens, match.cached_tokens) if is_left_alone else found.frontier_tokens
        return Expected(tokens, found.loss or LossReason.STRUCTURAL)

    def clear(self) -> None:
        self._own_pages.clear()
        self._pages = 0

    def _drop(self, number: int) -> None:
        self._pages -= self._own_pages.pop(number, 0)

    def _trim(self, counted_tokens: Mapping[str, int]) -> None:
        """Drop what does not fit beside the pages that running requests have for themselves alone; `counted_tokens` of
        a request are among those here, of any other those that it reused."""
        size = self._options.page_size
        running_pages = sum(
            len(lease.pages) - counted_tokens.get(name, lease.cached_tokens) // size
            for name, lease in self._leases.items()
        )
        while self._own_pages and not self._fits(running_pages):
            self._drop(next(iter(self._own_pages)))

    def _fits(self, running_pages: int) -> bool:
        """Whether all of it would fit on the device beside what runs, or else in host memory."""
        options, states = self._options, len(self._own_pages)
        has_slots = not options.has_state or states <= options.state_slots - len(self._leases)
        if has_slots and self._pages <= options.kv_pages - running_pages:
            return True
        units = self._pages + (states * options.host_units_per_state if options.has_state else 0)
        return units <= options.host_units and (not options.has_state or states <= options.host_states)
