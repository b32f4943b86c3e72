"""A sync that failed: the kernel calls pages written that the medium did not get. What is said afterwards must hold."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import pytest

from kvstore_tiers.nvme import DirectoryUnusable, NvmeTier
from kvstore_tiers.nvme.layout import RECORD_BYTES, SUPERBLOCK_BYTES, RecordState, record_header, record_holds
from kvstore_tiers.nvme.slab_file import SlabFile
from kvstore_tiers.nvme.space import FILES_BYTES
from kvstore_tiers.testing.transfers import block, finish, put


class Medium:
    """The records that a medium has whose `failing` syncs lose what was written before them, for good."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.failing = 0
        self.records: dict[tuple[int, int], bytes] = {}
        self._cache: dict[tuple[int, int], bytes] = {}
        write, sync = SlabFile.write_records, SlabFile.sync
        medium = self

        def write_records(file: SlabFile, records: Iterable[tuple[int, bytes]]) -> None:
            written = list(records)
            write(file, written)
            medium._cache.update({(file.superblock.number, index): raw for index, raw in written})

        def synced(file: SlabFile) -> None:
            cached, medium._cache = medium._cache, {}
            if medium.failing:
                medium.failing -= 1
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            sync(file)
            medium.records.update(cached)

        patch.setattr(SlabFile, "write_records", write_records)
        patch.setattr(SlabFile, "sync", synced)

    def states(self) -> list[int]:
        return [raw[6] for _, raw in sorted(self.records.items())]


@pytest.fixture
def medium(monkeypatch: pytest.MonkeyPatch) -> Medium:
    return Medium(monkeypatch)


def open_tier(path: Path) -> NvmeTier:
    return NvmeTier.open(path, 3 << 20, slab_bytes=512 << 10, io_threads=1)


def test_nothing_is_durable_in_a_file_that_was_removed(tmp_path: Path) -> None:
    with closing(open_tier(tmp_path / "nvme")) as tier:
        put(tier, *block(1, 5000))
        assert finish(tier.sync).ok
        shutil.rmtree(tmp_path / "nvme")
        assert put(tier, *block(2, 5000)) is not None, "an open file takes it all the same"
        outcome = finish(tier.sync)
        assert outcome.errno == errno.ENOENT and "removed" in outcome.message


@pytest.mark.parametrize("failures", [1, 2])
def test_a_free_that_was_answered_is_on_the_medium(tmp_path: Path, medium: Medium, failures: int) -> None:
    with closing(open_tier(tmp_path)) as tier:
        slot = put(tier, *block(1, 5000))
        assert slot is not None and finish(tier.sync).ok
        assert medium.states() == [RecordState.LIVE]
        tier.free(slot)
        medium.failing = failures
        for _ in range(failures):
            assert not finish(tier.sync).ok
        assert medium.states() == [RecordState.LIVE]
        assert finish(tier.sync).ok
        assert medium.states() == [RecordState.FREE]


def test_a_block_that_came_meanwhile_is_not_written_over(tmp_path: Path, medium: Medium) -> None:
    """The slot was freed, the sync failed, the slot holds another block when the next sync comes."""
    two_slots = 36 << 10
    tier = NvmeTier.open(tmp_path, FILES_BYTES + two_slots + 1024, slab_bytes=two_slots, io_threads=1)
    with closing(tier):
        slot = put(tier, *block(1, 5000))
        other = put(tier, *block(2, 5000))
        assert slot is not None and other is not None and finish(tier.sync).ok
        tier.free(slot)
        medium.failing = 1
        assert not finish(tier.sync).ok
        tier.free(other)
        again = [put(tier, *block(number, 5000)) for number in (3, 4)]
        assert {at.offset for at in again if at} == {slot.offset, other.offset}
        assert finish(tier.sync).ok
        assert medium.states() == [RecordState.LIVE] * 2
        named = {int.from_bytes(record_header(raw).key, "big") for raw in medium.records.values()}
        assert named == {3, 4}


def test_a_slab_that_got_another_geometry_is_left_alone(tmp_path: Path, medium: Medium) -> None:
    """A free record of the old geometry, written again after a failed sync, would overlap records of the new one."""
    slab_bytes = 128 << 10
    tier = NvmeTier.open(tmp_path, FILES_BYTES + slab_bytes + 8192, slab_bytes=slab_bytes, io_threads=1)
    with closing(tier):
        slots = [put(tier, *block(number, 5000)) for number in range(1, 6)]
        assert finish(tier.sync).ok
        for slot in slots:
            assert slot is not None
            tier.free(slot)
        medium.failing = 1
        assert not finish(tier.sync).ok
        again = [put(tier, *block(number, 20_000)) for number in (11, 12, 13)]
        assert all(again), "the slab was reshaped"
        assert len(tier._space.slabs) == 1 and tier._space.slabs[1].superblock.slot_bytes > 20_000
        assert finish(tier.sync).ok
    tier = NvmeTier.open(tmp_path, FILES_BYTES + slab_bytes + 8192, slab_bytes=slab_bytes, io_threads=1)
    with closing(tier):
        assert {slot for slot, _ in tier.recover()} == set(again)
        assert tier.recovery_report.damaged_records == 0


