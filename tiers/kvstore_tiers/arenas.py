"""The arenas of a tier: which there are, which have room, for whom, and which of them tiers of other memory have.

Owns which arena hands out the next slot. Never makes an arena, and knows no capacity. A device registers all of an
arena that it copies from and to in place, which has the system provide its memory: so one is lent when all of it is in
use or prefaulted, and nothing of it is inherited from another arena any more.
Invariants: an arena hands out slots to one owner; none is handed out of an arena that is set aside or barred; an arena
is lent once; memory of one that is lent is not given back before each borrower has let go of it (`Arena.release`).
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from kvstore_tiers.arena import Arena
from kvstore_tiers.base import ContainerReport, Slot


class Arenas:
    """`empty` are the arenas of which no slot is out, by number: such an arena is open to any size. For one thread."""

    def __init__(self) -> None:
        self.nbytes = 0  # of all of them
        self.empty: dict[int, Arena] = {}
        self.barred: set[int] = set()  # hand out no slot any more
        self.aside: set[int] = set()  # none for now
        self.with_room: defaultdict[tuple[str, int], list[Arena]] = defaultdict(list)  # each arena once
        self._by_number: dict[int, Arena] = {}

    def __iter__(self) -> Iterator[Arena]:
        return iter(self._by_number.values())

    def __getitem__(self, number: int) -> Arena:
        return self._by_number[number]

    def get(self, number: int) -> Arena | None:
        """Return an arena; None where there is none of this number."""
        return self._by_number.get(number)

    def of(self, slot: Slot) -> Arena:
        """Return the arena of a slot. Raises RuntimeError where there is none."""
        arena = self._by_number.get(slot.container)
        if arena is None:
            raise RuntimeError(f"{slot} is in no arena")
        return arena

    @property
    def blocks(self) -> int:
        return sum(arena.used_slots for arena in self)

    @property
    def blocks_bytes(self) -> int:
        return sum(arena.used_slots * arena.slot_bytes for arena in self)

    def add(self, arena: Arena) -> None:
        """List an arena: a new one, or one that was taken over with its blocks."""
        self._by_number[arena.number] = arena
        self.nbytes += arena.nbytes
        if not arena.used_slots:
            self.empty[arena.number] = arena
        elif arena.has_room:
            self._list_room(arena)

    def remove(self, arena: Arena) -> None:
        """List an arena no longer."""
        self.forget_room(arena)
        del self._by_number[arena.number]
        self.nbytes -= arena.nbytes
        self.empty.pop(arena.number, None)
        self.barred.discard(arena.number)

    def clear(self) -> None:
        """List none any more."""
        for arena in list(self):
            self.remove(arena)

    def allocate(self, nbytes: int, owner: str, make: Callable[[], Arena | None]) -> Slot | None:
        """Return a free slot, of an arena that `make` cuts to this size where none has room; None where it does not."""
        candidates = self.with_room[owner, nbytes]
        if not candidates:
            made = make()
            if made is None:
                return None
            candidates.append(made)
        arena = candidates[-1]
        slot = arena.allocate()
        if not arena.has_room:
            candidates.pop()
        self.empty.pop(arena.number, None)
        return slot

    def free(self, slot: Slot) -> Arena:
        """Take a slot back, and return its arena."""
        arena = self.of(slot)
        had_room = arena.has_room
        arena.free(slot)
        if arena.number in self.aside or arena.number in self.barred:
            return arena
        if not had_room:
            self._list_room(arena)
        if arena.used_slots == 0:
            self.empty[arena.number] = arena
        return arena

    def makes_room(self, number: int, nbytes: int, owner: str) -> bool:
        """See `Tier.makes_room`."""
        arena, is_open = self._by_number[number], number not in self.aside and number not in self.barred
        return is_open and (arena.owner, arena.slot_bytes) == (owner, nbytes)

    def reports(self) -> list[ContainerReport]:
        """Return a report of each arena."""
        return [ContainerReport(a.number, a.owner, a.nbytes, a.slot_bytes, a.slots, a.used_slots) for a in self]

    def convertible(self, nbytes: int, owner: str) -> list[ContainerReport]:
        """See `Tier.convertible`."""
        unfit = self.aside | self.barred
        return [
            report
            for report in self.reports()
            if report.nbytes >= nbytes
            and report.container not in unfit
            and (report.owner, report.slot_bytes) != (owner, nbytes)
        ]

    def set_aside(self, number: int) -> None:
        """See `Tier.set_aside`."""
        self.aside.add(number)
        self.forget_room(self._by_number[number])
        self.empty.pop(number, None)

    def put_back(self, number: int) -> bool:
        """See `Tier.put_back`. An arena that is empty by now is open first of all to the size for which it was
        emptied."""
        self.aside.discard(number)
        arena = self._by_number.get(number)
        if arena is None:
            return False
        if number not in self.barred:
            if arena.used_slots == 0:
                self.empty[number] = arena
            elif arena.has_room:
                self._list_room(arena)
        return arena.used_slots == 0

    def bar(self, arena: Arena) -> None:
        """Hand out no slot of it any more."""
        self.barred.add(arena.number)
        self.forget_room(arena)
        self.empty.pop(arena.number, None)

    def forget_room(self, arena: Arena) -> None:
        """Hand out no slot of it for the size that it has."""
        rooms = self.with_room.get((arena.owner, arena.slot_bytes))
        if rooms and arena in rooms:
            rooms.remove(arena)

    def _list_room(self, arena: Arena) -> None:
        self.with_room[arena.owner, arena.slot_bytes].append(arena)


class Borrower(Protocol):
    """Is a tier that copies from and to memory of others (`TierInfo.shares_memory`); see `Tier.share`."""

    def share(self, descriptor: int, address: int, nbytes: int) -> int: ...

    def unshare(self, number: int, ended: Callable[[], None]) -> None: ...


class Lending:
    """Any thread may `offer`; the others are the control thread's."""

    def __init__(self) -> None:
        self._borrowers: list[Borrower] = []
        self._lent: dict[int, list[tuple[Borrower, int]]] = {}  # by arena: who has it, and under which number
        self._lock = threading.Lock()

    def begin(self, borrowers: Sequence[Borrower]) -> None:
        """Lend to these tiers, from now on, what is offered."""
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
