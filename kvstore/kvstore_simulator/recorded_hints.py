"""The hints that engines gave a daemon while it was recorded, each in its place between the requests."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from operator import attrgetter

from kvstore_simulator.trace import RecordedHint, Trace
from kvstored.store.blocks import ResidencyView
from kvstored.store.policies import ChainHint, Policy, deliver_hint


def hints_before(trace: Trace, request: int) -> Sequence[RecordedHint]:
    """Those given after the request before, and before this one."""
    place = attrgetter("before")
    return trace.hints[bisect_left(trace.hints, request, key=place) : bisect_left(trace.hints, request + 1, key=place)]


def replay_hint(
    recorded: RecordedHint, trace: Trace, tenant: int, residency: ResidencyView, policies: Sequence[Policy], now_ns: int
) -> None:
    """Deliver it as the daemon does."""
    due_ns = None if recorded.due_in_ns is None else now_ns + recorded.due_in_ns
    hint = ChainHint(recorded.will_continue, due_ns, recorded.next_step, recorded.answer_tokens)
    rows = residency.find_keys(tenant, map(trace.key, trace.chain(recorded.block)))
    deliver_hint(policies, residency, tenant, trace.key(recorded.block), rows, hint, now_ns)
