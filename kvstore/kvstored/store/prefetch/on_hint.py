"""Predicts what engines said, and nothing else: a chain is due when its engine said so.

A hint with a due time makes a guess, with the chance that the engine gave, or certainty. The request, another hint, a
closed session, or time ends it. Bounded: the oldest hints are forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, nsmallest
from operator import itemgetter

from kvstore_predictor.base import Array, Guess, Hint, NextStep, Piece, Predictor, Request

HINTS_MAX = 65_536
LATE_S = 30.0  # a request that does not come so long after it was due is not expected any more
EARLY = 0.05  # of the time that was announced: what comes earlier than this is rare


_Chain = tuple[int, bytes]


@dataclass(frozen=True, slots=True)
class _Due:
    said_s: float
    due_s: float
    probability: float


class OnHint(Predictor):
    """See the module. O(log n) an event; `guesses` costs O(hints that are due within the horizon)."""

    name = "on-hint"

    def __init__(self) -> None:
        self._due: OrderedDict[_Chain, _Due] = OrderedDict()
        self._later: list[tuple[float, _Chain]] = []  # heap; what is outdated is left out when it is met
        self._soon: dict[_Chain, None] = {}

    def requested(self, request: Request, now_s: float) -> None:
        due = self._due
        if due:
            for key in request.keys:
                due.pop((request.tenant, key), None)

    def hinted(self, tenant: int, key: bytes, hint: Hint, now_s: float) -> None:
        chain = (tenant, key)
        if hint.next_step is NextStep.CLOSED or hint.will_continue == 0.0:
            self._due.pop(chain, None)
        elif hint.due_s is not None:
            self._due[chain] = _Due(now_s, hint.due_s, 1.0 if hint.will_continue is None else hint.will_continue)
            self._due.move_to_end(chain)
            heappush(self._later, (hint.due_s, chain))
            if len(self._due) > HINTS_MAX:
                self._due.popitem(last=False)
            if len(self._later) > 2 * HINTS_MAX:
                self._later = [(due.due_s, chain) for chain, due in self._due.items() if chain not in self._soon]
                heapify(self._later)

    def guesses(self, now_s: float, horizon_s: float, limit: int) -> list[Guess]:
        while self._later and self._later[0][0] <= now_s + horizon_s:
            self._soon[heappop(self._later)[1]] = None
        found: list[tuple[bool, float, float, _Chain, _Due]] = []
        for chain in list(self._soon):
            due = self._due.get(chain)
            if due is None or due.due_s + LATE_S < now_s:
                self._due.pop(chain, None)
                del self._soon[chain]
            elif due.due_s <= now_s + horizon_s:
                found.append((due.due_s < now_s, -due.probability, due.due_s, chain, due))
        return [
            Guess(*chain, 0, due.probability, due.due_s - EARLY * (due.due_s - due.said_s), due.due_s, 1.0)
            for _, _, _, chain, due in nsmallest(limit, found, key=itemgetter(0, 1, 2))  # overdue ones last
        ]

    def forget(self, tenant: int, keys: Iterable[bytes] | None) -> None:
        gone = [chain for chain in self._due if chain[0] == tenant] if keys is None else [(tenant, key) for key in keys]
        for chain in gone:
            self._due.pop(chain, None)
            self._soon.pop(chain, None)

    def export_state(self) -> Iterator[Piece]:
        return iter(())

    def import_state(self, state: dict[str, Array], later_s: float) -> None:
        """There is nothing to go on from: engines say it again."""
