"""A repair gives up nothing that it did not name, and nothing that was put aside before."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from kvstore_tiers.nvme import NvmeTier
from kvstore_tiers.nvme.check import bytes_used, check_directory
from kvstore_tiers.nvme.check_slab import FindingKind
from kvstore_tiers.nvme.directory import TierDirectory
from kvstore_tiers.nvme.layout import SUPERBLOCK_BYTES
from kvstore_tiers.nvme.repair import repair_directory
from kvstore_tiers.testing.transfers import finish
from tests.reference.stored_blocks import store_numbers

CAPACITY_BYTES = 3 << 20


def open_tier(path: Path) -> NvmeTier:
    return NvmeTier.open(path, CAPACITY_BYTES, slab_bytes=512 << 10, io_threads=1)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Three slabs full of blocks."""
    with closing(open_tier(tmp_path / "d")) as tier:
        store_numbers(tier, range(1, 100))
        assert finish(tier.sync).ok
    return tmp_path / "d"


def lose_superblocks(path: Path) -> None:
    with open(path, "r+b") as file:
        for offset in (0, path.stat().st_size - SUPERBLOCK_BYTES):
            file.seek(offset)
            file.write(b"lost")


def test_a_capacity_that_holds_costs_no_slab(directory: Path) -> None:
    """The slabs fit, though with the small files beside them a tier of this size would give one up."""
    with closing(TierDirectory(directory, create=False)) as opened:
        capacity_bytes = bytes_used(opened) + 4096
    (directory / "format").unlink()
    assert {finding.kind for finding in check_directory(directory, capacity_bytes=capacity_bytes)} == {
        FindingKind.FORMAT_MISSING
    }
    slabs = sorted((directory / "slabs").iterdir())
    report = repair_directory(directory, capacity_bytes=capacity_bytes)
    assert len(report.done) == 1
    assert sorted((directory / "slabs").iterdir()) == slabs
    with closing(open_tier(directory)) as tier:
        assert len(list(tier.recover())) == 99


@pytest.mark.parametrize("by", ["start", "repair"])
def test_a_file_put_aside_is_not_written_over_by_the_next(directory: Path, by: str) -> None:
    earlier = directory / "slabs" / "00000002.damaged"
    earlier.write_bytes(b"the first one")
    lose_superblocks(directory / "slabs" / "00000002.slab")
    if by == "repair":
        repair_directory(directory)
    else:
        open_tier(directory).close()
    assert earlier.read_bytes() == b"the first one"
    damaged = sorted((directory / "slabs").glob("*.damaged"))
    assert len(damaged) == 2
    assert damaged[1].read_bytes().startswith(b"lost")
