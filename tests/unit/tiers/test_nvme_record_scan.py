"""Records are read past the cache, in pieces, and judged by several threads: at every edge as if it were one."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore_tiers.nvme import DirectoryUnusable, NvmeTier, record_scan, verdicts
from kvstore_tiers.nvme.layout import RECORD_BYTES, SUPERBLOCK_BYTES, RecordState, pack_record
from kvstore_tiers.nvme.slab_file import find_superblock
from kvstore_tiers.testing.transfers import block, finish, put
from tests.reference.stored_blocks import recovered_numbers, store_numbers

CAPACITY_BYTES = 8 << 20
BLOCKS = range(1, 101)


def open_tier(path: Path, capacity_bytes: int = CAPACITY_BYTES, slab_bytes: int = 4 << 20) -> NvmeTier:
    return NvmeTier.open(path, capacity_bytes, slab_bytes=slab_bytes, io_threads=1)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    with closing(open_tier(tmp_path)) as tier:
        store_numbers(tier, BLOCKS)
    return tmp_path


@pytest.fixture
def small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of two pages, batches of less than one."""
    monkeypatch.setattr(record_scan, "READ_RECORDS", 32)
    monkeypatch.setattr(verdicts, "BATCH_RECORDS", 10)


@pytest.mark.slow
@pytest.mark.usefixtures("small_reads")
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.integers(SUPERBLOCK_BYTES, 40_000), st.integers(SUPERBLOCK_BYTES, 1_400_000)))
def test_a_file_cut_anywhere_keeps_the_records_before_the_cut(
    tmp_path_factory: pytest.TempPathFactory, length_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("cut")
    with closing(open_tier(path)) as tier:
        store_numbers(tier, BLOCKS)
    file = path / "slabs" / "00000001.slab"
    superblock = find_superblock(file)
    assert not isinstance(superblock, str)
    os.truncate(file, length_bytes)
    with closing(open_tier(path)) as tier:
        whole = {number for number in BLOCKS if superblock.slot_offset(number) <= length_bytes}
        assert recovered_numbers(tier) == whole
        assert tier.recovery_report.damaged_records <= 1, "the one that was cut in two"
        assert tier.check_books() == []
        assert file.stat().st_size == superblock.file_bytes, "it has its length back"


@pytest.mark.usefixtures("small_reads")
def test_pieces_and_threads_change_nothing(directory: Path) -> None:
    with closing(open_tier(directory)) as tier:
        columns = tier.recover_columns()
        assert recovered_in_order(columns.offset.tolist())
        assert {int.from_bytes(key.tobytes(), "big") for key in columns.key} == set(BLOCKS)


def recovered_in_order(offsets: list[int]) -> bool:
    return offsets == sorted(offsets) and len(offsets) == len(BLOCKS)


def test_blocks_of_slabs_behind_half_empty_ones_stay_themselves(tmp_path: Path) -> None:
    """The columns of all slabs are moved together; then one block is withdrawn, since it is stored twice."""
    with closing(open_tier(tmp_path, slab_bytes=256 << 10)) as tier:
        slots = {number: put(tier, *block(number, 5000)) for number in range(1, 80)}
        assert finish(tier.sync).ok
        for number in range(1, 15):  # of the first slab
            slot = slots[number]
            assert slot is not None and slot.container == 1
            tier.free(slot)
        assert finish(tier.sync).ok
        assert put(tier, *block(70, 5000)) is not None
    with closing(open_tier(tmp_path, slab_bytes=256 << 10)) as tier:
        assert tier.recovery_report.superseded_blocks == 1
        columns = tier.recover_columns()
        found = {columns.slot_of(at): columns.key[at].tobytes() for at in range(len(columns))}
        assert found == {slot: header.key for slot, header in tier.recover()}
        assert len(found) == 79 - 14


def test_slabs_of_one_slot(tmp_path: Path) -> None:
    """Records of less than a page, one a slab."""
    with closing(open_tier(tmp_path, slab_bytes=64 << 10)) as tier:
        store_numbers(tier, range(1, 6), 40_000)
        assert {slab.superblock.slots for slab in tier._space.slabs.values()} == {1}
    with closing(open_tier(tmp_path, slab_bytes=64 << 10)) as tier:
        assert recovered_numbers(tier) == set(range(1, 6))


def test_an_empty_directory(tmp_path: Path) -> None:
    for _ in range(2):
        with closing(open_tier(tmp_path)) as tier:
            assert recovered_numbers(tier) == set()


@pytest.mark.parametrize("at", [1, 2, 4])
@pytest.mark.usefixtures("small_reads")
def test_a_medium_that_stops_reading_is_said_and_leaves_no_thread(
    directory: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    before, reads, real = set(threading.enumerate()), 0, os.preadv

    def failing(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        nonlocal reads
        reads += 1
        if reads >= at:
            raise OSError(errno.ENXIO, "the device is gone")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(DirectoryUnusable, match="the device is gone"):
        open_tier(directory)
    assert set(threading.enumerate()) == before
    monkeypatch.setattr(os, "preadv", real)
    with closing(open_tier(directory)) as tier:
        assert recovered_numbers(tier) == set(BLOCKS)


@pytest.mark.usefixtures("small_reads")
def test_an_error_of_a_judge_is_said(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged = 0
    real = verdicts.Judge.judge

    def failing(*arguments: object) -> list[verdicts.Verdicts]:
        nonlocal judged
        judged += 1
        if judged == 2:
            raise MemoryError("no room for columns")
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(verdicts.Judge, "judge", failing)
    before = set(threading.enumerate())
    with pytest.raises(MemoryError):
        open_tier(directory)
    assert set(threading.enumerate()) == before


def test_a_sound_record_of_a_state_that_means_nothing_is_withdrawn(directory: Path) -> None:
    file = directory / "slabs" / "00000001.slab"
    superblock = find_superblock(file)
    assert not isinstance(superblock, str)
    record = pack_record(block(3, 5000)[0], RecordState.LIVE, 1, superblock.record_seed(2))
    raw = bytearray(record)
    raw[6] = 3
    raw[-8:] = checksum(bytes(raw[:-8]), superblock.record_seed(2))
    with open(file, "r+b") as slab:
        slab.seek(SUPERBLOCK_BYTES + 2 * RECORD_BYTES)
        slab.write(raw)
    with closing(open_tier(directory)) as tier:
        assert recovered_numbers(tier) == set(BLOCKS) - {3}
        assert tier.recovery_report.damaged_records == 1
        assert put(tier, *block(3, 5000))
        assert finish(tier.sync).ok


def checksum(raw: bytes, seed: int) -> bytes:
    return xxhash.xxh3_64_intdigest(raw, seed=seed).to_bytes(8, "little")
