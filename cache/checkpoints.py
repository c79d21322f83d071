"""Checkpoints: where each one's bytes are, and the ranks from which the next to give way is taken."""

from __future__ import annotations

from collections.abc import Iterator

from cache.held import Held
from cache.pools import Lease
from cache.ranking import Ranking
from cache.regret import Regret
from cache.replicas import Replica
from cache.returns import ReturnRates
from cache.tree import Node, PrefixTree, Tokens
from cache.types import CheckpointKind, LossReason, Tier


class Checkpoint:
    """A frontier that can be resumed: the node path's pages, a partial tail page, and a state image.

    Mutable: only the engine loop's task may touch it. On the device it holds the pages down to `device_node`, which is
    `node` or, while host memory has all of them, one of its ancestors. In host memory it holds all or nothing. With
    nothing anywhere it is a ghost, and `loss` says why.
    """

    __slots__ = (
        "benefit_tokens",
        "device_node",
        "gave_way",
        "host_state",
        "host_tail",
        "is_bet",
        "is_in_host",
        "is_plain",
        "is_refused",
        "is_superseded",
        "kind",
        "last_used_at",
        "lines",
        "loss",
        "namespace",
        "node",
        "number",
        "pins",
        "slot",
        "tail",
        "tail_page",
        "tree",
        "turns",
        "uses",
    )

    def __init__(
        self, *, number: int, namespace: str, tree: PrefixTree, node: Node, tail: Tokens, kind: CheckpointKind
    ) -> None:
        self.number = number
        self.namespace = namespace
        self.tree = tree
        self.node = node
        self.tail = tail
        self.kind = kind
        self.turns = 1
        """Turns of its conversation so far."""
        self.uses = 0
        """How often a request was resumed from it, or would have been."""
        self.lines = 0
        """Of a shared one: conversations that are known to stand on it."""
        self.last_used_at = 0.0
        self.benefit_tokens = 0
        """Tokens that it saves from its nearest surviving ancestor."""
        self.is_superseded = False
        self.is_plain = False
        """Whether a plain cache of the same size would hold it."""
        self.pins = 0
        self.loss: LossReason | None = None
        self.gave_way = False
        """Whether it is lost for want of room: others needed it, or requests that run had all of it."""
        self.is_bet = False
        """Whether it is lost to what was worth more, when nothing spoke for a plain cache's choice."""
        self.slot: Lease | None = None
        """The state on the device; always None in a model without recurrent states."""
        self.device_node: Node | None = None
        self.tail_page: Replica | None = None
        """The tail's page on the device; None when the frontier is a page's end."""
        self.is_in_host = False
        self.host_state: Lease | None = None
        self.host_tail: Replica | None = None
        self.is_refused = False
        """Host memory has no room for it: it goes from the device without a copy."""

    @property
    def is_one_lines(self) -> bool:
        """Whether it serves no more than one conversation, whose newest turn stands for it."""
        return not self.kind.is_shared or self.lines <= 1

    @property
    def frontier_tokens(self) -> int:
        return self.node.depth * self.tree.page_size + len(self.tail)

    @property
    def name(self) -> str:
        return f"checkpoint-{self.number}"

    @property
    def tail_copy(self) -> Replica | None:
        """The nearest replica of the tail page."""
        return self.tail_page if self.tail_page is not None else self.host_tail

    @property
    def device_pages(self) -> int:
        """Pages that it holds on the device, alone or with others."""
        path = 0 if self.device_node is None else self.device_node.depth
        return path + (0 if self.tail_page is None else 1)

    @property
    def is_whole_on_device(self) -> bool:
        return self.device_node is self.node and (not self.tail or self.tail_page is not None)

    @property
    def is_ready(self) -> bool:
        """Whether it may leave the device at once: host memory has it or does not want it, or a part has left."""
        return self.is_in_host or self.is_refused or not self.is_whole_on_device

    @property
    def is_live(self) -> bool:
        return self.is_in_host or self.device_node is not None or self.slot is not None


