"""Versions of weights: a bump leaves nothing of older versions behind, and their names are bounded."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore_proto.errors import KVStoreError
from kvstored.clients import weights
from kvstored.clients.tenants import TenantDirectory
from kvstored.clients.weights import WEIGHTS, WeightVersions
from kvstored.store.operations.durability import DurabilityMode
from tests.reference.driven_store import FINGERPRINT, DrivenStore, keys_of
from tests.unit.kvstored.test_retention import over_a_store


class Saved:
    def __init__(self) -> None:
        self.entries: dict[str, dict[bytes, bytes]] = {WEIGHTS: {}}

    async def save(self, name: str, key: bytes, value: bytes | None) -> None:
        await asyncio.sleep(0)


def versions(driven: DrivenStore, place: Path) -> tuple[WeightVersions, Any]:
    tenants = TenantDirectory(place, (), "by-uid")
    tenant = tenants.named("uid-7")
    assert tenant is not None
    found = WeightVersions(Saved(), tenants, driven.small.store)
    found.puts_of = driven.operations.put.under_way
    old = replace(FINGERPRINT, weights="policy", weights_version=1)
    client = driven.client
    client.fingerprint, client.fingerprint_digest = old, tenants.remember(old)
    client.fingerprint_id = tenants.fingerprint_number(client.fingerprint_digest)
    client.tenant, client.tenant_id = tenant, driven.small.residency.tenant(tenant.index_name)
    return found, tenant


def test_a_put_that_began_before_a_bump_leaves_nothing_behind(tmp_path: Path) -> None:
    @over_a_store()
    async def scenario(driven: DrivenStore) -> None:
        ours, tenant = versions(driven, tmp_path)
        room = driven.small.store.room
        asked, let_go = asyncio.Event(), asyncio.Event()
        allocate_for = room.allocate_for

        async def later(*given: Any, **named: Any) -> Any:
            asked.set()
            await let_go.wait()
            return await allocate_for(*given, **named)

        room.allocate_for = later  # type: ignore[method-assign]
        allocate_run, room.allocate_run = room.allocate_run, lambda *given, **named: []  # type: ignore[method-assign]
        putting = asyncio.create_task(driven.put(keys_of(1, 3), DurabilityMode.NONE))
        await asked.wait()
        bumping = asyncio.create_task(ours.bump(tenant, "policy", 2))
        for _ in range(50):
            await asyncio.sleep(0)
        room.allocate_run = allocate_run  # type: ignore[method-assign]
        let_go.set()
        await putting
        assert (await bumping).version == 2
        assert not driven.small.residency.tenant_blocks(driven.client.tenant_id)

    scenario(tmp_path)


def test_namespaces_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "MOST_NAMESPACES", 3)

    @over_a_store()
    async def scenario(driven: DrivenStore) -> None:
        ours, tenant = versions(driven, tmp_path)
        for number in range(3):
            ours.admit(tenant, replace(FINGERPRINT, weights=f"made-up-{number}", weights_version=1))
        with pytest.raises(KVStoreError, match="3 namespaces of weights, no more"):
            ours.admit(tenant, replace(FINGERPRINT, weights="one-more", weights_version=1))
        with pytest.raises(KVStoreError, match="3 namespaces of weights, no more"):
            await ours.bump(tenant, "one-more")
        assert (await ours.bump(tenant, "made-up-0")).version == 2

    scenario(tmp_path)


def test_a_bump_of_one_tenant_leaves_another_that_computes_with_the_version(tmp_path: Path) -> None:
    @over_a_store()
    async def scenario(driven: DrivenStore) -> None:
        ours, tenant = versions(driven, tmp_path)
        client, directory = driven.client, ours._tenants
        other = directory.named("uid-8")
        assert other is not None
        residency = driven.small.residency
        theirs = driven.new_client(2)
        theirs.tenant, theirs.tenant_id = other, residency.tenant(other.index_name)
        theirs.fingerprint, theirs.fingerprint_digest = client.fingerprint, client.fingerprint_digest
        theirs.fingerprint_id = client.fingerprint_id
        for each in (client, theirs):
            await driven.put(keys_of(each.session_id, 3), DurabilityMode.NONE, each)
        ours.admit(tenant, client.fingerprint)
        ours.admit(other, client.fingerprint)
        assert (await ours.bump(tenant, "policy", 2)).blocks == 3
        assert residency.tenant_blocks(theirs.tenant_id) == 3
        assert directory.fingerprint(client.fingerprint_digest) is not None, "the other's blocks still have a name"
        assert (await ours.bump(other, "policy", 2)).blocks == 3
        assert directory.fingerprint(client.fingerprint_digest) is None

    scenario(tmp_path)
