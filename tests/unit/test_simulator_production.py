"""The simulator drives what the daemon drives: the same classes, and no copies of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore_tiers.host import HostTier
from kvstore_tiers.nvme.tier import NvmeTier
from kvstored import assembly
from kvstored.assembly import Store, make_residency
from kvstored.clock import ManualClock
from kvstored.config import load_config
from kvstored.movement.completions import CompletionQueue
from kvstored.policies import POLICIES
from kvstored.simulator import replay
from tests.reference.traces import sessions, trace_of

TRACE = trace_of(sessions(1, 30))


def composed(directory: Path, policy: str, look: Callable[[Store], object]) -> object:
    """What the daemon puts together for this configuration, looked at."""
    config = load_config(
        None,
        [
            f"daemon.state_dir={directory}", "host.capacity=32MiB", "host.staging=8MiB", "host.arena=2MiB",
            "nvme.capacity=64MiB", "nvme.slab=4MiB", f"host.policy={policy}", f"nvme.policy={policy}",
        ],
    )  # fmt: skip

    async def build() -> object:
        host = HostTier(config.host.capacity_bytes, arena_bytes=config.host.arena_bytes, copy_threads=1)
        nvme = NvmeTier.open(directory / "nvme", config.nvme.capacity_bytes, slab_bytes=config.nvme.slab_bytes)
        try:
            completions = CompletionQueue(asyncio.get_running_loop())
            return look(Store(config, ManualClock(), completions, make_residency(config), host, nvme))
        finally:
            host.close()
            nvme.close()

    return asyncio.run(build())


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_policy_and_residency_are_the_daemons(policy: str, tmp_path: Path) -> None:
    run = replay.Replay(TRACE, replay.ReplaySettings(policy, 10))

    def look(store: Store) -> object:
        assert type(run.residency) is type(store.residency)
        return [type(each) for each in store.policies]

    assert composed(tmp_path, policy, look) == [type(run.policy)] * 2


def test_admissions_come_from_where_the_daemon_has_them() -> None:
    assert replay.create_admission is assembly.create_admission
    assert replay.create is assembly.create


def test_every_policy_can_be_configured() -> None:
    from kvstored.config.parse import POLICIES as CONFIGURED

    assert set(CONFIGURED) == set(POLICIES)
