"""Simple predictors to compare with, for studies alone: what a fixed pause, a moving average and the future are worth.

A session is a chain that goes on: a request that uses the last block, or the last but one (the last is often partial),
of an earlier request is its next turn.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvstore_predictor.base import Array, Guess, Piece, Predictor, Request
from kvstore_simulator.trace import Op, Trace
from kvstored.store.prefetch.guarded_predictor import create_predictor

Make = Callable[[Trace, float], Predictor]  # of a trace and the speed at which it is served
SESSIONS_MAX = 65_536
_PAUSES = 1024  # of which the median is taken
_WEIGHT = 0.3  # of the newest gap in a moving average
_EARLY, _LATE = 0.5, 2.0  # times the pause that was expected
_MINIMUM = 3  # pauses to learn from before anything is said


@dataclass(slots=True)
class Session:
    """`gap_s`: what is expected between its turns."""

    tenant: int
    key: bytes
    blocks: int
    at_s: float
    gap_s: float | None = None
    turns: int = 1


class _NoState(Predictor):
    """Learns anew each time."""

    def forget(self, tenant: int, keys: Iterable[bytes] | None) -> None:
        """Studies delete nothing."""

    def export_state(self) -> Iterator[Piece]:
        return iter(())

    def import_state(self, state: dict[str, Array], later_s: float) -> None:
        raise ValueError(f"{self.name} keeps nothing")


class AfterPause(_NoState):
    """Chains return after a pause, as often as chains have returned until now: the median of all pauses, or
    `by_session` an average of the session's own, the latest counting most, once there is one."""

    def __init__(self, name: str, *, by_session: bool) -> None:
        self.name = name
        self._by_session = by_session
        self._ends: OrderedDict[tuple[int, bytes], Session] = OrderedDict()
        self._waiting: OrderedDict[int, Session] = OrderedDict()  # by id, the longest first
        self._pauses: list[float] = []
        self._returns = self._requests = 0
        self._median_s = 0.0

    def requested(self, request: Request, now_s: float) -> None:
        keys, tenant = request.keys, request.tenant
        session = next(
            (found for key in reversed(keys) if (found := self._ends.get((tenant, key))) is not None), None
        )  # fmt: skip
        self._requests += 1
        if session is None:
            session = Session(tenant, keys[-1], len(keys), now_s)
        else:
            self._returns += 1
            self._returned(session, now_s - session.at_s)
            session.key, session.blocks, session.at_s, session.turns = keys[-1], len(keys), now_s, session.turns + 1
        for key in keys[-2:]:
            self._ends[tenant, key] = session
            self._ends.move_to_end((tenant, key))
        if len(self._ends) > SESSIONS_MAX:
            self._ends.popitem(last=False)
        self._waiting[id(session)] = session
        self._waiting.move_to_end(id(session))

    def guesses(self, now_s: float, horizon_s: float, limit: int) -> list[Guess]:
        found = []
        for number, session in list(self._waiting.items()):
            pause_s = self.pause_s(session)
            if pause_s is None:
                continue
            if now_s > session.at_s + _LATE * pause_s + 1.0:
                del self._waiting[number]
            elif session.at_s + pause_s <= now_s + horizon_s:
                first_s, due_s = session.at_s + _EARLY * pause_s, session.at_s + pause_s
                share = self._returns / max(1, self._requests)
                found.append(Guess(session.tenant, session.key, session.blocks, share, first_s, due_s, 0.5))
        found.sort(key=lambda guess: guess.due_s)
        return found[:limit]

    def pause_s(self, session: Session) -> float | None:
        """After which its next turn is expected."""
        if self._by_session and session.gap_s is not None:
            return session.gap_s
        return self._median_s if len(self._pauses) >= _MINIMUM else None

    def _returned(self, session: Session, pause_s: float) -> None:
        self._pauses.append(pause_s)
        del self._pauses[:-_PAUSES]
        self._median_s = float(np.median(self._pauses))
        former = pause_s if session.gap_s is None else session.gap_s
        session.gap_s = former + _WEIGHT * (pause_s - former)


def shipped(name: str, model: Path | None = None) -> Make:
    """What makes the daemon's predictor `name`, each time anew; a first one is made here. Raises ValueError with one
    line for a model that cannot be used."""
    create_predictor(name, model)

    def make(trace: Trace, speed: float) -> Predictor:
        predictor = create_predictor(name, model)
        assert predictor is not None
        return predictor

    return make


def fixed_lead() -> AfterPause:
    return AfterPause("fixed-lead", by_session=False)


def moving_average() -> AfterPause:
    return AfterPause("moving-average", by_session=True)


class Oracle(_NoState):
    """Knows the trace: which chain each request will use, as far as it was used before, and when it arrives. Tenant
    `n` of the trace is number `n`."""

    name = "oracle"

    def __init__(self, trace: Trace, speed: float) -> None:
        self._trace = trace
        first_ns = int(trace.times_ns[0])
        self._times_s = [(at_ns - first_ns) / speed / 1e9 for at_ns in trace.times_ns.tolist()]
        ends, self._wanted = trace.starts[1:].tolist(), []
        before = np.ones(trace.accesses, np.bool_)  # by access: the block was used before
        seen = np.zeros(trace.distinct_blocks, np.bool_)
        for at, (start, end) in enumerate(zip(trace.starts.tolist(), ends, strict=False)):
            blocks = trace.blocks[start:end]
            before[start:end] = seen[blocks]
            seen[blocks] = True
            known = int(np.argmin(before[start:end])) if not before[start:end].all() else end - start
            is_read = trace.ops[at] != Op.PUT
            self._wanted.append((trace.key(int(blocks[known - 1])), known) if known and is_read else None)

    def requested(self, request: Request, now_s: float) -> None:
        """It knew."""

    def guesses(self, now_s: float, horizon_s: float, limit: int) -> list[Guess]:
        at = bisect_left(self._times_s, now_s)
        found: list[Guess] = []
        while at < len(self._times_s) and self._times_s[at] <= now_s + horizon_s and len(found) < limit:
            wanted, due_s = self._wanted[at], self._times_s[at]
            if wanted is not None:
                found.append(Guess(int(self._trace.tenants[at]), *wanted, 1.0, due_s, due_s, 1.0))
            at += 1
        return found


FOR_STUDIES: dict[str, Make] = {
    Oracle.name: Oracle,
    "fixed-lead": lambda trace, speed: fixed_lead(),
    "moving-average": lambda trace, speed: moving_average(),
}
