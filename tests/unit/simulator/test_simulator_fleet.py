"""Several simulated nodes over one remote store: what is shared is found, routing matters, and nothing is random."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore_simulator.fleet import EVENTS, RANDOM, ROUTINGS, STICKY, FleetStudy, Router
from kvstore_simulator.hit_value import models
from kvstore_simulator.machine import load_machine
from kvstore_simulator.node_settings import NodeSettings
from kvstore_simulator.node_store import EnginePool
from kvstore_simulator.options import parse_remote
from kvstore_simulator.simulated_remote import RemoteSpec
from kvstore_simulator.simulated_request import SimulatedRequest
from kvstore_simulator.trace import Op, Trace
from kvstored.cli import main
from kvstored.policy_names import ALL
from tests.reference.traces import sessions, trace_of, write_mooncake

NODES = 4
MODEL = models()["llama-3.1-8b"]
FAST = RemoteSpec(latency_s=0.001, bytes_per_s=50e9, share=ALL)


def made() -> Trace:
    return trace_of(sessions(3, 120), every_s=0.5)


def rows(trace: Trace, remote: RemoteSpec | None, routings: tuple[str, ...] = ROUTINGS) -> dict[str, dict[str, Any]]:
    settings = NodeSettings(load_machine("h100"), MODEL, (("dram", 8 << 30), ("nvme", 16 << 30)), 8 << 30, "lru")
    study = FleetStudy(trace, settings, NODES, routings, remote)
    return {row["routing"]: row for row in study.rows(lambda *_: None)}


@pytest.mark.slow
def test_each_request_is_served_once_and_found_where_it_was_stored() -> None:
    trace = made()
    found = rows(trace, FAST)
    assert list(found) == ["one node", *ROUTINGS]
    for row in found.values():
        assert row["requests"] == trace.lookups and row["refused"] == 0
        assert sum(row["hits_by_tier"].values()) <= row["block_accesses"]
    assert "remote" not in found["one node"]["hits_by_tier"]
    assert found[RANDOM]["hits_by_tier"]["remote"] > found[STICKY]["hits_by_tier"]["remote"]


@pytest.mark.slow
def test_a_shared_store_brings_hits_to_random_routing() -> None:
    trace = made()
    alone, shared = rows(trace, None, (RANDOM,))[RANDOM], rows(trace, FAST, (RANDOM,))[RANDOM]
    assert shared["found_ratio"] > alone["found_ratio"] + 0.03


@pytest.mark.slow
def test_a_store_that_loses_everything_costs_hits_and_no_request() -> None:
    trace = made()
    lost = rows(trace, replace(FAST, loss=1.0, jitter_s=0.001), (RANDOM,))[RANDOM]
    assert lost["requests"] == trace.lookups


@pytest.mark.slow
def test_routing_by_events_finds_more_than_random_without_a_shared_store() -> None:
    found = rows(made(), None)
    assert found[EVENTS]["found_ratio"] > found[RANDOM]["found_ratio"]


def test_requests_that_no_engine_can_hold_are_left_out_of_all_rows_alike() -> None:
    chains = [[0, 1], [0, 1, 2, 3, 4], [0, 1, 2]]
    block_bytes = MODEL.kv_bytes_per_token * trace_of(chains).block_tokens
    settings = NodeSettings(load_machine("h100"), MODEL, (("dram", 8 << 30),), 4 * block_bytes, "lru")
    for row in FleetStudy(trace_of(chains), settings, 2, (EVENTS,), None).rows(lambda *_: None):
        assert (row["requests"], row["refused"], row["block_accesses"]) == (2, 1, 5)


@pytest.mark.parametrize(("waiting_tokens", "stays"), [(0, True), (30_000, True), (1_000_000, False)])
def test_a_conversation_stays_at_its_node_unless_the_queue_there_is_long(waiting_tokens: int, stays: bool) -> None:
    trace = trace_of([[0]])
    settings = NodeSettings(load_machine("h100"), MODEL, (), 0, "lru")
    keys = [trace.key(block) for block in range(16)]
    pools = [EnginePool(64, 1), EnginePool(64, 1)]
    for pool in pools:
        pool.residency.tenant("tenant-0")
    assert pools[1].hold(0, keys, 0) is not None
    nodes: Any = [SimpleNamespace(pool=pool, store=None, trace=trace, settings=settings) for pool in pools]
    router = Router(EVENTS, nodes, 0)
    if waiting_tokens:
        other = SimulatedRequest(0, 0, [*keys, b"other"], waiting_tokens, Op.GET, 0)
        assert router.choose(other) is nodes[1]
    assert (
        router.choose(SimulatedRequest(1, 0, keys, len(keys) * trace.block_tokens, Op.GET, 0))
        is nodes[1 if stays else 0]
    )


@pytest.mark.slow
def test_the_same_study_has_the_same_rows() -> None:
    first, second = (rows(made(), replace(FAST, jitter_s=0.002, loss=0.1), (EVENTS,)) for _ in range(2))
    for row in (*first.values(), *second.values()):
        del row["seconds"]
    assert first == second


@pytest.mark.parametrize("text", ["latency=2", "bandwidth=fast", "loss=2", "share=some", "speed=1ms", ""])
def test_a_wrong_remote_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="such as --remote latency=2ms"):
        parse_remote(text)


def test_a_remote_is_read() -> None:
    spec = parse_remote("latency=3ms, jitter=500us,bandwidth=1GB/s,loss=0.5,capacity=1TiB,share=all")
    assert spec == RemoteSpec(0.003, 0.0005, 1e9, 0.5, 1 << 40, ALL)


@pytest.mark.slow
def test_the_command_prints_a_row_for_each_routing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    write_mooncake(path, sessions(3, 40))
    asked = ["simulate", str(path), "--format", "mooncake", "--nodes", "2", "--remote", "latency=2ms,bandwidth=10GB/s"]
    assert main([*asked, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["routing"] for row in document["rows"]] == ["one node", *ROUTINGS]
    assert main([*asked, "--routing", "sticky"]) == 0
    assert "sticky" in capsys.readouterr().out
    assert main(["simulate", str(path), "--format", "mooncake", "--routing", "sticky"]) == 2
    assert "add --nodes" in capsys.readouterr().err
