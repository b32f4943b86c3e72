"""Long scans look at every block of a large index: the control loop goes on meanwhile, and nothing is kept for each."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_proto.v1 import admin_pb2 as pb
from kvstore_tiers.base import Slot
from kvstored.admin import durable_copies
from kvstored.admin.block_list import BlockList
from kvstored.admin.block_totals import BlockTotals
from kvstored.admin.durable_copies import save, tokens_in_tier
from kvstored.store.blocks import listing
from kvstored.store.transfer.verification import _Verified
from tests.reference.blocks import Shelf, key
from tests.reference.tiers import HOST, NVME

T = TypeVar("T")
BLOCKS = 500


def with_looks(work: Awaitable[T]) -> tuple[T, int]:
    """Return what comes of it, and how often the loop got its turn before."""

    async def run() -> tuple[T, int]:
        task = asyncio.ensure_future(work)
        looks = 0
        while not task.done():
            looks += 1
            await asyncio.sleep(0)
        return task.result(), looks

    return asyncio.run(run())


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Shelf:
    """Chains of two tenants; slices of ten rows."""
    monkeypatch.setattr(durable_copies, "SLICE_ROWS", 10)
    monkeypatch.setattr(durable_copies, "SLICE_TOKENS", 10)
    monkeypatch.setattr(listing, "_SCAN_ROWS", 10)
    shelf = Shelf("host", "nvme", tenants=2)
    for first in range(0, BLOCKS, 5):
        shelf.chain(*range(first, first + 5), tenant=first // 5 % 2, tier=first // 10 % 2)
    return shelf


@pytest.mark.parametrize("tenant", [None, 1])
@pytest.mark.parametrize("tier", [HOST, NVME])
def test_the_blocks_of_a_tier_are_named_deepest_first_in_slices(shelf: Shelf, tier: int, tenant: int | None) -> None:
    residency = shelf.residency
    tokens, looks = with_looks(tokens_in_tier(residency, tier, tenant))
    rows = [residency.current(token) for token in tokens]
    everybody = [
        residency.find(owner, key(number)) for owner in (0, 1) for number in range(BLOCKS)
        if residency.find(owner, key(number)) >= 0
    ]  # fmt: skip
    wanted = [row for row in everybody if residency.has(row, tier) and tenant in (None, residency.tenant_of(row))]
    assert sorted(rows) == sorted(wanted) and wanted
    assert [residency.depth(row) for row in rows] == sorted((residency.depth(row) for row in rows), reverse=True)
    assert looks >= BLOCKS // 10


def test_saving_looks_at_the_loop_while_it_finds_out_what_is_safe(shelf: Shelf) -> None:
    """Also where all is safe already, so that nothing has to be written."""
    writeback: Any = SimpleNamespace(is_durable=lambda row: True)
    tokens = asyncio.run(tokens_in_tier(shelf.residency, HOST))
    left, looks = with_looks(durable_copies._unsafe(shelf.residency, writeback, tokens))
    assert not left and looks >= len(tokens) // 10 > 10
    assert asyncio.run(save(shelf.residency, writeback, [HOST], 1.0)) == (0, 0, 0)


def test_a_listing_that_finds_little_looks_at_the_loop(shelf: Shelf) -> None:
    parts: Any = SimpleNamespace(
        store=SimpleNamespace(residency=shelf.residency, clock=SimpleNamespace(monotonic_ns=int)), tenants=None
    )
    blocks = BlockList(SimpleNamespace(parts=parts))  # type: ignore[arg-type]
    wanted = pb.BlocksRequest(key_prefix="ffff")
    reply, looks = with_looks(blocks.blocks(wanted))
    assert not reply.blocks and not reply.next and looks >= BLOCKS // 10
    _, looks = with_looks(blocks.blocks(pb.BlocksRequest(key_prefix="ffff", sort="uses")))
    assert looks >= BLOCKS // 10
    for by in ("prefix", "tree"):
        _, looks = with_looks(BlockTotals(parts, blocks).totals(pb.BlockTotalsRequest(of=wanted, by=by)))
        assert looks >= BLOCKS // 10


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 2), st.integers(0, 3), st.integers(0, 2)), max_size=60),
    st.integers(0, 40), st.integers(0, 2), st.integers(0, 3), st.integers(0, 2),
)  # fmt: skip
def test_only_the_very_copy_that_was_verified_counts(
    noted: list[tuple[int, int, int, int]], row: int, container: int, page: int, generation: int
) -> None:
    verified, model = _Verified(), {}
    for at, *place in noted:
        slot = Slot(place[0], place[1] * 4096, 4096, place[2])
        verified.note(at, slot)
        model[at] = slot
    asked = Slot(container, page * 4096, 4096, generation)
    assert verified.has(row, asked) == (model.get(row) == asked)


def test_what_was_verified_costs_a_few_bytes_a_block() -> None:
    verified, rows = _Verified(), 10_000
    for row in range(rows):
        verified.note(row, Slot(1, row * 4096, 4096, 1))
    held = sys.getsizeof(verified._place) + sys.getsizeof(verified._generation)
    assert held / rows < 16
