"""The contract that every tier must keep, as tests. Subclass `TierContract` and give `make_tier`.

Owns the obligations of kvstore_tiers.base, one test each. Never knows a tier's kind.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import pairwise
from queue import SimpleQueue

import numpy as np

from kvstore_proto.arena import HEADER_BYTES, payload_checksum, read_header, slot_bytes
from kvstore_tiers.base import Completion, Outcome, OutcomeKind, Slot, Tier, TierState
from kvstore_tiers.segments import AlignedBuffer, Segment, segment_of, view_at
from kvstore_tiers.testing.transfers import block, finish, finish_all, get, pieces, put

CAPACITY_BYTES = 4 << 20
FAR_S = 60.0
PAYLOAD_BYTES = 3 * 4096 + 1000  # ends within a page


class TierContract:
    """A test suite that every tier must pass. A subclass defines `make_tier`, which opens an empty tier of about
    `capacity_bytes` bytes; each test closes the tier that it opened.
    """

    def make_tier(self, capacity_bytes: int) -> Tier:
        raise TypeError("a subclass of TierContract must define make_tier")

    def verifies_writes(self, tier: Tier) -> bool:
        """Return True if `tier` compares the bytes that it stores with the checksum that its caller gives, and refuses
        a write that differs.
        """
        return False

    def test_a_block_comes_back_as_it_was_written(self) -> None:
        with closing(self.make_tier(CAPACITY_BYTES)) as tier:
            header, payload = block(1, PAYLOAD_BYTES)
            slot = put(tier, header, payload)
            assert slot is not None
            outcome, copy = get(tier, slot, header.key, PAYLOAD_BYTES)
            assert outcome.ok, outcome
            assert np.array_equal(copy, payload)
            assert outcome.header is not None
            assert (outcome.header.key, outcome.header.parent) == (header.key, header.parent)
            assert outcome.header.tokens == header.tokens
            assert outcome.header.generation == slot.generation
            assert outcome.header.checksum != 0

    def test_a_given_checksum_is_taken_and_judged(self) -> None:
        with closing(self.make_tier(CAPACITY_BYTES)) as tier:
            header, payload = block(1, PAYLOAD_BYTES)
            slot = tier.allocate(slot_bytes(PAYLOAD_BYTES))
            assert slot is not None
            given = replace(header, checksum=12345)
            written = finish(lambda done: tier.write(slot, given, [segment_of(payload)], done))
            assert written.kind is (OutcomeKind.CORRUPT if self.verifies_writes(tier) else OutcomeKind.DONE), written
            outcome, _ = get(tier, slot, header.key, PAYLOAD_BYTES)
            assert outcome.kind is OutcomeKind.CORRUPT

    def test_scattered_memory_is_gathered_and_filled(self) -> None:
        with closing(self.make_tier(CAPACITY_BYTES)) as tier:
            header, payload = block(2, PAYLOAD_BYTES)
            slot = tier.allocate(slot_bytes(PAYLOAD_BYTES))
            assert slot is not None
            written = finish(lambda done: tier.write(slot, header, pieces(payload, 17, 5000), done))
            assert written.ok, written
            copy = np.zeros_like(payload)
            outcome = finish(lambda done: tier.read(slot, header.key, pieces(copy, 1, 4096, 9000), done))
            assert outcome.ok, outcome
            assert np.array_equal(copy, payload)

    def test_aligned_memory_is_read_in_place_and_no_further(self) -> None:
        with closing(self.make_tier(CAPACITY_BYTES)) as tier:
            header, payload = block(3, PAYLOAD_BYTES)
            slot = put(tier, header, payload)
            assert slot is not None
            destination = AlignedBuffer(8 * 4096)
            outcome = finish(lambda done: tier.read(slot, header.key, [destination.segment(8 * 4096)], done))
            assert outcome.ok, outcome
            got = view_at(destination.address, destination.nbytes)
            assert np.array_equal(got[:PAYLOAD_BYTES], payload)
            assert not got[PAYLOAD_BYTES:].any(), "bytes beyond the payload are somebody else's"

    def test_a_destination_that_is_too_small_fails(self) -> None:
        with closing(self.make_tier(CAPACITY_BYTES)) as tier:
            header, payload = block(4, PAYLOAD_BYTES)
            slot = put(tier, header, payload)
            assert slot is not None
            outcome, _ = get(tier, slot, header.key, PAYLOAD_BYTES - 1)
            assert outcome.kind is OutcomeKind.FAILED

    def test_another_key_is_corrupt_not_served(self) -> None:
        with closing(self.make_tier(CAPACITY_BYTES)) as tier:
            header, payload = block(5, PAYLOAD_BYTES)
            slot = put(tier, header, payload)
            assert slot is not None
            outcome, _ = get(tier, slot, b"x" * 16, PAYLOAD_BYTES)
            assert outcome.kind is OutcomeKind.CORRUPT
            assert tier.statistics().corrupt == 1

    def test_a_slot_that_was_never_written_is_not_served(self) -> None:
        with closing(self.make_tier(CAPACITY_BYTES)) as tier:
            header, payload = block(6, PAYLOAD_BYTES)
            old = put(tier, header, payload)
            assert old is not None
            tier.free(old)
            slots = _fill(tier, old.nbytes)  # one of these has the old block's place
            for slot in slots:
                outcome, _ = get(tier, slot, header.key, PAYLOAD_BYTES)
                assert outcome.kind is OutcomeKind.CORRUPT, slot

    def test_a_slot_has_its_place_before_it_is_written(self) -> None:
        with closing(self.make_tier(CAPACITY_BYTES)) as tier:
            header, payload = block(7, PAYLOAD_BYTES)
            slot = tier.allocate(slot_bytes(PAYLOAD_BYTES))
            assert slot is not None
            assert tier.location(slot)
            assert finish(lambda done: tier.write(slot, header, pieces(payload), done)).ok
            assert tier.location(slot)

    def test_capacity_is_hard_and_space_comes_back(self) -> None:
        with closing(self.make_tier(CAPACITY_BYTES)) as tier:
            nbytes = slot_bytes(PAYLOAD_BYTES)
            slots = _fill(tier, nbytes)
            assert slots, "nothing fits an empty tier"
            statistics = tier.statistics()
            assert statistics.blocks == len(slots)
            assert sum(slot.nbytes for slot in slots) <= statistics.used_bytes <= statistics.capacity_bytes
            assert sum(statistics.used_by.values()) == statistics.used_bytes
            for slot in slots[::2]:
                tier.free(slot)
            assert len(_fill(tier, nbytes)) == len(slots[::2])

    def test_slots_do_not_overlap_and_hold_what_was_asked(self) -> None:
        with closing(self.make_tier(CAPACITY_BYTES)) as tier:
            slots = [slot for size in (8192, 20480, 65536) if (slot := tier.allocate(size)) is not None]
            slots += _fill(tier, 8192)
            places = sorted((slot.container, slot.offset, slot.nbytes) for slot in slots)
            for (container, offset, nbytes), (next_container, next_offset, _) in pairwise(places):
                assert container != next_container or offset + nbytes <= next_offset
            assert all(slot.nbytes >= 8192 and slot.offset % 4096 == 0 for slot in slots)

    def test_another_slot_size_gets_the_room_of_freed_slots(self) -> None:
        with closing(self.make_tier(CAPACITY_BYTES)) as tier:
            for slot in _fill(tier, 8192):
                tier.free(slot)
            header, payload = block(7, 60000)
            assert put(tier, header, payload) is not None
            assert tier.statistics().used_bytes <= tier.statistics().capacity_bytes

    def test_a_reused_place_has_a_higher_generation(self) -> None:
        with closing(self.make_tier(CAPACITY_BYTES)) as tier:
            seen: dict[tuple[int, int], int] = {}
            for _ in range(3):
                slots = _fill(tier, 65536)
                for slot in slots:
                    place = (slot.container, slot.offset)
                    assert slot.generation > seen.get(place, 0)
                    seen[place] = slot.generation
                    tier.free(slot)

    def test_broken_invariants_are_raised(self) -> None:
        with closing(self.make_tier(CAPACITY_BYTES)) as tier:
            slot = tier.allocate(8192)
            assert slot is not None
            tier.free(slot)
            _raises(RuntimeError, lambda: tier.free(slot))
            _raises(RuntimeError, lambda: tier.free(Slot(999, 0, 8192, 1)))
            for size in (0, -4096, 5000):
                _raises(ValueError, partial(tier.allocate, size))
            again = tier.allocate(8192)
            assert again is not None
            header, payload = block(8, 8192)
            _raises(RuntimeError, lambda: tier.write(again, header, [segment_of(payload)], _ignore))
            _raises(RuntimeError, lambda: tier.write(again, header, [segment_of(payload[:100])], _ignore))

    def test_many_transfers_at_once_end_once_each(self) -> None:
        with closing(self.make_tier(CAPACITY_BYTES)) as tier:
            blocks = [block(number, 4096) for number in range(64)]
            slots = _fill(tier, 8192)[: len(blocks)]
            writes = [
                partial(tier.write, slot, header, [segment_of(payload)])
                for slot, (header, payload) in zip(slots, blocks, strict=True)
            ]
            assert all(outcome.ok for outcome in finish_all(writes))
            copies = [np.zeros(4096, dtype=np.uint8) for _ in blocks]
            reads = [
                partial(tier.read, slot, header.key, [segment_of(copy)])
                for slot, (header, _), copy in zip(slots, blocks, copies, strict=True)
            ]
            assert all(outcome.ok for outcome in finish_all(reads))
            assert all(np.array_equal(copy, b[1]) for copy, b in zip(copies, blocks, strict=True))
            statistics = tier.statistics()
            assert (statistics.writes, statistics.reads) == (64, 64)
            assert (statistics.bytes_written, statistics.bytes_read) == (64 * 4096, 64 * 4096)

    def test_an_empty_payload_is_a_block_too(self) -> None:
        with closing(self.make_tier(CAPACITY_BYTES)) as tier:
            header, payload = block(9, 0)
            slot = put(tier, header, payload)
            assert slot is not None
            outcome, _ = get(tier, slot, header.key, 0)
            assert outcome.ok, outcome

    def test_slot_images_move_in_and_out(self) -> None:
        with closing(self.make_tier(CAPACITY_BYTES)) as tier:
            header, payload = block(10, PAYLOAD_BYTES)
            image = AlignedBuffer(slot_bytes(PAYLOAD_BYTES))
            source = image.segment(image.nbytes)
            raw = view_at(image.address, image.nbytes)
            sealed = replace(header, checksum=payload_checksum(payload), generation=77)
            raw[:HEADER_BYTES] = np.frombuffer(sealed.pack(), dtype=np.uint8)
            raw[HEADER_BYTES : HEADER_BYTES + PAYLOAD_BYTES] = payload
            slot = tier.allocate(image.nbytes)
            assert slot is not None
            outcome = finish(lambda done: tier.move_in(slot, source, header.key, done))
            assert outcome.ok, outcome
            assert outcome.header is not None and outcome.header.generation == slot.generation
            target = AlignedBuffer(image.nbytes)
            destination = Segment(target.address, target.nbytes, owner=target, generation=4711)
            outcome = finish(lambda done: tier.move_out(slot, destination, header.key, done))
            assert outcome.ok, outcome
            moved = view_at(target.address, target.nbytes)
            assert np.array_equal(moved[HEADER_BYTES : HEADER_BYTES + PAYLOAD_BYTES], payload)
            assert read_header(moved) == replace(sealed, generation=4711)

    def test_memory_without_the_block_does_not_move_in(self) -> None:
        with closing(self.make_tier(CAPACITY_BYTES)) as tier:
            garbage = AlignedBuffer(8192)
            slot = tier.allocate(8192)
            assert slot is not None
            outcome = finish(lambda done: tier.move_in(slot, garbage.segment(8192), b"k" * 16, done))
            assert outcome.kind is OutcomeKind.CORRUPT

    def test_images_that_move_together_end_each_by_itself(self) -> None:
        with closing(self.make_tier(CAPACITY_BYTES)) as tier:
            blocks, images = [block(30 + number, PAYLOAD_BYTES) for number in range(3)], list[Segment]()
            for number, (header, payload) in enumerate(blocks):
                sealed = replace(header, checksum=payload_checksum(payload)).pack() if number != 1 else b""
                image = segment_of(np.frombuffer(sealed.ljust(HEADER_BYTES, b"-") + payload.tobytes(), np.uint8))
                images.append(image)
            slots = tier.allocate_run(3, slot_bytes(PAYLOAD_BYTES))
            targets, keys = [AlignedBuffer(slots[0].nbytes) for _ in slots], [header.key for header, _ in blocks]
            ended: SimpleQueue[Sequence[Outcome]] = SimpleQueue()
            tier.move_in_run(slots, images, keys, ended.put)
            assert [outcome.ok for outcome in ended.get(timeout=FAR_S)] == [True, False, True]
            tier.move_out_run(slots, [each.segment(each.nbytes) for each in targets], keys, ended.put)
            assert [outcome.ok for outcome in ended.get(timeout=FAR_S)] == [True, False, True]
            for at in (0, 2):
                moved = view_at(targets[at].address, HEADER_BYTES + PAYLOAD_BYTES)
                assert np.array_equal(moved[HEADER_BYTES:], blocks[at][1])

    def test_a_block_is_copied_to_another_slot(self) -> None:
        with closing(self.make_tier(CAPACITY_BYTES)) as tier:
            header, payload = block(13, PAYLOAD_BYTES)
            source = put(tier, header, payload)
            assert source is not None
            target = tier.allocate(source.nbytes)
            assert target is not None
            assert finish(tier.sync).ok
            outcome = finish(lambda done: tier.relocate(source, target, header.key, done))
            assert outcome.ok, outcome
            for slot in (source, target):
                outcome, copy = get(tier, slot, header.key, PAYLOAD_BYTES)
                assert outcome.ok and np.array_equal(copy, payload), outcome
                assert outcome.header is not None and outcome.header.generation == slot.generation
                assert outcome.header.tokens == header.tokens
            assert finish(tier.sync).ok
            tier.free(source)
            assert get(tier, target, header.key, PAYLOAD_BYTES)[0].ok

    def test_another_block_is_not_copied(self) -> None:
        with closing(self.make_tier(CAPACITY_BYTES)) as tier:
            header, payload = block(14, PAYLOAD_BYTES)
            source = put(tier, header, payload)
            assert source is not None
            target = tier.allocate(source.nbytes)
            assert target is not None
            outcome = finish(lambda done: tier.relocate(source, target, b"x" * 16, done))
            assert outcome.kind is OutcomeKind.CORRUPT
            outcome, _ = get(tier, target, b"x" * 16, PAYLOAD_BYTES)
            assert outcome.kind is OutcomeKind.CORRUPT

    def test_a_container_is_emptied_for_another_size(self) -> None:
        """Check that a container whose slots were freed serves another slot size. It applies only to tiers that have
        containers.
        """
        with closing(self.make_tier(CAPACITY_BYTES)) as tier:
            slots = _fill(tier, 8192)
            convertible = tier.convertible(65536)
            if not tier.info.container_bytes:
                assert convertible == tier.containers() == [] and tier.makes_room(slots[0].container, 65536)
                return
            assert not tier.convertible(8192) and tier.makes_room(slots[0].container, 8192)
            assert not tier.makes_room(slots[0].container, 65536) and tier.allocate(65536) is None
            chosen = convertible[0]
            inside = [slot for slot in slots if slot.container == chosen.container]
            assert (chosen.slot_bytes, chosen.used_slots) == (8192, len(inside))
            tier.set_aside(chosen.container)
            tier.free(inside.pop())
            assert tier.allocate(8192) is None, "a container that is set aside hands out no slot"
            assert not tier.put_back(chosen.container)
            again = tier.allocate(8192)
            assert again is not None
            inside.append(again)
            tier.set_aside(chosen.container)
            for slot in inside:
                tier.free(slot)
            assert tier.allocate(8192) is None and tier.allocate(65536) is None
            assert tier.put_back(chosen.container)
            other = tier.allocate(65536)
            assert other is not None and tier.statistics().used_bytes <= tier.statistics().capacity_bytes

    def test_sync_and_quarantine_end_well(self) -> None:
        with closing(self.make_tier(CAPACITY_BYTES)) as tier:
            header, payload = block(11, PAYLOAD_BYTES)
            slot = put(tier, header, payload)
            assert slot is not None
            assert finish(tier.sync).ok
            tier.quarantine(slot, "a test says so")
            assert tier.statistics().blocks == 0
            assert finish(tier.sync).ok

    def test_a_sync_of_a_durable_tier_ends_after_the_writes_before_it(self) -> None:
        with closing(self.make_tier(CAPACITY_BYTES)) as tier:
            if not tier.info.is_durable:
                return
            ended: list[str] = []

            def write(number: int, done: Completion) -> None:
                header, payload = block(number, PAYLOAD_BYTES)
                slot = tier.allocate(slot_bytes(PAYLOAD_BYTES))
                assert slot is not None
                tier.write(slot, header, [segment_of(payload)], _noting("write", ended, done))

            starts = [partial(write, 20 + number) for number in range(3)]
            outcomes = finish_all([*starts, lambda done: tier.sync(_noting("sync", ended, done))])
            assert all(outcome.ok for outcome in outcomes) and ended == ["write"] * 3 + ["sync"]

    def test_an_empty_tier_recovers_nothing(self) -> None:
        with closing(self.make_tier(CAPACITY_BYTES)) as tier:
            assert list(tier.recover()) == []

    def test_close_finishes_what_was_asked_and_refuses_more(self) -> None:
        tier = self.make_tier(CAPACITY_BYTES)
        header, payload = block(12, PAYLOAD_BYTES)
        slot = tier.allocate(slot_bytes(PAYLOAD_BYTES))
        assert slot is not None
        ended: list[Outcome] = []
        done = threading.Event()

        def record(outcome: Outcome) -> None:
            ended.append(outcome)
            done.set()

        tier.write(slot, header, [segment_of(payload)], record)
        tier.close()
        assert done.is_set() and len(ended) == 1
        assert ended[0].kind in (OutcomeKind.DONE, OutcomeKind.CANCELLED)
        assert tier.statistics().state is TierState.CLOSED
        assert tier.allocate(8192) is None
        tier.close()


def _fill(tier: Tier, nbytes: int) -> list[Slot]:
    slots = []
    while (slot := tier.allocate(nbytes)) is not None:
        slots.append(slot)
    return slots


def _ignore(_outcome: Outcome) -> None:
    """Ignore the outcome of a transfer that must not start."""


def _noting(what: str, ended: list[str], done: Completion) -> Completion:
    """Return a completion that does what `done` does and appends `what` to `ended`."""

    def note(outcome: Outcome) -> None:
        ended.append(what)
        done(outcome)

    return note


def _raises(expected: type[Exception], action: Callable[[], object]) -> None:
    try:
        action()
    except expected:
        return
    raise AssertionError(f"{expected.__name__} was not raised")
