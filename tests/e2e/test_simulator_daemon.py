"""A recorded trace, replayed at the daemon's own capacity: the same hits and the same bytes, evictions and all.

One client, one request at a time, DRAM only, so that nothing depends on when a transfer ends.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from kvstored.simulator.readers import ReadOptions, read_trace
from kvstored.simulator.replay import Replay, ReplaySettings
from kvstored.simulator.trace import Op
from tests.reference.running_daemon import eventually, model, payloads_of, running_daemon, tokens_of
from tests.reference.traces import sessions

MODEL = model()
SMALL_DRAM = ("nvme.enabled=false", "host.capacity=5MiB", "host.staging=1MiB", "host.arena=1MiB")


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lru", "lfu-ttl", "fifo"])
def test_the_simulator_hits_what_the_daemon_hit(policy: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    requests = [chain[:12] for chain in sessions(3, 300, prompts=2, live=40)]
    with running_daemon(*SMALL_DRAM, f"daemon.record={path}", f"host.policy={policy}") as daemon:
        held = 0
        with daemon.connect() as session:
            for chain in requests:
                tokens = [token for block in chain for token in tokens_of(block, 1)]
                with session.get(tokens) as lease:
                    found = lease.blocks
                assert eventually(lambda: daemon.status().leases == 0)
                if found < len(chain):
                    payloads = [payloads_of(block, 1, MODEL)[0] for block in chain]
                    session.put(tokens, payloads=payloads, wait="settled")
                held = max(held, daemon.tiers()["host"].blocks)
        counters = dict(daemon.status().counters)
    with gzip.open(path, "rt") as lines:
        live = [int(row["f"]) for row in map(json.loads, list(lines)[1:]) if row["op"] != "put"]
    trace = read_trace(path, "kvstored", ReadOptions(as_recorded=True), lambda done, total: None)
    result = Replay(trace, ReplaySettings(policy, held)).run()
    simulated = [int(hits) for hits, op in zip(result.hits, trace.ops, strict=True) if op == Op.GET]
    assert counters["evicted_blocks"] > 50, "the tier was full most of the time"
    assert simulated == live
    assert sum(live) == counters["acquired_blocks"]
    assert result.stored_blocks == counters["stored_blocks"]
    assert result.evicted["evicted"] == counters["evicted_blocks"]
