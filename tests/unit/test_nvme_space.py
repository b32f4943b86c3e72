"""The capacity is kept whatever slots there were before: the index does not shrink while it is open."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_tiers.base import Slot
from kvstore_tiers.nvme import NvmeTier
from kvstore_tiers.nvme.check import bytes_used, check_directory
from kvstore_tiers.nvme.directory import TierDirectory, allocated_bytes
from kvstore_tiers.nvme.space import SlabSpace
from kvstore_tiers.testing.driving import block, finish, put
from tests.reference.examples import examples

CAPACITY_BYTES = 12 << 20
SMALL_BYTES, LARGE_BYTES = 1, 100_000


def fill(tier: NvmeTier, first: int, payload_bytes: int) -> list[Slot]:
    slots: list[Slot] = []
    while (slot := put(tier, *block(first + len(slots), payload_bytes))) is not None:
        slots.append(slot)
    assert finish(tier.sync).ok
    return slots


def test_an_index_that_grew_for_small_blocks_is_counted_when_they_are_large(tmp_path: Path) -> None:
    with closing(NvmeTier.open(tmp_path, CAPACITY_BYTES, slab_bytes=2 << 20)) as tier:
        small = fill(tier, 1, SMALL_BYTES)
        assert tier.statistics().used_bytes <= CAPACITY_BYTES
        index_bytes = tier.statistics().used_by["index"]
        for slot in small:
            tier.free(slot)
        large = fill(tier, 10_000, LARGE_BYTES)
        assert len(large) > 50, "the slabs were reshaped"
        assert tier.statistics().used_by["index"] >= index_bytes
        assert allocated_bytes(tmp_path / "index" / "data.mdb") <= tier.statistics().used_by["index"]
        assert tier.statistics().used_bytes <= CAPACITY_BYTES
    assert check_directory(tmp_path, capacity_bytes=CAPACITY_BYTES) == []
    with closing(NvmeTier.open(tmp_path, CAPACITY_BYTES, slab_bytes=2 << 20)) as tier:
        assert tier.statistics().used_by["index"] < index_bytes, "made anew, for fewer slots"
        assert allocated_bytes(tmp_path / "index" / "data.mdb") <= tier.statistics().used_by["index"]
        assert {slot for slot, _ in tier.recover()} == set(large)


def test_a_smaller_capacity_costs_slabs_and_a_smaller_index(tmp_path: Path) -> None:
    with closing(NvmeTier.open(tmp_path, CAPACITY_BYTES, slab_bytes=2 << 20)) as tier:
        fill(tier, 1, SMALL_BYTES)
        slabs = len(list((tmp_path / "slabs").iterdir()))
    smaller = CAPACITY_BYTES // 2
    with closing(NvmeTier.open(tmp_path, smaller, slab_bytes=2 << 20)) as tier:
        assert tier.recovery_report.dropped_slabs == slabs // 2 + 1
        assert tier.statistics().used_bytes <= smaller
        blocks = dict(tier.recover())
        assert all(tier.locate(header.key) == slot for slot, header in blocks.items())
    with closing(TierDirectory(tmp_path)) as opened:
        assert bytes_used(opened) <= smaller
    assert check_directory(tmp_path, capacity_bytes=smaller) == []


sizes = st.sampled_from([8192, 12_288, 65_536, 1 << 20])


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.booleans(), sizes), max_size=12))
def test_the_sum_never_exceeds_the_capacity(tmp_path_factory: object, steps: list[tuple[bool, int]]) -> None:
    """Slots of one size are taken until there are none, or all of them are given back."""
    with closing(TierDirectory(_fresh(tmp_path_factory))) as directory:
        space = SlabSpace(directory, CAPACITY_BYTES, 2 << 20)
        out: dict[int, list[Slot]] = {}
        budget = 0
        for take, nbytes in steps:
            if take:
                while (found := space.allocate(nbytes, may_grow=True)) is not None:
                    out.setdefault(nbytes, []).append(found[1])
            else:
                for slot in out.pop(nbytes, []):
                    space.free(slot)
            assert space.used_bytes <= CAPACITY_BYTES
            assert space.index_budget_bytes >= budget
            budget = space.index_budget_bytes


def _fresh(factory: object) -> Path:
    return factory.mktemp("space")  # type: ignore[attr-defined, no-any-return]


def test_small_slots_take_room_for_the_index_from_their_own_slabs(tmp_path: Path) -> None:
    """A full tier of large slots becomes one of small slots, as many as one that never had large ones. What their index
    has got it keeps until the next start; no more than that is missing afterwards."""
    with closing(NvmeTier.open(tmp_path / "fresh", CAPACITY_BYTES, slab_bytes=2 << 20)) as tier:
        possible = len(fill(tier, 1000, SMALL_BYTES))
    with closing(NvmeTier.open(tmp_path / "used", CAPACITY_BYTES, slab_bytes=2 << 20)) as tier:
        first = fill(tier, 1, LARGE_BYTES)
        for slot in first:
            tier.free(slot)
        small = fill(tier, 1000, SMALL_BYTES)
        assert len(small) >= 0.97 * possible
        for slot in small:
            tier.free(slot)
        again = fill(tier, 20_000, LARGE_BYTES)
        assert len(again) >= 0.9 * len(first)
    with closing(NvmeTier.open(tmp_path / "used", CAPACITY_BYTES, slab_bytes=2 << 20)) as tier:
        new = fill(tier, 30_000, LARGE_BYTES)
        assert len(again) + len(new) >= len(first) - 2
