"""Chains that are put, got, deleted and evicted at random in a store whose first tier is device memory.

Owns what was stored, as a plain model. After each get the bytes are the put ones; at the end every copy in every tier
is, the books agree, and no tier has more than its capacity.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from kvstore_tiers.base import Tier
from kvstore_tiers.segments import segment_of
from kvstore_tiers.testing.transfers import finish
from kvstored.store.blocks.check import check
from kvstored.store.operations.durability import DurabilityMode
from tests.reference.driven_store import DrivenStore, keys_of, payload_of
from tests.reference.small_store import PAYLOAD_BYTES, small_store

FAR_S = 60.0
CHAINS = 12
SMALL = ("host.capacity=4MiB", "host.arena=1MiB", "nvme.capacity=4MiB")
_chain = st.integers(1, CHAINS)
steps_of_stores = st.lists(
    st.one_of(
        st.tuples(st.just("put"), _chain, st.integers(1, 30), st.booleans()),
        st.tuples(st.just("get"), _chain),
        st.tuples(st.just("get"), _chain),
        st.tuples(st.sampled_from(["evict", "delete"]), _chain),
        st.tuples(st.just("settle"), st.integers(0, 3)),
    ),
    min_size=4, max_size=25,
)  # fmt: skip


async def settle(store: DrivenStore) -> None:
    """Until no copy to device memory is under way. An access is counted once its answer is on its way."""
    await asyncio.sleep(0)
    async with asyncio.timeout(FAR_S):
        while any(sharing.waiting for sharing in store.small.store.sharing):
            await asyncio.sleep(0.001)


def _may_leave_host(store: DrivenStore, row: int) -> bool:
    residency, host = store.small.residency, store.small.mapped
    has_other = residency.tier_mask(row) & ~(1 << host)
    return bool(has_other) and residency.has(row, host) and not residency.pin_count(row)


async def _step(store: DrivenStore, stored: dict[int, int], step: tuple[object, ...]) -> None:
    match step:
        case ("put", int(chain), int(blocks), bool(durable)):
            mode = DurabilityMode.ALWAYS if durable else DurabilityMode.NONE
            await store.put(keys_of(chain, blocks), mode)
            stored[chain] = max(stored.get(chain, 0), blocks)
        case ("get", int(chain)):
            held = await store.get(keys_of(chain, 30))  # which compares the bytes
            assert held.blocks <= stored.get(chain, 0)
        case ("evict", int(chain)):
            for key in keys_of(chain, 30):
                row = store.small.residency.find(store.client.tenant_id, key)
                if row >= 0 and _may_leave_host(store, row):
                    store.leave_host([key])
        case ("delete", int(chain)):
            await settle(store)
            await store.operations.delete.delete(store.client, keys_of(chain, 30))
        case ("settle", int(seconds)):
            await settle(store)
            store.small.clock.advance(s=seconds)


def must_hold(store: DrivenStore) -> int:
    """Assert the module's rules; return how many copies there are in device memory."""
    residency, found = store.small.residency, 0
    assert check(residency) == []
    for chain in range(1, CHAINS + 1):
        for key in keys_of(chain, 30):
            row = residency.find(store.client.tenant_id, key)
            for position, tier in enumerate(store.small.store.tiers):
                if row >= 0 and residency.has(row, position):
                    copy = np.zeros(PAYLOAD_BYTES, np.uint8)
                    slot = residency.slot(row, position)
                    outcome = finish(lambda done: tier.read(slot, key, [segment_of(copy)], done))  # noqa: B023
                    assert outcome.ok and np.array_equal(copy, payload_of(key)), (position, outcome)
                    found += position < store.small.mapped
    for tier in store.small.store.tiers:
        assert tier.check_books() == []
        assert tier.statistics().used_bytes <= tier.statistics().capacity_bytes
    return found


def run_steps(steps: Sequence[tuple[object, ...]], before: Tier, *settings: str) -> None:
    async def run() -> None:
        with tempfile.TemporaryDirectory() as directory:
            async with small_store(Path(directory), *SMALL, *settings, before=[before]) as small:
                store, stored = DrivenStore(small), dict[int, int]()
                for step in steps:
                    await _step(store, stored, step)
                await settle(store)
                await small.settle()
                must_hold(store)

    asyncio.run(run())
