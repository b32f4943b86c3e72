"""The tier keeps to its capacity, whichever slots existed before."""

from __future__ import annotations

import gc
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_proto.arena import BlockHeader, Coded
from kvstore_tiers.base import Slot
from kvstore_tiers.nvme import NvmeTier
from kvstore_tiers.nvme.check import bytes_used, check_directory
from kvstore_tiers.nvme.directory import TierDirectory
from kvstore_tiers.nvme.layout import Superblock
from kvstore_tiers.nvme.record_scan import ScannedSlab
from kvstore_tiers.nvme.slab import Slab
from kvstore_tiers.nvme.slot_words import mark, marks
from kvstore_tiers.nvme.space import SlabSpace
from kvstore_tiers.recovered import RecoveredBlocks
from kvstore_tiers.testing.transfers import block, finish, put
from tests.reference.examples import examples

CAPACITY_BYTES = 12 << 20
SMALL_BYTES, LARGE_BYTES = 1, 100_000


def fill(tier: NvmeTier, first: int, payload_bytes: int) -> list[Slot]:
    slots: list[Slot] = []
    while (slot := put(tier, *block(first + len(slots), payload_bytes))) is not None:
        slots.append(slot)
    assert finish(tier.sync).ok
    return slots


@pytest.mark.slow
def test_a_smaller_capacity_costs_slabs(tmp_path: Path) -> None:
    with closing(NvmeTier.open(tmp_path, CAPACITY_BYTES, slab_bytes=2 << 20)) as tier:
        fill(tier, 1, SMALL_BYTES)
        slabs = len(list((tmp_path / "slabs").iterdir()))
    smaller = CAPACITY_BYTES // 2
    with closing(NvmeTier.open(tmp_path, smaller, slab_bytes=2 << 20)) as tier:
        assert tier.recovery_report.dropped_slabs == slabs // 2 + 1, "the small files beside them take some, too"
        assert tier.statistics().used_bytes <= smaller
        assert tier.statistics().blocks == len(list(tier.recover()))
    with closing(TierDirectory(tmp_path)) as opened:
        assert bytes_used(opened) <= smaller
    assert check_directory(tmp_path, capacity_bytes=smaller) == []


def test_a_tier_keeps_no_verdicts_of_its_recovery(tmp_path: Path) -> None:
    """The verdicts would take 110 bytes a block."""
    with closing(NvmeTier.open(tmp_path, CAPACITY_BYTES, slab_bytes=2 << 20)) as tier:
        fill(tier, 1, LARGE_BYTES)
    with closing(NvmeTier.open(tmp_path, CAPACITY_BYTES, slab_bytes=2 << 20)) as tier:
        assert len(tier.recover_columns())
        gc.collect()
        assert not any(isinstance(each, ScannedSlab | RecoveredBlocks) for each in gc.get_objects())


def test_a_slab_remembers_how_much_each_slot_stores(tmp_path: Path) -> None:
    """One number serves all slots at first, then each has its own, and codecs come."""
    with closing(TierDirectory(tmp_path)) as directory:
        superblock = Superblock(bytes(16), 1, 1, 8192, 4, 2**40, 2 << 20, 1)
        slab = Slab(directory, superblock)
        expected = {}
        for index, nbytes, codec in ((0, 4096, 0), (1, 4096, 0), (2, 100, 0), (3, 99, 2), (1, 7, 0)):
            coded = Coded(codec, nbytes, 0) if codec else None
            slab.note_written(index, BlockHeader(bytes(16), bytes(16), bytes(32), bytes(16), nbytes, coded=coded))
            expected[index] = nbytes, codec
            assert {each: slab.stored(each) for each in expected} == expected


