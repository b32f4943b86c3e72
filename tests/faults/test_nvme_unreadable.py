"""Single sectors that the medium cannot read: they cost what is stored in them, never the directory."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from kvstore_tiers.base import OutcomeKind
from kvstore_tiers.nvme import DirectoryUnusable, NvmeTier
from kvstore_tiers.nvme.check import check_directory
from kvstore_tiers.nvme.check_slab import FindingKind
from kvstore_tiers.nvme.layout import RECORD_BYTES, SUPERBLOCK_BYTES
from kvstore_tiers.nvme.repair import repair_directory
from kvstore_tiers.nvme.slab_file import find_superblock
from kvstore_tiers.testing.transfers import block, finish, get, put
from tests.reference.stored_blocks import store_numbers

CAPACITY_BYTES = 3 << 20
PAGE_BYTES = 4096
RECORDS_A_PAGE = PAGE_BYTES // RECORD_BYTES
NUMBERS = range(1, 31)


class BadPages:
    """Pages of a file that answer EIO until they are written whole, as a drive maps a bad sector anew."""

    def __init__(self, path: Path, patch: pytest.MonkeyPatch) -> None:
        self._inode = path.stat().st_ino
        self.pages: set[int] = set()
        pread, preadv, pwrite = os.pread, os.preadv, os.pwrite

        def read(fd: int, nbytes: int, offset: int) -> bytes:
            self._require(fd, nbytes, offset)
            return pread(fd, nbytes, offset)

        def readv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            self._require(fd, sum(memoryview(buffer).nbytes for buffer in buffers), offset)
            return preadv(fd, buffers, offset)

        def write(fd: int, raw: bytes, offset: int) -> int:
            first, last = offset // PAGE_BYTES, (offset + len(raw) - 1) // PAGE_BYTES
            whole = range(-(-offset // PAGE_BYTES), (offset + len(raw)) // PAGE_BYTES)
            if self._is_ours(fd):
                if self.pages & set(range(first, last + 1)) - set(whole):
                    raise OSError(errno.EIO, "a part of an unreadable page cannot be written")
                self.pages -= set(whole)
            return pwrite(fd, raw, offset)

        patch.setattr(os, "pread", read)
        patch.setattr(os, "preadv", readv)
        patch.setattr(os, "pwrite", write)

    def _is_ours(self, fd: int) -> bool:
        return os.fstat(fd).st_ino == self._inode

    def _require(self, fd: int, nbytes: int, offset: int) -> None:
        if self._is_ours(fd) and self.pages & set(range(offset // PAGE_BYTES, -(-(offset + nbytes) // PAGE_BYTES))):
            raise OSError(errno.EIO, os.strerror(errno.EIO))


def open_tier(path: Path) -> NvmeTier:
    return NvmeTier.open(path, CAPACITY_BYTES, slab_bytes=512 << 10, io_threads=1)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Blocks 1 to 30 in the first slots of slab 1, of 41 slots."""
    with closing(open_tier(tmp_path)) as tier:
        store_numbers(tier, NUMBERS)
    return tmp_path


@pytest.fixture
def bad(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BadPages]:
    yield BadPages(directory / "slabs" / "00000001.slab", monkeypatch)


def recovered(tier: NvmeTier) -> set[int]:
    return {int.from_bytes(header.key, "big") for _, header in tier.recover()}


def last_page(directory: Path) -> int:
    return (directory / "slabs" / "00000001.slab").stat().st_size // PAGE_BYTES - 1


@pytest.mark.parametrize("which", ["front", "end"])
def test_a_superblock_that_cannot_be_read_is_taken_from_its_copy(directory: Path, bad: BadPages, which: str) -> None:
    bad.pages = {0 if which == "front" else last_page(directory)}
    assert {finding.kind for finding in check_directory(directory)} == {FindingKind.SUPERBLOCK_COPY}
    with closing(open_tier(directory)) as tier:
        assert recovered(tier) == set(NUMBERS)
    assert not bad.pages, "it was written again"
    assert check_directory(directory) == []


def test_a_slab_of_which_no_superblock_can_be_read_is_not_put_aside(directory: Path, bad: BadPages) -> None:
    """The medium may be gone for a moment: nothing is known to be lost."""
    bad.pages = {0, last_page(directory)}
    with pytest.raises(DirectoryUnusable, match="Input/output error"):
        open_tier(directory)
    assert not list((directory / "slabs").glob("*.damaged"))
    bad.pages.clear()
    with closing(open_tier(directory)) as tier:
        assert recovered(tier) == set(NUMBERS)


@pytest.mark.parametrize("page", [0, 1, 2])  # full, half full, never used and the last
@pytest.mark.parametrize("repaired_by", ["start", "repair"])
def test_records_that_cannot_be_read_cost_their_blocks_alone(
    directory: Path, bad: BadPages, page: int, repaired_by: str
) -> None:
    superblock = find_superblock(directory / "slabs" / "00000001.slab")
    assert not isinstance(superblock, str) and superblock.slots % RECORDS_A_PAGE, "the last page is not full"
    bad.pages = {SUPERBLOCK_BYTES // PAGE_BYTES + page}
    lost = set(range(page * RECORDS_A_PAGE + 1, (page + 1) * RECORDS_A_PAGE + 1))
    if repaired_by == "repair":
        assert repair_directory(directory).left == []
    with closing(open_tier(directory)) as tier:
        assert recovered(tier) == set(NUMBERS) - lost
        assert not bad.pages, "its page was written again"
        assert put(tier, *block(100, 5000))
        assert finish(tier.sync).ok
    assert check_directory(directory, verify_payloads=True) == []


def test_a_record_that_becomes_unreadable_does_not_stop_commits(directory: Path, bad: BadPages) -> None:
    with closing(open_tier(directory)) as tier:
        slots = {int.from_bytes(header.key, "big"): slot for slot, header in tier.recover()}
        bad.pages = {SUPERBLOCK_BYTES // PAGE_BYTES}
        for number in range(1, RECORDS_A_PAGE + 1):  # all of its page
            tier.free(slots[number])
        assert finish(tier.sync).ok
        assert not bad.pages


@pytest.mark.parametrize(("page", "kind"), [(0, FindingKind.HEADER), (1, FindingKind.PAYLOAD)])
def test_a_slot_that_cannot_be_read_is_a_finding(directory: Path, bad: BadPages, page: int, kind: FindingKind) -> None:
    superblock = find_superblock(directory / "slabs" / "00000001.slab")
    assert not isinstance(superblock, str)
    bad.pages = {superblock.slot_offset(3) // PAGE_BYTES + page}
    (finding,) = check_directory(directory, verify_payloads=True)
    assert (finding.kind, finding.slot) == (kind, 3)
    report = repair_directory(directory, verify_payloads=True)
    assert report.left == []
    with closing(open_tier(directory)) as tier:
        assert recovered(tier) == set(NUMBERS) - {4}


def test_a_block_that_cannot_be_read_fails_alone(directory: Path, bad: BadPages) -> None:
    with closing(open_tier(directory)) as tier:
        slots = {int.from_bytes(header.key, "big"): slot for slot, header in tier.recover()}
        bad.pages = {slots[4].offset // PAGE_BYTES}
        outcome, _ = get(tier, slots[4], block(4, 0)[0].key, 5000)
        assert (outcome.kind, outcome.errno) == (OutcomeKind.FAILED, errno.EIO)
        assert get(tier, slots[5], block(5, 0)[0].key, 5000)[0].ok
