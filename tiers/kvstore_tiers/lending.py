"""Arenas of a host tier that tiers of other memory copy from and to in place.

Owns which arena is lent. A device registers all of an arena, which has the system provide its memory: so one is lent
when all of it is in use or prefaulted, and nothing of it is inherited from another arena any more.
Invariants: an arena is lent once; memory of one that is lent is not given back before each borrower has let go of it
(`Arena.release`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from kvstore_tiers.arena import Arena


class Borrower(Protocol):
    """A tier that can (`TierInfo.shares_memory`); see `Tier.share`."""

    def share(self, descriptor: int, address: int, nbytes: int) -> int: ...

    def unshare(self, number: int, ended: Callable[[], None]) -> None: ...


class Lending:
    """Any thread may `offer`; the others are the control thread's."""

    def __init__(self) -> None:
        self._borrowers: list[Borrower] = []
        self._lent: dict[int, list[tuple[Borrower, int]]] = {}  # by arena: who has it, and under which number
        self._lock = threading.Lock()

    def begin(self, borrowers: Sequence[Borrower]) -> None:
        """What is offered from now on is lent to these tiers."""
        self._borrowers = list(borrowers)

    def offer(self, arena: Arena) -> None:
        """Lend an arena if its time has come."""
        if not self._borrowers or not arena.is_whole:
            return
        with self._lock:
            if arena.number not in self._lent:
                arena.loan.lend(len(self._borrowers))
                self._lent[arena.number] = [
                    (tier, tier.share(arena.fd, arena.address, arena.nbytes)) for tier in self._borrowers
                ]

    def withdraw(self, arena: Arena) -> None:
        """Ask for an arena back, in which no transfer is under way. Returns at once."""
        with self._lock:
            lent = self._lent.pop(arena.number, [])
        for tier, number in lent:
            tier.unshare(number, arena.loan.returned)
