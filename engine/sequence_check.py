"""An audit of the scheduler's sequences against the leases that the cache has given out; trusts neither."""

from __future__ import annotations

from collections.abc import Sequence, Set

from cache import ContextCache
from engine.sequence import SequenceRecord, order


def check_sequences(
    cache: ContextCache, running: Sequence[SequenceRecord], waiting: Sequence[SequenceRecord], alive: Set[str]
) -> list[str]:
    """One line per violation, empty when sound."""
    violations: list[str] = []
    for sequence in running:
        lease = sequence.held
        if not lease.is_open or sequence.page_ids.tolist() != list(lease.page_units):
            violations.append(f"request {sequence.request_id!r}: its block table differs from its lease")
        if len(lease.pages) < cache.options.pages_of(sequence.computed_tokens):
            violations.append(f"request {sequence.request_id!r}: computed tokens lie outside its pages")
    for sequence in waiting:
        if sequence.lease is not None:
            violations.append(f"request {sequence.request_id!r} waits but holds a lease")
    for name, line in (("running", running), ("waiting", waiting)):
        if list(line) != sorted(line, key=order):
            violations.append(f"the {name} requests are out of order: {[each.arrival for each in line]}")
    if alive != {sequence.request_id for sequence in (*running, *waiting)}:
        violations.append("a request that is alive neither runs nor waits")
    if {id(lease) for lease in cache.leases} != {id(sequence.lease) for sequence in running}:
        violations.append("a lease is open that no running request holds")
    violations += [f"the match of request {match.request_id!r} was left open" for match in cache.matches]
    return violations
