"""The simulator drives what the daemon drives: the same classes, and no copies of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore_simulator import policies, replay
from kvstore_simulator.hit_value import models
from kvstore_simulator.machine import load_machine
from kvstore_simulator.node import serve_trace
from kvstore_simulator.node_settings import BASELINE, ORCHESTRATED, NodeSettings, ServingPlan
from kvstore_simulator.simulated_tiers import SimulatedTier
from kvstore_tiers.host import HostTier
from kvstore_tiers.nvme.tier import NvmeTier
from kvstored.clock import ManualClock
from kvstored.completions import CompletionQueue
from kvstored.config import load_config
from kvstored.store import assembly, movement
from kvstored.store.assembly import Store
from kvstored.store.policies import POLICIES, resolve
from kvstored.store.residency import make_residency
from tests.reference.examples import each_nth
from tests.reference.traces import sessions, trace_of

TRACE = trace_of(sessions(1, 30))


def composed(directory: Path, policy: str, look: Callable[[Store], object]) -> object:
    """Return what the daemon puts together for this configuration, looked at."""
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
            tiers = [host, nvme]
            return look(Store(config, ManualClock(), completions, make_residency(config, tiers), tiers))
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
    assert replay.create_admission is movement.create_admission
    assert policies.create_by_address is assembly.create


# Mode timing

MOVES = {"residency", "policies", "rooms", "leases", "mover", "promoter", "writeback", "orphans", "damage", "breaker"}


def kinds(value: object) -> object:
    """The classes of a part and of what it holds."""
    if isinstance(value, list):
        return [kinds(each) for each in value]
    inner = {
        name: type(each)
        for name, each in getattr(value, "__dict__", {}).items()
        if type(each).__module__.startswith("kvstored.") and not isinstance(each, (SimulatedTier, ManualClock))
    }
    return type(value), inner


def parts(store: Store) -> dict[str, object]:
    return {name: kinds(getattr(store, name)) for name in MOVES}


@pytest.mark.parametrize("plan", [BASELINE, ORCHESTRATED], ids=lambda plan: plan.name)
@pytest.mark.parametrize("policy", each_nth(["best", "lru"], 2))
def test_a_simulated_node_moves_blocks_with_the_daemons_own_parts(
    policy: str, plan: ServingPlan, tmp_path: Path
) -> None:
    from kvstored import storage

    model = models()["smollm2-135m"]
    name = resolve(policy)
    wanted = NodeSettings(load_machine("h100"), model, (("dram", 1 << 28), ("nvme", 1 << 30)), 1 << 28, name)
    wanted = replace(wanted, policy_below=name)
    node = serve_trace(TRACE, wanted, plan, lambda done, total: None)
    assert node.store is not None
    store = node.store.store
    assert type(store) is assembly.Store is storage.Store
    mine = parts(store)
    assert mine == composed(tmp_path, name, parts)
    assert type(None) not in {type(getattr(store, name)) for name in MOVES}
    assert {type(tier) for tier in store.tiers} == {SimulatedTier}
    assert [lane.settings for lane in store.mover.lanes.values()] == composed(
        tmp_path / "again", name, lambda real: [lane.settings for lane in real.mover.lanes.values()]
    )


def test_what_orchestration_promotes_and_writes_goes_through_those_parts() -> None:
    model = models()["smollm2-135m"]
    wanted = NodeSettings(load_machine("h100"), model, (("dram", 1 << 28), ("nvme", 1 << 32)), 1 << 27, "lru")
    node = serve_trace(TRACE, wanted, ORCHESTRATED, lambda done, total: None)
    assert node.store is not None
    counters = node.store.store.counters.snapshot()
    assert counters["written_back_blocks"] == node.store.store.counters["stored_blocks"] > 0
    assert counters["durable_blocks"] == counters["written_back_blocks"]
    assert sum(sum(visit.found[1:]) for visit in node.served.requests) <= counters["promoted_blocks"] + 100
