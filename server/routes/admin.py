"""`/admin/*`: what an operator may look at and do. The boundary lets only operators in."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, Request

from cache import CacheStats, Fault, PoolCounts, Resident, Tier
from engine.engine import Engine
from server.body import parse, read_body
from server.daemon import Daemon
from server.errors import ApiError
from server.openapi import documented
from server.responses import JsonResponse
from server.schema.admin import (
    AuditAnswer,
    CacheAnswer,
    Conversation,
    DrainAnswer,
    FaultsAnswer,
    FaultsRequest,
    KernelShown,
    PoolUnits,
    ResetAnswer,
    ResetConflict,
    ResetRequest,
    TreeSizes,
)
from server.schema.errors import ErrorBody

ERRORS: dict[int | str, dict[str, Any]] = {
    401: {"model": ErrorBody, "description": "a valid admin key is needed"},
    403: {"model": ErrorBody, "description": "not from here, or not without the flag that the error names"},
    503: {"model": ErrorBody, "description": "starting or draining"},
}


_SHOWN_CHARACTERS = 40
_NAMED_CONVERSATIONS = 20

Name = TypeVar("Name", bound=StrEnum)

logger = logging.getLogger("dalsegno.server")


def _reset_documented() -> dict[str, Any]:
    arguments = documented(ResetRequest, ResetAnswer)
    conflict = {"model": ResetConflict, "description": "something is in use and was not dropped"}
    return arguments | {"responses": arguments["responses"] | {409: conflict}}


router = APIRouter(prefix="/admin", tags=["operation"], responses=ERRORS)


@router.get("/cache", response_model=CacheAnswer)
async def show_cache(request: Request) -> JsonResponse:
    """Units of each pool by state, what the cache has done since the start, and which kernels compute."""
    daemon: Daemon = request.app.state.daemon
    now, census = daemon.loaded_engine.snapshot(), daemon.loaded_engine.census(_NAMED_CONVERSATIONS)
    done = now.cache
    return JsonResponse(
        CacheAnswer(
            pools={pool: _units(counts) for pool, counts in now.pools.items()},
            requests_running=now.running,
            requests_waiting=now.waiting,
            selections=dict(done.selections),
            reused_tokens={tier.value: done.reused_from[tier] for tier in Tier},
            computed_tokens=done.computed_tokens,
            achievable_tokens=done.achievable_tokens,
            expected_tokens=done.expected_tokens,
            lost_tokens=dict(done.lost_tokens),
            published={kind.value: count for kind, count in done.published.items()},
            evictions=_evictions(done),
            publish_skipped={reason.value: count for reason, count in done.publish_skipped.items()},
            checkpoints_dropped=done.checkpoints_dropped,
            checkpoints_demoted=done.checkpoints_demoted,
            restores=done.restores,
            restore_failures=done.restore_failures,
            quarantined=done.quarantined,
            audits=done.audits,
            violations=done.violations,
            orphans_reclaimed=dict(done.orphans_reclaimed),
            faults=_names(daemon.loaded_engine.faults),
            oldest_entry_seconds=dict(now.oldest_entry_seconds),
            tree=TreeSizes(
                nodes=census.nodes,
                ghosts=census.ghosts,
                checkpoints=census.checkpoints,
                depth_tokens=census.depth_tokens,
            ),
            conversations=[_conversation(each) for each in census.largest],
            kernels=[KernelShown(**asdict(choice)) for choice in daemon.loaded_engine.kernel_choices],
        )
    )


@router.post("/cache/reset", **_reset_documented())
async def reset_cache(request: Request) -> JsonResponse:
    """Forget what is remembered in the tiers named, and give back what nobody holds, while traffic runs."""
    daemon: Daemon = request.app.state.daemon
    engine = daemon.loaded_engine
    wanted = await read_body(request, partial(parse, ResetRequest))
    found = await engine.reset_cache(_known(Tier, wanted.tiers, "tiers"))
    answer = ResetAnswer.model_validate({"tiers": {tier.value: asdict(counts) for tier, counts in found.items()}})
    pinned = sum(counts.pinned_checkpoints for counts in found.values())
    if not pinned:
        return JsonResponse(answer)
    error = ApiError(409, f"{pinned} checkpoints are in use and were not dropped; send it again", code="cache_in_use")
    return JsonResponse(answer.model_dump() | error.body(), status_code=409)


@router.post("/cache/audit", response_model=AuditAnswer)
async def audit_cache(request: Request) -> JsonResponse:
    """Compare pools, trees and leases from scratch; give back what nobody holds, unless self-heal is off."""
    daemon: Daemon = request.app.state.daemon
    found = await daemon.loaded_engine.audit_cache()
    return JsonResponse(
        AuditAnswer(violations=list(found.violations), reclaimed=dict(found.reclaimed), remaining=list(found.remaining))
    )


@router.post("/drain", response_model=DrainAnswer)
async def drain(request: Request) -> JsonResponse:
    """Take no more requests and let the running ones finish; the process goes on until it is told to end."""
    daemon: Daemon = request.app.state.daemon
    engine = daemon.loaded_engine
    daemon.begin_drain()
    logger.warning("an operator drained the daemon: no new requests until POST /admin/undrain")
    return JsonResponse(_underway(engine))


@router.post("/undrain", response_model=DrainAnswer, responses={409: {"model": ErrorBody, "description": "it ends"}})
async def undrain(request: Request) -> JsonResponse:
    """Take requests again after a drain."""
    daemon: Daemon = request.app.state.daemon
    daemon.undo_drain()
    engine = daemon.loaded_engine
    logger.warning("an operator undid the drain: requests are taken")
    return JsonResponse(_underway(engine))


@router.get("/faults", response_model=FaultsAnswer)
async def show_faults(request: Request) -> JsonResponse:
    """The faults that are switched on."""
    daemon: Daemon = request.app.state.daemon
    return JsonResponse(FaultsAnswer(faults=_names(daemon.loaded_engine.faults)))


@router.post("/faults", **documented(FaultsRequest, FaultsAnswer))
async def set_faults(request: Request) -> JsonResponse:
    """Switch on these faults and no other, for a fire drill."""
    daemon: Daemon = request.app.state.daemon
    if not daemon.drill.is_allowed:
        raise ApiError(403, "fire drills are off; to hold one, start the daemon with --allow-faults")
    engine = daemon.loaded_engine
    wanted = await read_body(request, partial(parse, FaultsRequest))
    await engine.set_faults(frozenset(_known(Fault, wanted.faults, "faults")))
    return JsonResponse(FaultsAnswer(faults=_names(engine.faults)))


def _known(kind: type[Name], given: Sequence[str], param: str) -> list[Name]:
    """The names as members of `kind`. Raises ApiError (400) that names the first unknown one."""
    for place, name in enumerate(given):
        if name not in set(kind):
            raise ApiError(
                400,
                f"{param}[{place}] is {name[:_SHOWN_CHARACTERS]!r}; expected one of {', '.join(kind)}",
                param=f"{param}[{place}]",
                code="invalid_value",
            )
    return [kind(name) for name in given]


def _underway(engine: Engine) -> DrainAnswer:
    now = engine.snapshot()
    return DrainAnswer(requests_running=now.running, requests_waiting=now.waiting)


def _units(counts: PoolCounts) -> PoolUnits:
    return PoolUnits(**asdict(counts))


def _conversation(resident: Resident) -> Conversation:
    return Conversation(
        id=resident.name,
        kind=resident.kind.value,
        tokens=resident.tokens,
        turns=resident.turns,
        uses=resident.uses,
        idle_seconds=resident.idle_seconds,
        tiers=[tier.value for tier in resident.tiers],
    )


def _evictions(stats: CacheStats) -> dict[str, dict[str, int]]:
    """By pool and kind."""
    counts: dict[str, dict[str, int]] = {}
    for (pool, kind), count in stats.evictions.items():
        counts.setdefault(pool, {})[kind.value] = count
    return counts


def _names(faults: frozenset[Fault]) -> list[Any]:
    return sorted(fault.value for fault in faults)
