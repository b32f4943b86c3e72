"""Slots that clients hold: which are freed when a client goes, and that none is once the daemon has stopped."""

from __future__ import annotations

from kvstore_tiers.base import Slot
from kvstored.store.reservations import Reservations


def reserved(freed: list[Slot]) -> Reservations:
    """Two slots of session 1, one of session 2."""
    made = Reservations(freed.append, lambda tenant, nbytes: None)
    for session, count in ((1, 2), (2, 1)):
        reservation = made.begin(session, 7, 1000)
        for at in range(count):
            assert made.add(reservation, Slot(session, 4096 * at, 4096, 0))
    return made


def test_the_slots_of_a_client_that_is_gone_are_free() -> None:
    freed: list[Slot] = []
    reservations = reserved(freed)
    reservations.end_session(1)
    assert [slot.container for slot in freed] == [1, 1] and reservations.held_bytes(2) == 4096


def test_a_client_that_goes_after_the_daemon_has_stopped_frees_nothing() -> None:
    """The daemon's look at the client comes a moment later, when the arenas are gone."""
    freed: list[Slot] = []
    reservations = reserved(freed)
    reservations.close()
    reservations.end_session(1)
    reservations.give_back(2, 2)
    assert not freed and not len(reservations) and not reservations.held_bytes(2)


def test_a_slot_that_is_stored_from_while_others_are_still_added_leaves_its_place_empty() -> None:
    """A client can guess the number of a reservation before the daemon has answered."""
    freed: list[Slot] = []
    reservations = reserved(freed)
    filling = reservations.find(1, 1, 0)
    assert filling is not None
    (stored,) = reservations.take(filling, [0]).values()
    added = Slot(1, 4096 * 2, 4096, 0)
    assert reservations.add(filling, added) and [*filling.slots] == [1, 2]
    reservations.end_session(1)
    assert sorted(freed) == [Slot(1, 4096, 4096, 0), added] and stored not in freed
