"""A slot is overwritten only when no record on the medium names it: after power loss no record names other bytes."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from kvstore_tiers.base import Slot
from kvstore_tiers.nvme import NvmeTier
from kvstore_tiers.nvme.layout import RecordState
from kvstore_tiers.nvme.slab_file import SlabFile
from kvstore_tiers.nvme.slot_io import SlotIO
from kvstore_tiers.nvme.space import FILES_BYTES
from kvstore_tiers.segments import Segment, segment_of
from kvstore_tiers.testing.transfers import block, finish, finish_all, put
from tests.faults.test_nvme_failed_commit import Medium

SLOTS = 10
SLOT_BYTES = 12_288
SLAB_BYTES = 3 * 4096 + SLOTS * SLOT_BYTES


class WatchedMedium(Medium):
    """Records which slots were overwritten while a record on the medium named a block in them; counts syncs."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__(patch)
        self.overwritten: list[int] = []
        self.syncs = 0
        write, sync = SlotIO.write_image, SlabFile.sync
        medium = self

        def write_image(
            io: SlotIO, fd: int, offset: int, header: bytes, payload: Sequence[Segment], nbytes: int
        ) -> None:
            index = (offset - 2 * 4096) // SLOT_BYTES
            record = medium.records.get((1, index), b"")
            if record and record[6] == RecordState.LIVE:
                medium.overwritten.append(index)
            write(io, fd, offset, header, payload, nbytes)

        def counted(file: SlabFile) -> None:
            medium.syncs += 1
            sync(file)

        patch.setattr(SlotIO, "write_image", write_image)
        patch.setattr(SlabFile, "sync", counted)


@pytest.fixture
def medium(monkeypatch: pytest.MonkeyPatch) -> WatchedMedium:
    return WatchedMedium(monkeypatch)


def full_tier(path: Path, io_threads: int = 1) -> tuple[NvmeTier, list[Slot]]:
    """One slab, all its slots taken, all of it durable."""
    tier = NvmeTier.open(path, FILES_BYTES + SLAB_BYTES, slab_bytes=SLAB_BYTES, io_threads=io_threads)
    slots = []
    while (slot := put(tier, *block(len(slots) + 1, 5000))) is not None:
        slots.append(slot)
    assert len(slots) == SLOTS and finish(tier.sync).ok
    return tier, slots


def test_a_slot_that_was_just_freed_is_withdrawn_on_the_medium_first(tmp_path: Path, medium: WatchedMedium) -> None:
    tier, slots = full_tier(tmp_path)
    with closing(tier):
        for number, slot in enumerate(slots):
            tier.free(slot)
            again = put(tier, *block(100 + number, 5000))
            assert again is not None and again.offset == slot.offset
    assert medium.overwritten == []


@pytest.mark.parametrize("io_threads", [1, 4])
def test_slots_that_were_freed_together_share_a_sync(tmp_path: Path, medium: WatchedMedium, io_threads: int) -> None:
    tier, slots = full_tier(tmp_path, io_threads)
    with closing(tier):
        medium.syncs = 0
        for slot in slots:
            tier.free(slot)
        writes = []
        payloads = []
        for number in range(SLOTS):
            taken = tier.allocate(SLOT_BYTES)
            assert taken is not None
            header, payload = block(100 + number, 5000)
            payloads.append(payload)
            writes.append(partial(tier.write, taken, header, [segment_of(payload)]))
        assert all(outcome.ok for outcome in finish_all(writes))
        assert medium.syncs == 1
        assert finish(tier.sync).ok
    with closing(NvmeTier.open(tmp_path, FILES_BYTES + SLAB_BYTES, slab_bytes=SLAB_BYTES)) as tier:
        found = {int.from_bytes(header.key, "big") for _, header in tier.recover()}
        assert found == set(range(100, 100 + SLOTS))
    assert medium.overwritten == []


def test_after_a_commit_slots_are_taken_again_without_a_sync(tmp_path: Path, medium: WatchedMedium) -> None:
    tier, slots = full_tier(tmp_path)
    with closing(tier):
        for slot in slots[:4]:
            tier.free(slot)
        assert finish(tier.sync).ok
        tier.free(slots[4])
        medium.syncs = 0
        taken = [put(tier, *block(100 + number, 5000)) for number in range(4)]
        assert medium.syncs == 0
        assert {slot.offset for slot in taken if slot} == {slot.offset for slot in slots[:4]}, "the hot one comes last"
        assert put(tier, *block(200, 5000)) is not None and medium.syncs == 1
    assert medium.overwritten == []


def test_a_slot_freed_again_before_its_commit_ends_stays_unsettled(tmp_path: Path, medium: WatchedMedium) -> None:
    """A commit settles the use of the slot that it withdrew, not a later one."""
    tier, slots = full_tier(tmp_path)
    with closing(tier):
        slab = tier._space.slabs[1]
        index = slab.superblock.index_of(slots[0].offset)
        tier.free(slots[0])
        earlier = {index: slab.generations[index]}
        again = put(tier, *block(100, 5000))
        assert again is not None and finish(tier.sync).ok
        tier.free(again)
        slab.settle(earlier)
        medium.syncs = 0
        assert put(tier, *block(101, 5000)) is not None
        assert medium.syncs == 1
    assert medium.overwritten == []


def test_a_slot_taken_and_given_back_unwritten_stays_unsettled(tmp_path: Path, medium: WatchedMedium) -> None:
    tier, slots = full_tier(tmp_path)
    with closing(tier):
        tier.free(slots[0])
        taken = tier.allocate(SLOT_BYTES)
        assert taken is not None
        tier.free(taken)  # a caller that changed its mind
        assert put(tier, *block(100, 5000)) is not None
    assert medium.overwritten == []


def test_a_sync_that_fails_keeps_the_slot_from_being_overwritten(tmp_path: Path, medium: WatchedMedium) -> None:
    tier, slots = full_tier(tmp_path)
    with closing(tier):
        tier.free(slots[0])
        medium.failing = 1
        taken = tier.allocate(SLOT_BYTES)
        assert taken is not None
        header, payload = block(100, 5000)
        outcome = finish(lambda done: tier.write(taken, header, [segment_of(payload)], done))
        assert not outcome.ok and outcome.errno == errno.EIO
        assert medium.overwritten == []
        tier.free(taken)
        assert put(tier, header, payload) is not None
        assert medium.overwritten == []
        assert finish(tier.sync).ok
        assert medium.states() == [RecordState.LIVE] * SLOTS


def test_a_sync_that_failed_beside_a_commit_fails_the_commit(tmp_path: Path, medium: WatchedMedium) -> None:
    """The kernel reports a failure once: the sync that gets the error is not the only one whose bytes are lost."""
    tier, slots = full_tier(tmp_path)
    with closing(tier):
        slab = tier._space.slabs[1]
        tier.free(slots[0])
        assert put(tier, *block(100, 5000)) is not None
        publish, failed = slab.publish, False

        def publish_then_lose(*arguments: object) -> object:
            nonlocal failed
            published = publish(*arguments)  # type: ignore[arg-type]
            if not failed:
                failed, medium.failing = True, 1
                with pytest.raises(OSError, match=os.strerror(errno.EIO)):
                    slab.sync()  # that of an I/O thread
            return published

        slab.publish = publish_then_lose  # type: ignore[method-assign, assignment]
        assert not finish(tier.sync).ok
        assert finish(tier.sync).ok
        assert medium.states() == [RecordState.LIVE] * SLOTS
