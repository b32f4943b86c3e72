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
    """A set of slots that one client may write to. `slots` maps a place (0, 1, …) to its slot; slots from which a block
    was stored are removed. `places` is the number of slots that were added. `is_ahead`: the client reserved them before
    it had a put.
    """

    number: int
    session_id: int
    tenant: int
    expires_ns: int
    is_ahead: bool = False
    slots: dict[int, Slot] = field(default_factory=dict)
    places: int = 0


class Reservations:
    """The table of all reservations of the daemon. `free_slot` frees a slot of the host tier. `count(tenant, nbytes)`
    adds to the bytes that a tenant holds for coming blocks. When a client dies, call `end_session`.
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
        """Return the bytes of all slots that the client of this session has reserved, in expired reservations too."""
        return sum(slot.nbytes for each in self._of(session_id) for slot in each.slots.values())

    def begin(self, session_id: int, tenant: int, expires_ns: int, *, is_ahead: bool = False) -> Reservation:
        """Return a new reservation without slots, valid until `expires_ns` (monotonic)."""
        self._last_number += 1
        reservation = Reservation(self._last_number, session_id, tenant, expires_ns, is_ahead)
        self._reservations[reservation.number] = reservation
        return reservation

    def add(self, reservation: Reservation, slot: Slot) -> bool:
        """Add `slot` to `reservation`. Return False when the reservation has ended meanwhile; then the slot has been
        freed."""
        self._count(reservation.tenant, slot.nbytes)
        if reservation.number not in self._reservations:
            self.free(reservation.tenant, slot)
            return False
        reservation.slots[reservation.places] = slot
        reservation.places += 1
        self.ahead_bytes += slot.nbytes * reservation.is_ahead
        return True

    def find(self, session_id: int, number: int, now_ns: int) -> Reservation | None:
        """Return the reservation `number` if the client of this session may still store from it, otherwise None."""
        reservation = self._reservations.get(number)
        if reservation is None or reservation.session_id != session_id or reservation.expires_ns <= now_ns:
            return None
        return reservation

    def take(self, reservation: Reservation, places: Iterable[int]) -> dict[int, Slot]:
        """Remove the slots at `places` from the reservation, and return them by place. Call `used` or `free` for each
        of them."""
        taken = {place: reservation.slots.pop(place) for place in places}
        self.ahead_bytes -= sum(slot.nbytes for slot in taken.values()) * reservation.is_ahead
        if not reservation.slots:
            del self._reservations[reservation.number]
        return taken

    def used(self, tenant: int, slot: Slot) -> None:
        """Note that `slot`, which was taken, belongs to a stored block of `tenant` now."""
        self._count(tenant, -slot.nbytes)

    def free(self, tenant: int, slot: Slot) -> None:
        """Free `slot`, which was taken and not used."""
        self._count(tenant, -slot.nbytes)
        self._free_slot(slot)

    def give_back(self, session_id: int, number: int) -> None:
        """End the reservation `number`, whose client no longer writes to its slots. It does nothing if the reservation
        is another client's or has ended.
        """
        reservation = self._reservations.get(number)
        if reservation is not None and reservation.session_id == session_id:
            self._end(reservation)

    def end_session(self, session_id: int) -> None:
        """End all reservations of slots of the client of session `session_id`, which is gone and writes no more."""
        for reservation in self._of(session_id):
            self._end(reservation)

    def close(self) -> None:
        """Forget all reservations, as the daemon stops. No slot is freed any more, since slots end with their
        memory.
        """
        self._reservations.clear()

    def _of(self, session_id: int) -> list[Reservation]:
        return [each for each in self._reservations.values() if each.session_id == session_id]

    def _end(self, reservation: Reservation) -> None:
        del self._reservations[reservation.number]
        for slot in reservation.slots.values():
            self.ahead_bytes -= slot.nbytes * reservation.is_ahead
            self.free(reservation.tenant, slot)
        reservation.slots.clear()
