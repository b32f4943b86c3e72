"""The seal says that no record waits to be synced: it is gone before the first change, and back after a clean end."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest

from kvstore_tiers import failpoints
from kvstore_tiers.nvme import NvmeTier
from kvstore_tiers.nvme.check import check_directory
from kvstore_tiers.nvme.directory import Seal
from kvstore_tiers.testing.powerloss import CompilerMissing, replay
from kvstore_tiers.testing.powerloss.campaign import record_seal
from kvstore_tiers.testing.transfers import block, put
from tests.reference.stored_blocks import store_numbers

pytestmark = pytest.mark.usefixtures("nothing_stays_armed")
CAPACITY_BYTES = 3 << 20
NUMBERS = range(1, 21)


def open_tier(path: Path) -> NvmeTier:
    return NvmeTier.open(path, CAPACITY_BYTES, slab_bytes=512 << 10, io_threads=2)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    with closing(open_tier(tmp_path / "d")) as tier:
        store_numbers(tier, NUMBERS)
    assert Seal(tmp_path / "d").held
    return tmp_path / "d"


class Syncs:
    """Counts syncs of slabs, and of directories once the seal is gone."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch) -> None:
        self.slabs = self.removals = 0
        datasync, sync = os.fdatasync, os.fsync

        def fdatasync(fd: int) -> None:
            self.slabs += ".slab" in os.readlink(f"/proc/self/fd/{fd}")
            datasync(fd)

        def fsync(fd: int) -> None:
            is_removal = os.readlink(f"/proc/self/fd/{fd}") == str(directory) and not (directory / "seal").exists()
            self.removals += is_removal
            sync(fd)

        patch.setattr(os, "fdatasync", fdatasync)
        patch.setattr(os, "fsync", fsync)


@pytest.fixture
def syncs(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Syncs:
    return Syncs(directory, monkeypatch)


def test_the_seal_is_gone_before_anything_changes_and_back_after_a_clean_end(directory: Path, syncs: Syncs) -> None:
    with closing(open_tier(directory)):
        assert not (directory / "seal").exists()
        assert syncs.removals == 1, "on the medium too"
    assert Seal(directory).held
    assert check_directory(directory) == []


def test_a_last_commit_that_failed_is_not_vouched_for(directory: Path) -> None:
    tier = open_tier(directory)
    assert put(tier, *block(100, 5000))
    failpoints.arm("nvme.after-records-write=error:EIO")
    tier.close()
    failpoints.disarm()
    assert not (directory / "seal").exists()


def test_a_seal_that_cannot_be_written_costs_the_next_start_a_sync(directory: Path, syncs: Syncs) -> None:
    tier = open_tier(directory)
    failpoints.arm("nvme.seal=error:ENOSPC")
    tier.close()
    failpoints.disarm()
    assert not (directory / "seal").exists()
    open_tier(directory).close()
    assert syncs.slabs == 1


def test_records_without_a_seal_are_synced_at_the_start(directory: Path, syncs: Syncs) -> None:
    open_tier(directory).close()
    assert syncs.slabs == 0
    (directory / "seal").unlink()
    open_tier(directory).close()
    assert syncs.slabs == 1


@pytest.mark.parametrize("left", [b"", bytes(29), b"no record waits to be synced", b"\xff" * 300])
def test_a_seal_that_says_anything_else_is_none(directory: Path, syncs: Syncs, left: bytes) -> None:
    """Power loss may keep a name and lose the bytes."""
    (directory / "seal").write_bytes(left)
    open_tier(directory).close()
    assert syncs.slabs == 1


@pytest.mark.slow  # ten seconds of states
def test_power_lost_after_a_process_that_found_a_seal_and_died_unsynced(tmp_path: Path) -> None:
    try:
        log = record_seal(tmp_path / "recorded", seed=3, steps=12)
    except CompilerMissing as error:
        pytest.skip(str(error))
    figures = replay(log, seed=3, states=300)
    assert figures.promised > 1000
    assert figures.is_sound, figures.failures