class Line:
    """Those that hold units of one pool, in the order in which they give way: first the ones that may go at once."""

    def __init__(self, rates: ReturnRates, regret: Regret, held: Held | None = None) -> None:
        """`held` is where others count the pool's units by namespace; without it each entry here is one."""
        self.held = Held() if held is None else held
        self._counts_entries = held is None
        self.ready = Ranking(rates, regret)
        self.others = Ranking(rates, regret)
        self.ready_weight = 0
        """Pages on the device that those in `ready` hold; shared ones count for each."""
        self._weights: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.ready) + len(self.others)

    def place(self, checkpoint: Checkpoint, *, holds: bool, is_ready: bool) -> None:
        """Stand in the right place, or in none while it is pinned."""
        for ranking in (self.ready, self.others):
            if checkpoint in ranking:
                ranking.remove(checkpoint)
                self._count(checkpoint, -1)
        self.ready_weight -= self._weights.pop(checkpoint.number, 0)
        if not holds or checkpoint.pins:
            return
        self._count(checkpoint, 1)
        if is_ready:
            self._weights[checkpoint.number] = checkpoint.device_pages
            self.ready_weight += checkpoint.device_pages
            self.ready.add(checkpoint)
        else:
            self.others.add(checkpoint)

    def __contains__(self, checkpoint: Checkpoint) -> bool:
        return checkpoint in self.ready or checkpoint in self.others

    def _count(self, checkpoint: Checkpoint, change: int) -> None:
        if self._counts_entries:
            self.held.change(checkpoint.namespace, change)

    def first(self, now: float, namespace: str | None = None) -> Checkpoint | None:
        """The next to give way; None when every one is pinned."""
        found = self.ready.least(now, namespace) or self.others.least(now, namespace)
        return found if isinstance(found, Checkpoint) else None


class CheckpointStore:
    """Every checkpoint that is live, and who gives way next in each pool. Mutable: only the engine loop's task may
    touch it."""

    def __init__(self) -> None:
        self.rates = ReturnRates()
        self.regret = Regret()
        self.held = {Tier.DEVICE: Held(), Tier.HOST: Held()}
        """Units of pages, and in host memory of states too, by namespace; the trees count the pages."""
        self.slots = Line(self.rates, self.regret)
        self.pages = Line(self.rates, self.regret, self.held[Tier.DEVICE])
        self.host = Line(self.rates, self.regret, self.held[Tier.HOST])
        self._all: dict[int, Checkpoint] = {}
        self._next_number = 1

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self._all.values())

    def __contains__(self, checkpoint: object) -> bool:
        return isinstance(checkpoint, Checkpoint) and self._all.get(checkpoint.number) is checkpoint

    def next_number(self) -> int:
        number = self._next_number
        self._next_number += 1
        return number

    def add(self, checkpoint: Checkpoint) -> None:
        self._all[checkpoint.number] = checkpoint
        self.place(checkpoint)

    def remove(self, checkpoint: Checkpoint) -> None:
        del self._all[checkpoint.number]
        self.place(checkpoint)

    def place(self, checkpoint: Checkpoint) -> None:
        """It changed: let it stand in each line where it belongs now."""
        here = checkpoint in self
        holds_pages = checkpoint.device_node is not None or checkpoint.tail_page is not None
        self.slots.place(checkpoint, holds=here and checkpoint.slot is not None, is_ready=checkpoint.is_ready)
        self.pages.place(checkpoint, holds=here and holds_pages, is_ready=checkpoint.is_ready)
        # What the device has as a whole yields first: nothing is lost with its copy.
        is_copy = checkpoint.is_whole_on_device and (checkpoint.slot is not None or checkpoint.host_state is None)
        self.host.place(checkpoint, holds=here and checkpoint.is_in_host, is_ready=is_copy)

    def pin(self, checkpoint: Checkpoint) -> None:
        checkpoint.pins += 1
        self.place(checkpoint)

    def unpin(self, checkpoint: Checkpoint) -> None:
        checkpoint.pins -= 1
        self.place(checkpoint)

    def misplaced(self) -> list[Checkpoint]:
        """Those that stand where they do not belong; empty when sound."""
        wrong: list[Checkpoint] = []
        for c in self:
            lines = (
                (self.slots, c.slot is not None),
                (self.pages, c.device_node is not None or c.tail_page is not None),
                (self.host, c.is_in_host),
            )
            if any((c in line) is not (belongs and c.pins == 0) for line, belongs in lines):
                wrong.append(c)
        return wrong

    def strays(self) -> int:
        """How many places in the lines are taken by what is not live; 0 when sound."""
        lines = (self.slots, self.pages, self.host)
        return sum(map(len, lines)) - sum(c in line for c in self for line in lines)
