"""Reservations: slots that a client fills in place, before their content counts as stored blocks.

Owns which slots a client holds, and the bytes that count against its tenant's maximum until they are blocks'. Never
reads a slot. Pure bookkeeping: the time is an argument, slots are freed by a callback.
Invariants: a slot is with one reservation, with the request that stores from it, with a block, or free; a slot that its
client may still be writing to is not free: one whose reservation expired is held until it is given back, or the
client is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvstore_tiers.base import Slot


@dataclass(slots=True)
class Reservation:
    """Slots of one client. `slots` maps a place to its slot, for the slots that no block was stored from yet.
    `is_ahead` says that no put was waiting for the reservation.
    """

    number: int
    session_id: int
    tenant: int
    expires_ns: int
    is_ahead: bool = False
    slots: dict[int, Slot] = field(default_factory=dict)


class Reservations:
    """All reservations of the daemon. When a client dies, its session calls `end_session`. `free_slot` frees a slot of
    the host tier; `count(tenant, nbytes)` adds `nbytes` to the bytes that a tenant holds for blocks to come.
    """

    def __init__(self, free_slot: Callable[[Slot], None], count: Callable[[int, int], None]) -> None:
        self._free_slot = free_slot
        self._count = count
        self._reservations: dict[int, Reservation] = {}
        self._last_number = 0
        self.ahead_bytes = 0  # of slots that clients hold for puts that may follow

    def __len__(self) -> int:
        return len(self._reservations)

    def held_bytes(self, session_id: int) -> int:
        """Return the bytes of the slots that the client holds, expired or not."""
        return sum(slot.nbytes for each in self._of(session_id) for slot in each.slots.values())

    def begin(self, session_id: int, tenant: int, expires_ns: int, *, is_ahead: bool = False) -> Reservation:
        """Begin a reservation, without a slot yet."""
        self._last_number += 1
        reservation = Reservation(self._last_number, session_id, tenant, expires_ns, is_ahead)
        self._reservations[reservation.number] = reservation
        return reservation

    def add(self, reservation: Reservation, slot: Slot) -> bool:
        """Add one more slot. Return False when the reservation has ended meanwhile: the slot is free again."""
        self._count(reservation.tenant, slot.nbytes)
        if reservation.number not in self._reservations:
            self.free(reservation.tenant, slot)
            return False
        reservation.slots[len(reservation.slots)] = slot
        self.ahead_bytes += slot.nbytes * reservation.is_ahead
        return True

    def find(self, session_id: int, number: int, now_ns: int) -> Reservation | None:
        """Return reservation `number` if this client may still store from it; None otherwise."""
        reservation = self._reservations.get(number)
        if reservation is None or reservation.session_id != session_id or reservation.expires_ns <= now_ns:
            return None
        return reservation

    def take(self, reservation: Reservation, places: Iterable[int]) -> dict[int, Slot]:
        """Return the slots at `places`. They belong to the caller now, which calls `used` or `free` for each."""
        taken = {place: reservation.slots.pop(place) for place in places}
        self.ahead_bytes -= sum(slot.nbytes for slot in taken.values()) * reservation.is_ahead
        if not reservation.slots:
            del self._reservations[reservation.number]
        return taken

    def used(self, tenant: int, slot: Slot) -> None:
        """Note that the taken slot belongs to a stored block now."""
        self._count(tenant, -slot.nbytes)

    def free(self, tenant: int, slot: Slot) -> None:
        """Free a taken slot that was not used."""
        self._count(tenant, -slot.nbytes)
        self._free_slot(slot)

    def give_back(self, session_id: int, number: int) -> None:
        """End a reservation whose client no longer writes to its slots. Does nothing where the reservation is not this
        client's or has ended.
        """
        reservation = self._reservations.get(number)
        if reservation is not None and reservation.session_id == session_id:
            self._end(reservation)

    def end_session(self, session_id: int) -> None:
        """End the reservations of a client that is gone, and writes no more."""
        for reservation in self._of(session_id):
            self._end(reservation)

    def close(self) -> None:
        """Forget all, as the daemon stops: slots end with their memory, and none is freed any more, however late its
        client goes."""
        self._reservations.clear()

    def _of(self, session_id: int) -> list[Reservation]:
        return [each for each in self._reservations.values() if each.session_id == session_id]

    def _end(self, reservation: Reservation) -> None:
        del self._reservations[reservation.number]
        for slot in reservation.slots.values():
            self.ahead_bytes -= slot.nbytes * reservation.is_ahead
            self.free(reservation.tenant, slot)
        reservation.slots.clear()