def test_a_slot_is_used_beyond_its_four_thousand_millionth_generation(tmp_path: Path) -> None:
    with closing(TierDirectory(tmp_path)) as directory:
        slab = Slab(directory, Superblock(bytes(16), 1, 1, 8192, 4, 1, 2 << 20, 1))
        assert slab.generations.itemsize == 4
        slab.generations[0] = 2**32 - 1
        others = slab.generations[1:].tolist()
        for generation in (2**32 - 1, 2**32, 2**32 + 1):
            slot = slab.allocate()
            assert slot.generation == generation
            slab.free(slot)
        assert slab.generations[1:].tolist() == others


def test_marks_tell_generations_apart_and_none_from_any() -> None:
    assert mark(0) == 0
    for first in (1, 2**16 - 50, 2**32 - 50, 2**40):
        marked = np.arange(first, first + 1000, dtype=np.uint64)
        assert len({mark(int(generation)) for generation in marked} - {0}) == 1000
        assert marks(marked, marked != first).tolist() == [0, *(mark(first + step) for step in range(1, 1000))]


def test_a_slab_has_room_for_every_owner(tmp_path: Path) -> None:
    with closing(NvmeTier.open(tmp_path, CAPACITY_BYTES, slab_bytes=2 << 20)) as tier:
        slot = fill(tier, 1, LARGE_BYTES)[0]
        for owner in ("", "a", "b"):
            assert tier.makes_room(slot.container, slot.nbytes, owner)
            assert not tier.convertible(slot.nbytes, owner), "one slot is enough"
            assert not tier.makes_room(slot.container, 8192, owner)
            assert tier.convertible(8192, owner)


sizes = st.sampled_from([8192, 12_288, 65_536, 1 << 20])


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.booleans(), sizes), max_size=12))
def test_the_sum_never_exceeds_the_capacity(tmp_path_factory: object, steps: list[tuple[bool, int]]) -> None:
    """Slots of one size are taken until there are none, or all of them are given back."""
    with closing(TierDirectory(_fresh(tmp_path_factory))) as directory:
        space = SlabSpace(directory, CAPACITY_BYTES, 2 << 20)
        out: dict[int, list[Slot]] = {}
        for take, nbytes in steps:
            if take:
                while (found := space.allocate(nbytes, may_grow=True)) is not None:
                    out.setdefault(nbytes, []).append(found[1])
            else:
                for slot in out.pop(nbytes, []):
                    space.free(slot)
            assert space.used_bytes <= CAPACITY_BYTES


def _fresh(factory: object) -> Path:
    return factory.mktemp("space")  # type: ignore[attr-defined, no-any-return]


@pytest.mark.slow
def test_a_full_tier_of_large_slots_becomes_one_of_small_slots_and_back(tmp_path: Path) -> None:
    with closing(NvmeTier.open(tmp_path / "fresh", CAPACITY_BYTES, slab_bytes=2 << 20)) as tier:
        possible = len(fill(tier, 1000, SMALL_BYTES))
    with closing(NvmeTier.open(tmp_path / "used", CAPACITY_BYTES, slab_bytes=2 << 20)) as tier:
        first = fill(tier, 1, LARGE_BYTES)
        for slot in first:
            tier.free(slot)
        small = fill(tier, 1000, SMALL_BYTES)
        assert len(small) == possible
        for slot in small:
            tier.free(slot)
        assert len(fill(tier, 20_000, LARGE_BYTES)) == len(first)


@pytest.mark.slow
def test_a_slab_that_is_cut_anew_below_a_lower_ceiling_gets_shorter(tmp_path: Path) -> None:
    with closing(NvmeTier.open(tmp_path, CAPACITY_BYTES, slab_bytes=2 << 20)) as tier:
        for slot in fill(tier, 1, LARGE_BYTES):
            tier.free(slot)
        before = tier.used_bytes
        tier.set_ceiling(before - (1 << 20))
        small = fill(tier, 1000, SMALL_BYTES)
        assert small and tier.used_bytes == before - (1 << 20)
    with closing(NvmeTier.open(tmp_path, before - (1 << 20), slab_bytes=2 << 20)) as tier:
        assert {slot for slot, _ in tier.recover()} == set(small)
    assert check_directory(tmp_path, capacity_bytes=before - (1 << 20)) == []
