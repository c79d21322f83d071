"""Small traces for tests: prompts as strings, a symbol for each letter, a token for each symbol."""

from __future__ import annotations

from bench.replay.history import History, OfferRules
from bench.replay.requests import SimRequest
from cache import CheckpointKind, Frontier
from engine.frontiers import FrontierRules

NO_LADDER = OfferRules(FrontierRules(chunk=4, max_anchors=0, branch_gain=1), block=2)


def request(number, prompt, answer="", at=None, thread=None, stable=0, output_tokens=None):
    """`.` is what follows the last frontier, as a generation prompt does."""
    symbols = tuple(map(ord, prompt))
    frontiers = [Frontier(stable, CheckpointKind.SHARED_STABLE_PREFIX)] if stable else []
    return SimRequest(
        number=number,
        arrival_seconds=float(number if at is None else at),
        thread=thread or f"thread {number}",
        namespace="",
        prompt=symbols,
        prompt_tokens=len(symbols),
        answer=tuple(map(ord, answer)),
        output_tokens=output_tokens or max(len(answer), 1),
        frontiers=tuple(frontiers),
    )


def requests(*prompts):
    return [request(number, prompt) for number, prompt in enumerate(prompts)]


def asks(*prompts, rules=NO_LADDER):
    history = History(rules, tokens_per_symbol=1)
    return [history.ask(each) for each in requests(*prompts)]


class ListTrace:
    """Requests that are there already."""

    name = "a list"
    tokens_per_symbol = 1

    def __init__(self, given):
        self._requests = list(given)

    def __len__(self):
        return len(self._requests)

    def requests(self):
        return iter(self._requests)
