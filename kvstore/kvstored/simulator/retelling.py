"""What engines told a daemon while it was recorded, told again: each hint in its place between the requests."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from operator import attrgetter

from kvstored.policies import ChainHint, Policy
from kvstored.residency import ResidencyView
from kvstored.simulator.trace import Told, Trace
from kvstored.verbs.hints import NOTHING_TOLD


def told_before(trace: Trace, request: int) -> Sequence[Told]:
    """What was told after the request before, and before this one."""
    place = attrgetter("before")
    return trace.told[bisect_left(trace.told, request, key=place) : bisect_left(trace.told, request + 1, key=place)]


def retell(
    told: Told, trace: Trace, tenant: int, residency: ResidencyView, policies: Sequence[Policy], now_ns: int
) -> None:
    """As the daemon's hint does: a request that is due is told of down to the last block that is there."""
    key = trace.key(told.block)
    hint = ChainHint(told.will_continue, None, told.next_step, told.answer_tokens)
    if hint != NOTHING_TOLD:
        _tell(policies, tenant, residency.find(tenant, key), key, hint, now_ns)
    if told.due_in_ns is None:
        return
    rows = residency.find_keys(tenant, map(trace.key, trace.chain(told.block)))
    if rows:
        hint = ChainHint(due_ns=now_ns + told.due_in_ns)
        _tell(policies, tenant, rows[-1], residency.key(rows[-1]), hint, now_ns)


def _tell(policies: Sequence[Policy], tenant: int, row: int, key: bytes, hint: ChainHint, now_ns: int) -> None:
    for policy in policies:
        policy.told(tenant, row, key, hint, now_ns)
