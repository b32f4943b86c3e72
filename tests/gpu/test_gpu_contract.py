"""The GPU tier keeps the contract of a tier, over the emulated driver."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from kvstore_tiers.base import Tier
from kvstore_tiers.gpu import GpuTier, GpuWorkerSettings
from kvstore_tiers.testing import TierContract, tier_state_machine
from tests.gpu.emulated import emulated_node
from tests.reference.examples import examples

CHUNK_BYTES = 2 << 20


@pytest.mark.slow
class TestGpuTier(TierContract):
    def verifies_writes(self, tier: Tier) -> bool:
        assert isinstance(tier, GpuTier)
        return tier.verifies

    def make_tier(self, capacity_bytes: int) -> Tier:
        return GpuTier(
            capacity_bytes,
            chunk_bytes=CHUNK_BYTES,
            bounce_bytes=CHUNK_BYTES,
            settings=GpuWorkerSettings(variables=emulated_node()),
        )


def make_tier() -> Tier:
    return GpuTier(
        2 * CHUNK_BYTES,
        chunk_bytes=CHUNK_BYTES,
        bounce_bytes=CHUNK_BYTES,
        settings=GpuWorkerSettings(variables=emulated_node()),
    )


TestGpuTierState = tier_state_machine(make_tier).TestCase
TestGpuTierState = pytest.mark.slow(TestGpuTierState)
TestGpuTierState.settings = settings(
    max_examples=examples(8), stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
