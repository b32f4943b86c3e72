"""Records that are read ahead: to a few buffers over and over, by threads that take slabs from a queue."""

from __future__ import annotations

import fcntl
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from kvstore_tiers.nvme import NvmeTier, region_reader
from kvstore_tiers.nvme.directory_files import slab_numbers, slab_path
from kvstore_tiers.nvme.layout import RECORD_BYTES, SUPERBLOCK_BYTES
from kvstore_tiers.nvme.region_reader import RegionReader, SlabQueue
from kvstore_tiers.nvme.slab_file import find_superblock
from tests.reference.stored_blocks import store_numbers


@pytest.fixture
def slabs(tmp_path: Path) -> Path:
    """Three of them."""
    with closing(NvmeTier.open(tmp_path, 8 << 20, slab_bytes=1 << 20, io_threads=1)) as tier:
        store_numbers(tier, range(1, 201))
    return tmp_path / "slabs"


def test_a_slab_has_one_name(slabs: Path) -> None:
    for name in ("1.slab", "notes.slab", "00000002.new", "0000000003.slab"):
        (slabs / name).touch()
    assert slab_numbers(slabs) == [1, 2, 3]
    assert slab_numbers(slabs, "new") == [2]
    assert slab_numbers(slabs / "absent") == []


def test_regions_are_read_to_the_same_few_buffers(slabs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def regions(*numbers: int) -> dict[int, bytes]:
        found, reading = {}, RegionReader(slabs, SlabQueue.of(numbers))
        for region in reading:
            found[region.slab] = bytes(region.records)
            reading.give_back(region)
        return found

    superblock = find_superblock(slab_path(slabs, 1))
    assert not isinstance(superblock, str)
    read = regions(*(1, 2, 3) * 5, 99)
    assert sorted(read) == [1, 2, 3], "the last is not there"
    for number, records in read.items():
        raw = slab_path(slabs, number).read_bytes()
        assert records == raw[SUPERBLOCK_BYTES : SUPERBLOCK_BYTES + len(records)]
        assert len(records) >= superblock.slots * RECORD_BYTES
    os.truncate(slab_path(slabs, 2), SUPERBLOCK_BYTES + 1000)
    assert sorted(regions(1, 2, 3)) == [1, 3]
    monkeypatch.setattr(region_reader, "MOST_BYTES", 4096)
    assert regions(1, 2, 3) == {}, "left to who opens the tier"


def test_a_slab_is_taken_once() -> None:
    queue = SlabQueue.of(range(20_000))
    with ThreadPoolExecutor(4) as threads:
        taken = [number for each in threads.map(lambda _: list(iter(queue.take, None)), range(4)) for number in each]
    assert sorted(taken) == list(range(16_384)), "as many as a pipe holds"
    queue.close()


def test_a_user_with_many_pipes_gets_small_ones() -> None:
    def small(flags: int) -> tuple[int, int]:
        ends = real(flags)
        fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, 4096)
        return ends

    real = os.pipe2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pipe2", small)
        queue = SlabQueue.of(range(20_000))
    assert list(iter(queue.take, None)) == list(range(1024))
    queue.close()


def test_where_the_superblock_says_how_many_slots_there_are(slabs: Path) -> None:
    superblock = find_superblock(slab_path(slabs, 1))
    assert not isinstance(superblock, str)
    at = region_reader._SLOTS_AT
    assert int.from_bytes(superblock.pack()[at : at + 8], "little") == superblock.slots
    assert (region_reader._BEGIN, region_reader._RECORD_BYTES) == (SUPERBLOCK_BYTES, RECORD_BYTES)
