"""Predictors for studies: the daemon's own, made anew for each run, and an oracle that knows the future."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from kvstore_predictor.base import Array, Guess, Piece, Predictor, PredictorRequest
from kvstore_simulator.trace import Op, Trace
from kvstored.store.prefetch.guarded_predictor import create_predictor

Make = Callable[[Trace, float], Predictor]  # of a trace and the speed at which it is served


def shipped(name: str, model: Path | None = None) -> Make:
    """Return a function that makes a new predictor of the daemon by its name `name`. One predictor is made at once as a
    check. `model` is the file of a trained model. Raises ValueError with one line if it cannot be used.
    """
    create_predictor(name, model)

    def make(trace: Trace, speed: float) -> Predictor:
        predictor = create_predictor(name, model)
        assert predictor is not None
        return predictor

    return make


class Oracle(Predictor):
    """A predictor that knows the trace: for each request the part of its chain that was used before, and the time of
    its arrival. Studies use it as an upper bound for predictors.
    """

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

    def requested(self, request: PredictorRequest, now_s: float) -> None:
        """Do nothing, because the oracle knew of the request."""

    def guesses(self, now_s: float, horizon_s: float, limit: int) -> list[Guess]:
        at = bisect_left(self._times_s, now_s)
        found: list[Guess] = []
        while at < len(self._times_s) and self._times_s[at] <= now_s + horizon_s and len(found) < limit:
            wanted, due_s = self._wanted[at], self._times_s[at]
            if wanted is not None:
                found.append(Guess(int(self._trace.tenants[at]), *wanted, 1.0, due_s, due_s, 1.0))
            at += 1
        return found

    def forget(self, tenant: int, keys: Iterable[bytes] | None) -> None:
        """Do nothing, because studies delete no blocks."""

    def export_state(self) -> Iterator[Piece]:
        return iter(())

    def import_state(self, state: dict[str, Array], later_s: float) -> None:
        raise ValueError("an oracle learns nothing")


FOR_STUDIES: dict[str, Make] = {Oracle.name: Oracle}
