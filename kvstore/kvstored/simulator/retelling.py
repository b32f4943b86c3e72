"""What engines told a daemon while it was recorded, told again: each hint in its place between the requests."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from operator import attrgetter

from kvstored.simulator.trace import Told, Trace
from kvstored.store.blocks import ResidencyView
from kvstored.store.policies import ChainHint, Policy, tell


def told_before(trace: Trace, request: int) -> Sequence[Told]:
    """What was told after the request before, and before this one."""
    place = attrgetter("before")
    return trace.told[bisect_left(trace.told, request, key=place) : bisect_left(trace.told, request + 1, key=place)]


def retell(
    told: Told, trace: Trace, tenant: int, residency: ResidencyView, policies: Sequence[Policy], now_ns: int
) -> None:
    """As the daemon's hint does."""
    due_ns = None if told.due_in_ns is None else now_ns + told.due_in_ns
    hint = ChainHint(told.will_continue, due_ns, told.next_step, told.answer_tokens)
    rows = residency.find_keys(tenant, map(trace.key, trace.chain(told.block)))
    tell(policies, residency, tenant, trace.key(told.block), rows, hint, now_ns)
