"""The block that was used more often has the place in a full tier, and not for ever."""

from __future__ import annotations

from kvstored.store.transfer import admission
from kvstored.store.transfer.admission import FrequencyAdmission
from tests.reference.blocks import Shelf

HELD = 10  # blocks in the tier


class Ring:
    """A frequency admission for a tier of `HELD` blocks."""

    def __init__(self) -> None:
        self.shelf = Shelf("device", "host")
        for number in range(HELD):
            self.shelf.store(100 + number)
        self.frequency = FrequencyAdmission(self.shelf.residency, 0)

    def block(self, number: int, uses: int, *, tier: int = 1) -> int:
        row = self.shelf.store(number, tier=tier)
        self.used(row, uses)
        return row

    def used(self, row: int, uses: int = 1) -> None:
        for _ in range(uses):
            self.shelf.now_ns += 1
            self.shelf.residency.touch_run([row], self.shelf.now_ns)


def test_the_one_used_more_often_wins_and_the_one_that_is_there_a_draw() -> None:
    ring = Ring()
    victim = ring.block(1, 3, tier=0)
    assert [ring.frequency.admits(ring.block(10 + uses, uses), victim) for uses in (1, 2, 3, 4)] == [False] * 3 + [True]


def test_a_victim_that_is_used_no_more_loses_after_eight_times_the_tier_was_declined() -> None:
    ring = Ring()
    victim, row = ring.block(1, 60, tier=0), ring.block(2, 2)
    held = HELD + 1
    assert not ring.frequency.admits(row, victim, 8 * held)
    assert not ring.frequency.admits(row, victim, 1), "not more than that yet"
    assert ring.frequency.admits(row, victim)


def test_a_use_protects_the_victim_anew() -> None:
    ring = Ring()
    victim, row = ring.block(1, 60, tier=0), ring.block(2, 2)
    for _ in range(5):
        assert not ring.frequency.admits(row, victim, 8 * (HELD + 1) + 1)
        ring.used(victim)
    assert not ring.frequency.admits(row, victim)


def test_what_the_tier_declined_for_others_counts_from_the_first_contest_on() -> None:
    ring = Ring()
    first, second, row = ring.block(1, 60, tier=0), ring.block(2, 60, tier=0), ring.block(3, 2)
    assert not ring.frequency.admits(row, first, 1000)
    assert not ring.frequency.admits(row, second)
    assert ring.frequency.admits(row, first)
    assert not ring.frequency.admits(row, second)


def test_notes_are_bounded() -> None:
    ring = Ring()
    row = ring.block(1, 1)
    for number in range(admission._NOTES_MAX + 50):
        assert not ring.frequency.admits(row, ring.block(1000 + number, 1, tier=0))
    assert len(ring.frequency._won) == admission._NOTES_MAX