def test_records_half_written_are_withdrawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The medium fails between two runs of records: the blocks of the first can be found, the books must know."""
    with closing(open_tier(tmp_path)) as tier:
        slots = [put(tier, *block(number, 5000)) for number in (1, 2, 3)]
        assert slots[1] is not None
        tier.free(slots[1])
        real, written = os.pwrite, 0

        def once(fd: int, raw: bytes, offset: int) -> int:
            nonlocal written
            if len(raw) == RECORD_BYTES:
                written += 1
                if written == 2:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(fd, raw, offset)

        monkeypatch.setattr(os, "pwrite", once)
        assert not finish(tier.sync).ok
        assert written == 2
        for slot in (slots[0], slots[2]):
            assert slot is not None
            tier.free(slot)
        assert finish(tier.sync).ok
        raw = (tmp_path / "slabs" / "00000001.slab").read_bytes()[SUPERBLOCK_BYTES:]
        assert [raw[at * RECORD_BYTES + 6] for at in (0, 2)] == [RecordState.FREE] * 2
    with closing(open_tier(tmp_path)) as tier:
        assert list(tier.recover()) == []


def test_a_damaged_record_is_not_copied_when_its_slot_is_quarantined(tmp_path: Path) -> None:
    with closing(open_tier(tmp_path)) as tier:
        slot = put(tier, *block(1, 5000))
        assert slot is not None and finish(tier.sync).ok
        path = tmp_path / "slabs" / "00000001.slab"
        with open(path, "r+b") as file:
            file.seek(SUPERBLOCK_BYTES + 8)
            file.write(b"\xff" * 8)  # its generation
        tier.quarantine(slot, "its record does not hold")
        assert finish(tier.sync).ok
        slab = tier._space.slabs[1]
        record = slab.file.read_record(0)
        assert record_holds(record, slab.superblock.record_seed(0))
        assert record_header(record).generation == slot.generation
        assert record_header(record).key == bytes(16)
    with closing(open_tier(tmp_path)) as tier:
        assert list(tier.quarantined()) == [slot]


def test_a_start_whose_sync_failed_promises_nothing_until_the_records_are_written_again(
    tmp_path: Path, medium: Medium
) -> None:
    killed, found = tmp_path / "killed", tmp_path / "found"
    with closing(open_tier(killed)) as tier:
        slots = [put(tier, *block(number, 5000)) for number in (1, 2, 3)]
        assert finish(tier.sync).ok
        shutil.copytree(killed, found)  # as a process that was killed leaves it: no seal
    medium.records.clear()
    medium.failing = 2  # the start's, and that of the first commit
    with closing(open_tier(found)) as tier:
        assert {slot for slot, _ in tier.recover()} == set(slots) and not tier.keeps_recovered
        assert not finish(tier.sync).ok and not tier.keeps_recovered and not medium.records
        assert finish(tier.sync).ok and tier.keeps_recovered
        assert medium.states().count(RecordState.LIVE) == len(slots), "a sync alone answers for nothing"
    with closing(open_tier(found)) as tier:
        assert {slot for slot, _ in tier.recover()} == set(slots)


def test_nothing_is_withdrawn_on_a_medium_before_its_repair(tmp_path: Path, medium: Medium) -> None:
    killed, found = tmp_path / "killed", tmp_path / "found"
    with closing(open_tier(killed)) as tier:
        slot = put(tier, *block(1, 5000))
        assert slot is not None and finish(tier.sync).ok
        shutil.copytree(killed, found)
    medium.failing = 2
    with closing(open_tier(found)) as tier:
        tier.free(slot)
        assert not finish(tier.sync).ok, "a deletion is not answered for either"
        assert tier._space.slabs[1].file.read_records()["state"][0] == RecordState.LIVE
        assert finish(tier.sync).ok
        assert medium.states()[0] == RecordState.FREE


def test_a_record_that_the_failed_sync_lost_is_no_promise(tmp_path: Path, medium: Medium) -> None:
    killed, found = tmp_path / "killed", tmp_path / "found"
    with closing(open_tier(killed)) as tier:
        assert put(tier, *block(1, 5000)) is not None and finish(tier.sync).ok
        shutil.copytree(killed, found)
    medium.failing = 1
    with closing(open_tier(found)) as tier:
        tier._space.slabs[1].file.write_records([(0, bytes(RECORD_BYTES))])  # the page was read again from the medium
        outcome = finish(tier.sync)
        assert "records are gone" in outcome.message and not tier.keeps_recovered


def test_names_that_cannot_be_synced_keep_a_start_from_nothing_but_promises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ext4 after an error: files are opened to write, no directory is synced, and nothing says read-only."""
    killed, found = tmp_path / "killed", tmp_path / "found"
    with closing(open_tier(killed)) as tier:
        slot = put(tier, *block(1, 5000))
        assert slot is not None and finish(tier.sync).ok
        shutil.copytree(killed, found)

    def read_only(path: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr("kvstore_tiers.nvme.directory.sync_directory", read_only)
        with closing(open_tier(found)) as tier:
            assert [place for place, _ in tier.recover()] == [slot] and not tier.keeps_recovered
            assert not finish(tier.probe).ok and not tier.keeps_recovered
        with pytest.raises(DirectoryUnusable):
            open_tier(tmp_path / "fresh")
    with closing(open_tier(found)) as tier:
        assert tier.keeps_recovered
