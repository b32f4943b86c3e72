"""Slabs that are planned for another slot size and never written: the file they were to take over stays counted."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from kvstore_tiers.nvme import NvmeTier
from kvstore_tiers.testing.transfers import block, finish, put

CAPACITY_BYTES = 1_500_000


def test_a_plan_given_up_twice_leaks_no_file(tmp_path: Path) -> None:
    with closing(NvmeTier.open(tmp_path, CAPACITY_BYTES, slab_bytes=256 << 10, io_threads=1)) as tier:
        number, slots = 1, []
        while (slot := put(tier, *block(number, 4096))) is not None:
            slots.append(slot)
            number += 1
        for slot in slots:
            tier.free(slot)
        for planned in (12_288, 20_480, 36_864):  # of each size a slot, given back before anything was written to it
            slot = tier.allocate(planned)
            assert slot is not None
            tier.free(slot)
        while put(tier, *block(number, 50_000)) is not None:
            number += 1
        assert finish(tier.sync).ok
        files_bytes = sum(path.stat().st_size for path in (tmp_path / "slabs").iterdir())
        statistics = tier.statistics()
        assert files_bytes + statistics.used_by["files"] == statistics.used_bytes <= CAPACITY_BYTES
        stored = statistics.blocks
    with closing(NvmeTier.open(tmp_path, CAPACITY_BYTES, slab_bytes=256 << 10, io_threads=1)) as tier:
        assert len(list(tier.recover())) == stored, "no slab is beyond the capacity, none is given up"
