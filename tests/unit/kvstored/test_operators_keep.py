"""An operator's order about many blocks: in slices, within the bounds of pins, and about nobody else's blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore_proto.errors import KVStoreError
from kvstore_proto.v1 import admin_pb2 as pb
from kvstore_proto.v1 import kvstore_pb2 as kv
from kvstored.admin import keep
from kvstored.admin.block_list import BlockList
from kvstored.store import pins
from kvstored.store.operations.durability import DurabilityMode
from tests.reference.driven_store import DrivenStore, keys_of
from tests.reference.small_store import SLOT_BYTES
from tests.unit.kvstored.test_retention import over_a_store, put

BLOCKS = 200
PINNED = 3 * BLOCKS // 2  # by one owner at most


def keeping(driven: DrivenStore) -> keep.Keeping:
    store: Any = driven.small.store
    tenants = SimpleNamespace(number=lambda name, residency: residency.tenant(name))
    views: Any = SimpleNamespace(parts=SimpleNamespace(store=store, tenants=tenants))
    return keep.Keeping(store, BlockList(views))


def order(*, pin: str = "", **fields: Any) -> pb.KeepRequest:
    return pb.KeepRequest(tenant="tenant", terms=kv.Terms(pin=pin) if pin else kv.Terms(ttl_s=60), **fields)


@pytest.mark.parametrize("pin", ["", "owner"])
def test_no_step_looks_at_many_blocks(pin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep, "SLICE_ROWS", 10)

    @over_a_store()
    async def scenario(driven: DrivenStore) -> None:
        await put(driven, 1, BLOCKS)
        residency, looked = driven.small.residency, [0]
        current = residency.current

        def counted(token: int) -> int:
            looked[-1] += 1
            return current(token)

        residency.current = counted  # type: ignore[method-assign]
        task = asyncio.create_task(keeping(driven).keep(order(pin=pin, all=True)))
        while not task.done():
            await asyncio.sleep(0)
            looked.append(0)
        assert task.result().blocks == BLOCKS and sum(looked) >= BLOCKS
        assert max(looked) <= 10

    scenario(tmp_path)


@pytest.mark.parametrize("other", ["order", "put"])
def test_what_comes_meanwhile_does_not_exceed_the_bound(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keep, "SLICE_ROWS", 10)

    @over_a_store(f"limits.pinned_per_tenant={PINNED * SLOT_BYTES}", "host.capacity=16MiB")
    async def scenario(driven: DrivenStore) -> None:
        await put(driven, 1, BLOCKS)
        service, retention = keeping(driven), driven.small.store.retention
        tenant = driven.client.tenant_id
        first = keys_of(2, BLOCKS)
        await driven.put(first, DurabilityMode.NONE)
        leaves = [keys_of(1, BLOCKS)[-1].hex(), first[-1].hex()]
        tasks = [asyncio.create_task(service.keep(order(pin="a", key_prefix=leaves[0])))]
        if other == "order":
            tasks.append(asyncio.create_task(service.keep(order(pin="b", key_prefix=leaves[1]))))
        else:
            while not retention.pins.rows_of(tenant, "a"):
                await asyncio.sleep(0)
            with pytest.raises(KVStoreError, match=r"limits\.pinned_per_tenant"):
                retention.check(tenant, keep.Terms(pin="b"), BLOCKS * SLOT_BYTES)
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(each) for each in done] == [pb.KeepReply, KVStoreError][: len(tasks)]
        assert driven.small.residency.pinned_bytes[tenant] == BLOCKS * SLOT_BYTES

    scenario(tmp_path)


@pytest.mark.parametrize("ttl_s", [1, 600])
@pytest.mark.parametrize("chosen", ["all", "chain"])
def test_no_parent_expires_before_its_child_however_long_an_order_takes(
    chosen: str, ttl_s: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that were to live for 300 s get less, or more; some seconds pass at each slice."""
    monkeypatch.setattr(keep, "SLICE_ROWS", 3)

    @over_a_store()
    async def scenario(driven: DrivenStore) -> None:
        keys = await put(driven, 1, 12, ttl_s=300)
        residency, retention, tenant = driven.small.residency, driven.small.store.retention, driven.client.tenant_id
        which = {"all": True} if chosen == "all" else {"key_prefix": keys[5].hex()}
        request = pb.KeepRequest(tenant="tenant", terms=kv.Terms(ttl_s=ttl_s), **which)
        task = asyncio.create_task(keeping(driven).keep(request))
        while not task.done():
            await asyncio.sleep(0)
            ends = [residency.expires_s(row) for row in residency.find_run(tenant, b"".join(keys))]
            assert ends == sorted(ends, reverse=True), ends
            driven.small.clock.advance(s=0.7)
            while retention.tick():
                pass
        assert driven.small.store.counters["orphaned_blocks"] == 0
        assert len(retention.find_run(tenant, b"".join(keys))) == (12 if ttl_s > 1 or chosen == "chain" else 0)

    scenario(tmp_path)


def test_a_row_that_another_tenant_has_taken_meanwhile_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @over_a_store()
    async def scenario(driven: DrivenStore) -> None:
        keys, other = await put(driven, 1, 2), driven.new_client(2, "other")
        residency, tenant = driven.small.residency, driven.client.tenant_id
        child = residency.find(tenant, keys[1])

        async def meanwhile(work: Callable[..., Any], *given: Any) -> Any:
            found = work(*given)
            assert driven.small.store.retention.end(child)
            for chain in range(10, 40):
                await driven.put(keys_of(chain, 1), DurabilityMode.NONE, other)
            assert residency.tier_mask(child) and residency.tenant_of(child) == other.tenant_id
            return found

        monkeypatch.setattr(keep.asyncio, "to_thread", meanwhile)
        reply = await keeping(driven).keep(order(pin="a", key_prefix=keys[0].hex(), below=True))
        assert reply.blocks == 1 and not residency.pinned_by(child)

    scenario(tmp_path)


def test_pins_that_end_are_looked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "STEP_BLOCKS", 10)

    @over_a_store()
    async def scenario(driven: DrivenStore) -> None:
        await put(driven, 1, BLOCKS, pin="owner", pin_ttl_s=5)
        small, tenant = driven.small, driven.client.tenant_id
        residency, retention, looked = small.residency, small.store.retention, 0
        tenants_of = residency.tenants_of

        def counted(rows: Any) -> Any:
            nonlocal looked
            looked += len(rows)
            return tenants_of(rows)

        residency.tenants_of = counted  # type: ignore[method-assign]
        small.clock.advance(s=6)
        assert retention.tick() and residency.pinned_bytes[tenant] == (BLOCKS - 10) * SLOT_BYTES
        await put(driven, 2, 1, pin="owner")
        while retention.tick():
            pass
        assert not residency.pinned_bytes[tenant] and not retention.pins.ends
        assert looked <= 2 * BLOCKS

    scenario(tmp_path)
