"""Verdicts in memory that two processes share: in their places, and out of reach once one of the two hangs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from kvstore_tiers.nvme import NvmeTier, early_scan, verdicts
from kvstore_tiers.nvme.early_scan import EarlyRecordScan
from kvstore_tiers.nvme.layout import Superblock, read_superblock
from kvstore_tiers.nvme.region_reader import RegionReader, SlabQueue, SlabSlots
from kvstore_tiers.nvme.shared_columns import SlabScanner
from kvstore_tiers.nvme.slab_file import SlabFile
from kvstore_tiers.testing.transfers import finish
from tests.reference.stored_blocks import recovered_numbers, store_numbers

BLOCKS = range(1, 201)  # of three slabs


@contextmanager
def opened(path: Path, ahead: EarlyRecordScan | None = None) -> Iterator[NvmeTier]:
    with closing(NvmeTier.open(path, 8 << 20, slab_bytes=1 << 20, io_threads=1, early_scan=ahead)) as tier:
        yield tier


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    with opened(tmp_path) as tier:
        store_numbers(tier, BLOCKS)
        assert finish(tier.sync).ok
    return tmp_path


def test_pieces_with_holes_are_moved_together(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge in the other process, which is this one here, moves them."""
    with opened(directory) as tier:
        held = tier.recover_columns()
        for at in range(3, len(held), 7):
            tier.free(held.slot_of(at))
        assert finish(tier.sync).ok

    def keys() -> dict[int, bytes]:
        memory, found = os.memfd_create("judged"), {}
        layout = SlabSlots.within(directory / "slabs")
        scanner, most = SlabScanner(memory, layout), layout[0].slots
        reading = RegionReader(directory / "slabs", SlabQueue.of([1, 2, 3]))
        for region in reading:
            report, superblock = scanner.scan(region), read_superblock(region.superblock)
            assert report is not None and isinstance(superblock, Superblock)
            columns = scanner.columns.of(region.slab - 1, (region.slab - 1) * most, superblock.slots)
            found[region.slab] = columns.live.part(slice(report.live)).key.tobytes()
            reading.give_back(region)
        os.close(memory)
        return found

    whole = keys()
    monkeypatch.setattr(verdicts, "BATCH_RECORDS", 10)
    assert keys() == whole
    assert len(b"".join(whole.values())) == 16 * (len(held) - len(range(3, len(held), 7)))


def test_what_a_scan_that_hangs_writes_later_is_of_no_consequence(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scan has reported one slab, begun with the next one, and keeps its pipe."""
    layout, pipes, read = SlabSlots.within(directory / "slabs"), list[int](), list[int]()
    original = SlabFile.read_records_into

    def hangs(slabs: Path, queue: int, memory: int, reporting: int) -> int:
        regions, scanner = iter(RegionReader(slabs, SlabQueue.of([1]))), SlabScanner(memory, layout)
        report = scanner.scan(next(regions))
        assert report is not None
        os.write(reporting, json.dumps(layout).encode() + b"\n" + report.line())
        os.read(queue, 8)
        pipes.append(os.dup(reporting))
        return os.posix_spawn("/bin/true", ["true"], {})

    def watched(self: SlabFile, buffer: memoryview, first: int) -> None:
        read.append(self.superblock.number)
        original(self, buffer, first)

    for name, value in (("LEAST_BYTES", 1), ("_SILENCE_S", 0.05), ("_start", hangs)):
        monkeypatch.setattr(early_scan, name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(SlabFile, "read_records_into", watched)
    ahead = EarlyRecordScan.begin(directory)
    assert ahead is not None
    memory = os.dup(ahead._memory)
    with opened(directory, ahead) as tier:
        os.pwrite(memory, b"\xff" * os.fstat(memory).st_size, 0)
        assert recovered_numbers(tier) == set(BLOCKS)
        assert sorted(read) == [2, 3]
    for fd in (memory, *pipes):
        os.close(fd)


def test_slabs_that_another_process_cannot_place_are_judged_here(directory: Path) -> None:
    """A file that is too short for what its superblock says has no place."""
    layout = SlabSlots.within(directory / "slabs")
    assert [place.slab for place in layout] == [1, 2, 3]
    os.truncate(directory / "slabs" / sorted(os.listdir(directory / "slabs"))[1], 4096)
    assert SlabSlots.within(directory / "slabs") == [layout[0], layout[2]]
    memory = os.memfd_create("judged")
    scanner = SlabScanner(memory, [layout[0], SlabSlots(3, layout[2].slots + 1)])
    found = [scanner.scan(region) for region in RegionReader(directory / "slabs", SlabQueue.of([1, 3]))]
    os.close(memory)
    assert [None if report is None else report.slab for report in found].count(None) == 1
