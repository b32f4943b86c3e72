"""The shipped conformance suite on every tier we ship."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore_tiers.arena import writable_owner
from kvstore_tiers.base import Coding, ContainerReport, Slot, Tier
from kvstore_tiers.host import HostTier
from kvstore_tiers.keyed import KeyedTier
from kvstore_tiers.nvme import NvmeTier
from kvstore_tiers.nvme.check import check_directory
from kvstore_tiers.testing import TierContract
from kvstore_tiers.testing.faulty import FaultyTier
from kvstore_tiers.testing.lossy_store import LossyStore
from kvstore_tiers.testing.memory import MemoryTier


class TestMemoryTier(TierContract):
    def make_tier(self, capacity_bytes: int) -> Tier:
        return MemoryTier(capacity_bytes)


class TestHostTier(TierContract):
    def make_tier(self, capacity_bytes: int) -> Tier:
        return HostTier(capacity_bytes, arena_bytes=1 << 20)


class TestSealedHostTier(TierContract):
    def make_tier(self, capacity_bytes: int) -> Tier:
        return HostTier(capacity_bytes, arena_bytes=1 << 20, mode="sealed")


class _WritableByClients(HostTier):
    """All of its arenas are for clients to write to."""

    def allocate(self, nbytes: int, owner: str = "") -> Slot | None:
        return super().allocate(nbytes, writable_owner(owner))

    def makes_room(self, container: int, nbytes: int, owner: str = "") -> bool:
        return super().makes_room(container, nbytes, writable_owner(owner))

    def convertible(self, nbytes: int, owner: str = "") -> list[ContainerReport]:
        return super().convertible(nbytes, writable_owner(owner))


class TestHostTierThatClientsWrite(TierContract):
    def make_tier(self, capacity_bytes: int) -> Tier:
        return _WritableByClients(capacity_bytes, arena_bytes=1 << 20)


class TestNvmeTier(TierContract):
    @pytest.fixture(autouse=True)
    def directory(self, tmp_path: Path):
        self.path = tmp_path / "nvme"
        yield
        assert check_directory(self.path) == []

    def make_tier(self, capacity_bytes: int) -> Tier:
        return NvmeTier.open(self.path, capacity_bytes, slab_bytes=1 << 20)


class TestNvmeTierThatEncrypts(TestNvmeTier):
    def make_tier(self, capacity_bytes: int) -> Tier:
        data_keys = pytest.importorskip("kvstored.clients.tenants.data_keys", reason="needs the extra encryption")
        keys = data_keys.DataKeyFile(self.path.parent, bytes(32), lambda digest: True)
        coding = Coding(staging_bytes=1 << 20)
        return NvmeTier.open(self.path, capacity_bytes, slab_bytes=1 << 20, keys=keys, coding=coding)


class TestFaultyTierWithoutFaults(TierContract):
    def make_tier(self, capacity_bytes: int) -> Tier:
        return FaultyTier(MemoryTier(capacity_bytes))


class TestKeyedTier(TierContract):
    def make_tier(self, capacity_bytes: int) -> Tier:
        return KeyedTier(LossyStore(), capacity_bytes)


class TestSlowKeyedTier(TierContract):
    def make_tier(self, capacity_bytes: int) -> Tier:
        return KeyedTier(LossyStore(latency_s=0.002), capacity_bytes, readers=2, writers=2)
