"""Every tier against a plain dict, driven by hypothesis; the NVMe tier with restarts and its directory walked after."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings

from kvstore_tiers.base import Tier
from kvstore_tiers.host import HostTier
from kvstore_tiers.keyed import KeyedTier
from kvstore_tiers.nvme import NvmeTier
from kvstore_tiers.nvme.check import check_directory
from kvstore_tiers.testing import tier_state_machine
from kvstore_tiers.testing.faulty import FaultyTier
from kvstore_tiers.testing.lossy_store import LossyStore
from kvstore_tiers.testing.memory import MemoryTier
from tests.reference.examples import examples

QUICK = settings(
    max_examples=examples(25),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
NVME_CAPACITY_BYTES = (512 << 10) + (256 << 10)


def open_nvme(path: str) -> NvmeTier:
    return NvmeTier.open(path, NVME_CAPACITY_BYTES, slab_bytes=96 << 10, io_threads=2, quarantine_slots=2)


def make_nvme() -> Tier:
    return open_nvme(tempfile.mkdtemp(prefix="tier-state-"))


def reopen_nvme(tier: Tier) -> Tier:
    assert isinstance(tier, NvmeTier)
    tier.close()
    assert check_directory(tier.path, capacity_bytes=NVME_CAPACITY_BYTES, verify_payloads=True) == []
    return open_nvme(str(tier.path))


class NvmeMachine(tier_state_machine(make_nvme, reopen_nvme)):  # type: ignore[misc]
    def teardown(self) -> None:
        if hasattr(self, "tier"):
            path = Path(self.tier.path)
            super().teardown()
            findings = check_directory(path, capacity_bytes=NVME_CAPACITY_BYTES, verify_payloads=True)
            shutil.rmtree(path)
            assert findings == []


TestKeyedTier = tier_state_machine(lambda: KeyedTier(LossyStore(), 200_000, readers=2, writers=2)).TestCase
TestMemoryTier = tier_state_machine(lambda: MemoryTier(200_000)).TestCase
TestHostTier = tier_state_machine(lambda: HostTier(400_000, arena_bytes=96 << 10)).TestCase
TestFaultyTier = tier_state_machine(lambda: FaultyTier(HostTier(200_000, arena_bytes=64 << 10))).TestCase
TestNvmeTier = NvmeMachine.TestCase
for _case in (TestMemoryTier, TestHostTier, TestFaultyTier, TestNvmeTier):
    _case.settings = QUICK
del _case  # else it is collected as a test of its own
