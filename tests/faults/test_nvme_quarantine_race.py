"""A slot that is freed while the commit of its quarantine runs: once that sync is answered, its block stays away."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

import pytest

from kvstore_tiers.nvme import NvmeTier
from kvstore_tiers.nvme.commit import Journal, PendingRecords
from kvstore_tiers.testing.transfers import block, finish, put

CAPACITY_BYTES = 4 << 20


def open_tier(directory: Path) -> NvmeTier:
    return NvmeTier.open(directory, CAPACITY_BYTES, slab_bytes=1 << 20, io_threads=1)


def test_a_quarantined_block_freed_during_its_commit_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_tier(tmp_path / "tier")) as tier:
        slot = put(tier, *block(1, 5000))
        assert slot is not None and finish(tier.sync).ok
        tier.quarantine(slot, "its bytes are not what they were")
        take = Journal.take

        def take_and_then_free(journal: Journal) -> PendingRecords:
            batch = take(journal)
            monkeypatch.setattr(Journal, "take", take)
            tier.free(slot)
            return batch

        monkeypatch.setattr(Journal, "take", take_and_then_free)
        assert finish(tier.sync).ok
        shutil.copytree(tmp_path / "tier", tmp_path / "crashed")  # what kill -9 would leave now
    with closing(open_tier(tmp_path / "crashed")) as tier:
        assert list(tier.recover()) == []


def test_a_slot_that_was_never_written_may_be_quarantined(tmp_path: Path) -> None:
    """The slot's slab has no file yet: there is nothing to record, and commits go on."""
    with closing(open_tier(tmp_path)) as tier:
        slot = tier.allocate(12_288)
        assert slot is not None
        tier.quarantine(slot, "never written")
        assert finish(tier.sync).ok
        assert put(tier, *block(1, 5000)) is not None
        assert finish(tier.sync).ok
