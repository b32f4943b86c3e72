"""The seal says that no record waits to be synced: it is gone before the first change, and back after a clean end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvstore_tiers import failpoints
from kvstore_tiers.nvme import NvmeTier
from kvstore_tiers.nvme import index as index_module
from kvstore_tiers.nvme.check import check_directory
from kvstore_tiers.nvme.index_seal import read_sealed, seal_holds
from kvstore_tiers.testing.driving import block, finish, put
from kvstore_tiers.testing.powerloss import CompilerMissing, replay
from kvstore_tiers.testing.powerloss.campaign import record_large_index

CAPACITY_BYTES = 3 << 20
NUMBERS = range(1, 21)
NEVER_S = 600.0


@pytest.fixture(autouse=True)
def nothing_stays_armed() -> Iterator[None]:
    yield
    failpoints.disarm()


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every index counts as a large one, and the thread that mends it does not come to it."""
    monkeypatch.setattr(index_module, "OPEN_AT_ONCE_BYTES", -1)
    monkeypatch.setattr(index_module, "MEND_AT_ONCE_BLOCKS", 0)
    monkeypatch.setattr(index_module, "MEND_DELAY_S", NEVER_S)


def open_tier(path: Path) -> NvmeTier:
    return NvmeTier.open(path, CAPACITY_BYTES, slab_bytes=512 << 10, io_threads=2)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    with closing(open_tier(tmp_path / "d")) as tier:
        for number in NUMBERS:
            assert put(tier, *block(number, 5000))
    assert seal_holds(tmp_path / "d" / "index")
    return tmp_path / "d"


@pytest.mark.usefixtures("large")
def test_the_seal_is_gone_before_anything_changes_and_back_if_nothing_did(directory: Path) -> None:
    seal = directory / "index" / "seal"
    told = seal.read_bytes()
    with closing(open_tier(directory)):
        assert not seal.exists()
    assert seal.read_bytes() == told
    assert seal_holds(directory / "index")
    assert check_directory(directory) == []


@pytest.mark.usefixtures("large")
def test_an_index_that_missed_commits_gets_no_seal_back(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(open_tier(directory)) as tier:
        ((slot, _), *_) = tier.recover()
        tier.free(slot)
        assert put(tier, *block(100, 5000)), "as many blocks as before"
        assert finish(tier.sync).ok
    assert not (directory / "index" / "seal").exists()
    monkeypatch.setattr(index_module, "MEND_DELAY_S", 0.0)
    with closing(open_tier(directory)) as tier:
        assert tier.locate(block(100, 0)[0].key) is not None
        assert tier.locate(block(1, 0)[0].key) is None
    assert check_directory(directory) == []


def test_a_last_commit_that_failed_is_not_vouched_for(directory: Path) -> None:
    tier = open_tier(directory)
    assert put(tier, *block(100, 5000))
    failpoints.arm("nvme.after-records-write=error:EIO")
    tier.close()
    failpoints.disarm()
    assert not (directory / "index" / "seal").exists()


def test_records_without_a_seal_are_synced_at_the_start(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = 0
    real = os.fdatasync

    def counting(fd: int) -> None:
        nonlocal synced
        synced += ".slab" in os.readlink(f"/proc/self/fd/{fd}")
        real(fd)

    monkeypatch.setattr(os, "fdatasync", counting)
    open_tier(directory).close()
    assert synced == 0
    (directory / "index" / "seal").unlink()
    open_tier(directory).close()
    assert synced == 1


def test_a_good_index_is_kept_although_commits_came_before_the_mender(directory: Path) -> None:
    """Commits of the first second come before the mender: they are counted apart from what was found."""
    index = directory / "index"
    inode = (index / "data.mdb").stat().st_ino
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_module, "OPEN_AT_ONCE_BYTES", -1)
        patch.setattr(index_module, "MEND_AT_ONCE_BLOCKS", 0)
        patch.setattr(index_module, "MEND_DELAY_S", 0.2)
        with closing(open_tier(directory)) as tier:
            assert put(tier, *block(100, 5000))
            assert finish(tier.sync).ok
            assert tier.locate(block(100, 0)[0].key) is not None
    assert (index / "data.mdb").stat().st_ino == inode, "a good index was kept"
    assert len(read_sealed(index) or {}) == len(NUMBERS) + 1


@pytest.mark.slow  # ten seconds of states
def test_power_lost_after_a_process_that_found_a_seal_and_died_unsynced(tmp_path: Path) -> None:
    try:
        log = record_large_index(tmp_path / "recorded", seed=3, steps=12)
    except CompilerMissing as error:
        pytest.skip(str(error))
    figures = replay(log, seed=3, states=300, judge="kvstore_tiers.testing.powerloss.judge:judge_large_index")
    assert figures.promised > 1000
    assert figures.is_sound, figures.failures
