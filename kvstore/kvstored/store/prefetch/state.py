"""What prefetch by prediction has learned, as arrays that a later process can go on from: what the predictor knows, how
far each tenant is turned down, and which block was put last of each request.

Not kept: what is planned or waits for its use, and figures, which count from the daemon's start. Never does I/O.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvstore_predictor.base import Array, Piece, State, within
from kvstored.clock import NS_PER_S
from kvstored.store.policies import Origin
from kvstored.store.prefetch.credit import CREDIT, PrefetchCredit
from kvstored.store.prefetch.guarded_predictor import GuardedPredictor
from kvstored.store.prefetch.recent import END, RecentRequests

_PREDICTOR, _CREDIT, _ENDS = "predictor/", "credit", "ends"


class PrefetchState:
    """Of one store. Exports nothing without a predictor that works."""

    def __init__(self, predictor: GuardedPredictor, recent: RecentRequests, credit: PrefetchCredit) -> None:
        self._predictor = predictor
        self._recent = recent
        self._credit = credit

    @property
    def name(self) -> str:
        """The predictor's: another one goes on from nothing that was learned with this one."""
        return self._predictor.name

    @property
    def works(self) -> bool:
        """Whether there is a predictor that works."""
        return self._predictor.works

    @property
    def hints(self) -> int:
        """Given to the predictor since the start: what it learned has changed where this has."""
        return self._predictor.hints

    def export_state(self) -> Iterator[Piece]:
        """In pieces that take at most half a millisecond each; events may come between two."""
        if self._predictor.works:
            for name, piece in self._predictor.pieces():
                yield _PREDICTOR + name, piece
            for piece in self._credit.pieces():
                yield _CREDIT, piece
            for piece in self._recent.ends():
                yield _ENDS, piece

    def import_state(self, state: State, origin: Origin) -> None:
        """Go on from the joined pieces. Raises ValueError, having changed nothing, for what cannot be used."""
        if not self._predictor.works:
            return
        later_s, now_s = origin.later_ns / NS_PER_S, origin.now_ns / NS_PER_S
        credit, ends = (_renumbered(state[name], origin) if name in state else None for name in (_CREDIT, _ENDS))
        if credit is None or credit.dtype != CREDIT or ends is None or ends.dtype != END:
            raise ValueError("the state of another version")
        learned = {name: _renumbered(table, origin) for name, table in within(state, _PREDICTOR).items()}
        self._predictor.import_state(learned, later_s)
        self._credit.restore(credit, later_s, now_s)
        self._recent.restore(ends)


def _renumbered(table: Array, origin: Origin) -> Array:
    """The rows of tenants that there are still, by their numbers of now; `table` itself if its rows are of none."""
    if table.dtype.names is None or "tenant" not in table.dtype.names:
        return table
    former = table["tenant"].astype(np.int64)
    if table.ndim != 1 or (len(table) and (former.min() < 0 or former.max() >= len(origin.tenants))):
        raise ValueError("it names tenants that there were not")
    tenants = origin.tenants[former]
    found = table[tenants >= 0]
    found["tenant"] = tenants[tenants >= 0]
    return found
