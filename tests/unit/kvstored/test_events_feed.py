"""A put pays for events with a note; later the feed sends what rows have become: parents first, each once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstore_proto.arena import TOKEN_COUNT_OFFSET, TOKENS_OFFSET
from kvstore_tiers.base import Tier
from kvstore_tiers.host import HostTier
from kvstored.events import feed
from kvstored.events.feed import ANEW_S, ROWS_A_SLICE, ROWS_AT_LEAST, EventFeed
from kvstored.events.records import Changes, KindRecord, Record, ResetRecord, unpack
from kvstored.lifecycle import Cause
from tests.reference.blocks import Shelf, key
from tests.reference.event_records import StoredBlock, blocks_of, changes_of, hash_of

SLOT_BYTES = 8192


def named(number: int) -> int:
    return hash_of(key(number))


class Outlet:
    def __init__(self) -> None:
        self.sent = bytearray()
        self.ready = True
        self.fails = False

    def send(self, message: bytes) -> None:
        if self.fails:
            raise ValueError("a planned mistake")
        self.sent += message


class Feeding:
    def __init__(self, *tiers: Tier, published: bool = True) -> None:
        self.shelf = Shelf("host", "nvme")
        self.residency = self.shelf.residency
        self.outlet = Outlet()
        self.due: list[Callable[[], None]] = []
        self.delays_s: list[float] = []
        self.feed = EventFeed(
            self.residency, tiers, lambda kind: (b"topic", 2) if published else None, self.outlet,
            self._call_later,
        )  # fmt: skip
        self.feed.announce_all()
        self.sent()

    def _call_later(self, delay_s: float, action: Callable[[], None]) -> None:
        self.delays_s.append(delay_s)
        self.due.append(action)

    def sent(self, flushes: int = 1000) -> list[Record]:
        """Return what was sent once time has passed."""
        while self.due and flushes:
            flushes -= 1
            due, self.due = self.due, []
            for action in due:
                action()
        return list(unpack(self.outlet.sent))

    def blocks(self) -> list[StoredBlock]:
        return [block for each in self.sent() if isinstance(each, Changes) for block in blocks_of(each)]

    def remove(self, number: int) -> None:
        self.residency.remove(self.residency.find_any(0, key(number)), Cause.DROPPED, 2)


def test_a_chain_is_sent_in_order_with_its_parents() -> None:
    feeding = Feeding()
    for number in range(4):
        feeding.shelf.store(number, number - 1 if number else None, depth=number)
    assert feeding.outlet.sent == b"", "a put waits for nothing"
    kind, changes = feeding.sent()
    assert kind == KindRecord(0, 2, 0, b"topic") and isinstance(changes, Changes)
    assert [(block.hash, block.parent) for block in blocks_of(changes)] == [
        (named(number), named(number - 1) if number else 0) for number in range(4)
    ]


def test_what_came_and_went_is_not_sent_and_what_changed_twice_is_sent_once() -> None:
    feeding = Feeding()
    row = feeding.shelf.store(1)
    feeding.shelf.store(2)
    feeding.residency.attach(row, 1, feeding.shelf.slot(), 2)
    feeding.remove(2)
    (block,) = feeding.blocks()
    assert (block.hash, block.mask) == (named(1), 0b11)
    feeding.remove(1)
    (gone,) = feeding.sent()
    assert isinstance(gone, Changes) and repr(gone) == repr(changes_of(gone=[row]))


def test_a_row_that_is_used_again_is_gone_and_stored() -> None:
    feeding = Feeding()
    row = feeding.shelf.store(1)
    feeding.sent()
    feeding.remove(1)
    assert feeding.shelf.store(2) == row
    (changes,) = feeding.sent()
    assert isinstance(changes, Changes)
    assert list(changes.gone) == [row] and [block.hash for block in blocks_of(changes)] == [named(2)]


def test_a_row_is_gone_before_another_is_sent_for_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "ROWS_A_SLICE", 1)
    feeding = Feeding()
    first = feeding.shelf.store(1)
    feeding.sent()
    feeding.outlet.ready = False
    feeding.remove(1)
    assert feeding.shelf.store(2) == first
    second = feeding.shelf.store(1)
    feeding.residency.notify_adopted([first], 0, 2)
    feeding.residency.rows.depth[first] = 9  # where rows that wait are put in order, this one is last
    feeding.feed._wait_once()
    feeding.outlet.ready = True
    changes = [each for each in feeding.sent() if isinstance(each, Changes)]
    assert list(changes[0].gone) == [first] and not blocks_of(changes[0])
    assert [[block.row for block in blocks_of(each)] for each in changes[1:]] == [[second], [first]]


def test_a_parent_that_is_noted_later_is_sent_first() -> None:
    feeding = Feeding()
    above = feeding.shelf.store(0)
    feeding.shelf.store(1, 0, depth=1)
    for number in range(2, ROWS_A_SLICE + 10):
        feeding.shelf.store(number)
    feeding.residency.attach(above, 1, feeding.shelf.slot(), 2)  # its last change is in the second slice
    hashes = [block.hash for block in feeding.blocks()]
    assert hashes.index(named(0)) < hashes.index(named(1)) and len(hashes) == len(set(hashes)) == ROWS_A_SLICE + 10


def test_while_the_publisher_takes_nothing_rows_wait() -> None:
    feeding = Feeding()
    feeding.outlet.ready = False
    row = feeding.shelf.store(1)
    assert feeding.sent(5) == [] and feeding.feed.waiting_rows
    assert row >= 0
    feeding.outlet.ready = True
    assert [block.hash for block in feeding.blocks()] == [named(1)] and not feeding.feed.waiting_rows


def test_what_is_noted_again_and_again_waits_once_while_nothing_is_taken() -> None:
    feeding = Feeding()
    rows = [feeding.shelf.store(number) for number in range(3)]
    feeding.outlet.ready = False
    while feeding.feed.waiting_rows <= ROWS_AT_LEAST:
        feeding.residency.notify_adopted(rows, 0, 2)
    assert feeding.sent(1) == [] and feeding.feed.waiting_rows == len(rows)
    feeding.outlet.ready = True
    assert {block.hash for block in feeding.blocks()} == {named(0), named(1), named(2)}


def test_rows_that_were_sent_are_not_kept_though_others_always_wait() -> None:
    feeding = Feeding()
    row = feeding.shelf.store(1)
    taken = 0
    while taken < 3 * ROWS_AT_LEAST:
        feeding.residency.notify_adopted([row] * ROWS_A_SLICE, 0, 2)
        feeding.sent(1)
        taken += ROWS_A_SLICE
        assert feeding.feed.waiting_rows
    assert len(feeding.feed._rows) <= 2 * feeding.feed.waiting_rows + ROWS_AT_LEAST


def test_a_new_publisher_hears_everything_again() -> None:
    feeding = Feeding()
    feeding.shelf.store(1)
    feeding.shelf.store(2, 1, depth=1)
    feeding.sent()
    feeding.feed.announce_all()
    reset, _, changes = feeding.sent()
    assert reset == ResetRecord() and isinstance(changes, Changes)
    assert [block.hash for block in blocks_of(changes)] == [named(1), named(2)]


def test_a_new_publisher_hears_of_kinds_of_which_nothing_is_stored_any_more() -> None:
    feeding = Feeding()
    feeding.shelf.store(1)
    feeding.sent()
    feeding.remove(1)  # while the publisher is dead
    feeding.outlet.sent.clear()
    feeding.feed.announce_all()
    assert feeding.sent() == [ResetRecord(), KindRecord(0, 2, 0, b"topic")], "subscribers may have the block"


def test_after_a_mistake_everything_is_announced_again() -> None:
    feeding = Feeding()
    feeding.shelf.store(1)
    feeding.outlet.fails = True
    assert feeding.sent(1) == [] and not feeding.feed.waiting_rows
    feeding.outlet.fails = False
    feeding.shelf.store(2)
    assert feeding.delays_s[-1] == ANEW_S
    reset, *rest = feeding.sent()
    assert reset == ResetRecord()
    assert {block.hash for each in rest if isinstance(each, Changes) for block in blocks_of(each)} == {
        named(1),
        named(2),
    }


def test_what_is_not_to_be_published_is_not_sent() -> None:
    feeding = Feeding(published=False)
    feeding.shelf.store(1)
    assert feeding.sent() == []


@pytest.mark.parametrize("count", [0, 2, 2000])
def test_token_ids_are_those_of_the_copy_in_memory(count: int) -> None:
    tier = HostTier(64 << 20, arena_bytes=2 << 20, copy_threads=1)
    try:
        feeding = Feeding(tier)
        for number in range(600):  # in two arenas
            slot = tier.allocate(SLOT_BYTES)
            assert slot is not None
            memory = tier.view(slot)
            memory[TOKEN_COUNT_OFFSET : TOKEN_COUNT_OFFSET + 4] = list(count.to_bytes(4, "little"))
            memory[TOKENS_OFFSET : TOKENS_OFFSET + 8] = list(number.to_bytes(8, "little"))
            row = feeding.shelf.insert(number)
            feeding.residency.attach(row, 0, slot, 1)
        expected = [number.to_bytes(8, "little") if count == 2 else b"" for number in range(600)]
        assert [block.tokens for block in feeding.blocks()] == expected
    finally:
        tier.close()
