"""Every policy on the same requests with the same slots: what each one reuses, and how far it is from the bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from rich.table import Table

from bench.policies import BlockAligned, Clairvoyant, Dalsegno, Lru, Marconi, Policy, RadixLru
from bench.policies.clairvoyant import BOUND, WEIGHTS, Future
from bench.replay.cost_model import CostModel
from bench.replay.garbage import collecting_rarely
from bench.replay.history import History
from bench.replay.requests import Trace
from bench.replay.sizes import Scale, offer_rules, scale_of
from engine.errors import UnusableOptionError
from engine.frontiers import FrontierRules
from engine.progress import Advance

_PAGE_TOKENS = 512
"""With KV unlimited the size of a page changes but the time that this takes, and what a branch has to save at least."""


@dataclass(frozen=True, slots=True)
class Slots:
    """How many states can be held besides that of the request that runs."""

    device: int
    host: int = 0

    @property
    def total(self) -> int:
        return self.device + self.host

    def __str__(self) -> str:
        return f"{self.device}+{self.host}" if self.host else str(self.device)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One policy with so many slots, over the reported requests."""

    policy: str
    slots: Slots
    hit_tokens: int
    hit_rate: float
    of_achievable: float
    of_bound: float


def parse_slots(text: str) -> list[Slots]:
    """`40,160` or, device and host apart, `12+48`. Raises UnusableOptionError."""
    found = []
    for part in text.split(","):
        numbers = part.strip().split("+")
        if (
            not 1 <= len(numbers) <= 2
            or not all(number.strip().isdecimal() for number in numbers)
            or int(numbers[0]) < 1
        ):
            raise UnusableOptionError(
                f"--slots {text!r}: {part!r} is neither a number of states above 0 nor DEVICE+HOST, such as 12+48"
            )
        found.append(Slots(*map(int, numbers)))
    return found


def usual_slots(trace: Trace) -> list[Slots]:
    """For the most conversations that live at one time: on the device a tenth of them, with host memory for all, and
    for half of them in both tiers together. 40, 160 and 640 where a trace does not tell its conversations."""
    live = most_live(trace)
    if live < 2:
        return [Slots(40), Slots(160), Slots(640)]
    tenth = max(live // 10, 1)
    return [Slots(tenth, live), Slots(tenth, max(live // 2 - tenth, 0))]


def most_live(trace: Trace) -> int:
    """Threads that have begun and will go on, at the moment when there are most."""
    lives: dict[str, list[float]] = {}
    for request in trace.requests():
        lives.setdefault(request.thread, []).append(request.arrival_seconds)
    changes = [change for times in lives.values() if len(times) > 1 for change in ((times[0], 1), (times[-1], -1))]
    return max(accumulate(change for _, change in sorted(changes)), default=0)


class Comparison:
    """One trace for all. Mutable: `run` fills in what each policy reused."""

    def __init__(self, trace: Trace, model: CostModel, slots: Sequence[Slots], report_from: float) -> None:
        """`report_from` is the share of requests that only warm up, and on which what can be fitted is fitted."""
        self._trace = trace
        self._slots = slots
        scale = scale_of(trace.tokens_per_symbol, _PAGE_TOKENS, model)
        # Without a ladder: those who cannot refuse an offer would pay for it most.
        places = FrontierRules(scale.chunk_symbols, max_anchors=0, branch_gain=scale.page_symbols)
        rules = offer_rules(scale, model, places)
        history = History(rules, trace.tokens_per_symbol)
        self._asks = [history.ask(request) for request in trace.requests()]
        self._first = int(len(self._asks) * report_from)
        self._entrants = self._enter(scale, model, history.symbols)
        self._hits = [0] * len(self._entrants)

    def _enter(self, scale: Scale, model: CostModel, symbols: int) -> list[tuple[Slots, Policy]]:
        asks, fitted_on = self._asks, self._asks[: self._first]
        longest = max((-(-ask.prompt_tokens // scale.tokens_per_symbol) for ask in asks), default=0)
        future = Future(asks)
        entrants: list[tuple[Slots, Policy]] = []
        for slots in self._slots:
            total = slots.total
            online: list[Policy] = [Lru(total), RadixLru(total), BlockAligned(total), Marconi.fitted(total, fitted_on)]
            bounds: list[Policy] = [Clairvoyant(total, future, weight) for weight in WEIGHTS]
            ours = Dalsegno(slots.device, slots.host, scale, model, symbols + longest)
            entrants += [(slots, policy) for policy in (*online, ours, *bounds)]
        return entrants

    def __len__(self) -> int:
        return len(self._asks)

    def run(self, advance: Advance) -> None:
        """Serve every request with every policy; those of a share of the trace count."""
        with collecting_rarely():
            for ask, request in zip(self._asks, self._trace.requests(), strict=True):
                for number, (_, policy) in enumerate(self._entrants):
                    hit_tokens = policy.serve(ask, request)
                    if ask.number >= self._first:
                        self._hits[number] += hit_tokens
                advance(1)

    def outcomes(self) -> list[Outcome]:
        """In the order in which the policies are listed, the bound last, for each number of slots."""
        reported = self._asks[self._first :]
        prompt_tokens = max(sum(ask.prompt_tokens for ask in reported), 1)
        achievable_tokens = max(sum(ask.achievable_tokens for ask in reported), 1)
        found = []
        for slots in self._slots:
            best: dict[str, int] = {}
            for (whose, policy), hits in zip(self._entrants, self._hits, strict=True):
                if whose is not slots:
                    continue
                # The farthest next use is also one of the plans whose best is the bound.
                names = (policy.name, BOUND) if isinstance(policy, Clairvoyant) else (policy.name,)
                best |= {name: max(best.get(name, 0), hits) for name in names}
            found += [
                Outcome(name, slots, hits, hits / prompt_tokens, hits / achievable_tokens, hits / max(best[BOUND], 1))
                for name, hits in best.items()
            ]
        return found


def render(title: str, outcomes: Sequence[Outcome]) -> Table:
    """One row for each number of slots and policy."""
    table = Table(title=title, title_justify="left")
    for column in ("slots", "policy", "token hit rate", "of achievable", "of the bound"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for outcome, following in zip(outcomes, (*outcomes[1:], None), strict=True):
        shares = (outcome.hit_rate, outcome.of_achievable, outcome.of_bound)
        is_last = following is not None and following.slots != outcome.slots
        table.add_row(str(outcome.slots), outcome.policy, *(f"{share:.1%}" for share in shares), end_section=is_last)
    return table
