"""A recorded trace, replayed at the daemon's own capacity: the same hits and the same bytes, evictions and all.

One client, one request at a time, and a clock that stands still meanwhile, so that nothing depends on when a copy or a
transfer ends.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvstore_proto.arena import slot_bytes
from kvstore_simulator.readers import ReadOptions, read_trace
from kvstore_simulator.replay import Replay, ReplaySettings
from kvstore_simulator.trace import Op, Trace
from kvstored.config import load_config
from tests.gpu.emulated import emulated_node
from tests.reference.clocked_daemon import ClockedDaemon, clocked_daemon
from tests.reference.conversations import model, payloads_of, tokens_of
from tests.reference.recorded_store import Recorded, replay_recorded
from tests.reference.traces import sessions

MODEL = model()
SMALL_DRAM = ("host.capacity=4MiB", "host.staging=1MiB", "host.arena=1MiB")


def some_requests(*, once_every: int = 2, once_blocks: int = 9) -> list[list[int]]:
    """Sessions that go on, and between them prompts of `once_blocks` that are never requested again."""
    made: list[list[int]] = []
    for number, chain in enumerate(sessions(3, 180, prompts=2, live=30)):
        made.append(chain[:12])
        if number % once_every == 0:
            made.append(list(range(10**6 + 40 * number, 10**6 + 40 * number + once_blocks)))
    return made


@pytest.fixture(autouse=True)
def one_message_a_put(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a put that takes long is sent in parts, which overlap as the machine's load has it."""
    monkeypatch.setattr("kvstore_client.put_part.PutPart.send_every_s", 60.0)


@pytest.fixture(autouse=True)
def patient_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a get gives up reads that take over a second: that time runs by no clock of the test's."""
    monkeypatch.setattr("kvstored.store.transfer.promote.LEAST_PATIENCE_MS", 60_000)


@dataclass
class Lived:
    """The work of a daemon by its own counters, the most blocks that each tier held, and those promoted from it."""

    counters: dict[str, int]
    promoted: list[int]
    most_blocks: list[int]


def live(daemon: ClockedDaemon, requests: Sequence[Sequence[int]]) -> Lived:
    """An engine's requests: get what is there, put what is not, send the length of the answer."""
    chance = random.Random(5)
    held: list[int] = []
    with daemon.connect() as session:
        for chain in requests:
            daemon.clock.advance(ns=1000 * round(chance.expovariate(0.2) * 1e6))
            tokens = [token for block in chain for token in tokens_of(block, 1)]
            with session.get(tokens) as lease:
                found = lease.blocks
            daemon.settle()
            if found < len(chain):
                payloads = [payloads_of(block, 1, MODEL)[0] for block in chain]
                session.put(tokens, payloads=payloads, wait="settled")
                daemon.settle()
            daemon.clock.advance(ns=1000 * chance.randrange(1, 10**6))
            if chance.random() < 0.7:  # an engine sends hints on some answers and on what it expects next
                goes_on = chance.choice((None, 0.2, 0.9))
                session.hint(tokens, answer_tokens=chance.randrange(1, 900), will_continue=goes_on)
            if chance.random() < 0.2:  # another one waits, which goes on from there or begins alike
                queued = tokens[: chance.randrange(1, len(tokens))] + [9] * 64
                session.hint(queued, due_in_s=chance.randrange(1, 20))
            now = daemon.ask(lambda store: [store.residency.tier_blocks(tier) for tier in range(len(store.tiers))])
            held = [max(pair) for pair in zip(held or now, now, strict=True)]
    promoted = daemon.ask(lambda store: [flow.promoted_blocks for flow in store.flows.tiers])
    counters = daemon.ask(lambda store: store.counters.snapshot())
    assert counters["acquire_timeouts"] == 0, "no get was cut short by the machine's load"
    return Lived(counters, promoted, held)


def recorded_hits(path: Path) -> list[int]:
    with gzip.open(path, "rt") as lines:
        return [int(row["f"]) for row in map(json.loads, list(lines)[1:]) if row["op"] == "get"]


def hits_of(trace: Trace, hits: Sequence[int]) -> list[int]:
    return [int(count) for count, op in zip(hits, trace.ops, strict=True) if op == Op.GET]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lru", "lfu-ttl", "s3-fifo", "chain-hazard"])
def test_the_simulator_hits_what_the_daemon_hit(policy: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    chosen = (*SMALL_DRAM, "nvme.enabled=false", f"host.policy={policy}")
    with clocked_daemon(*chosen, f"daemon.record={path}") as daemon:
        lived = live(daemon, some_requests(once_every=1, once_blocks=30))  # so many that some are declined
    trace = read_trace(path, "kvstored", ReadOptions(as_recorded=True), lambda done, total: None)
    result = Replay(trace, ReplaySettings(policy, lived.most_blocks[0])).run()
    counters = lived.counters
    assert counters["evicted_blocks"] > 50, "the tier was full most of the time"
    assert hits_of(trace, result.hits) == recorded_hits(path)
    assert sum(recorded_hits(path)) == counters["acquired_blocks"]
    assert result.stored_blocks == counters["stored_blocks"]
    assert result.evicted["evicted"] == counters["evicted_blocks"]
    assert result.evicted["bypassed"] == counters["declined_blocks"]
    assert (counters["declined_blocks"] > 0) == (policy == "chain-hazard")


@pytest.mark.slow
@pytest.mark.parametrize("tiers", [2, 3])
@pytest.mark.parametrize("policy", ["lru", "lfu-ttl", "chain-hazard"])
def test_what_moves_between_tiers_is_what_the_daemon_moved(policy: str, tiers: int, tmp_path: Path) -> None:
    memory = ("tier.far.capacity=4MiB", "tier.far.arena=1MiB", f"tier.far.policy={policy}") if tiers == 3 else ()
    must_move_alike(tmp_path, policy, *memory)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lru", "lfu-ttl"])
@pytest.mark.parametrize("before_host", [True, False])
def test_what_moves_to_a_gpu_is_what_the_daemon_moved(
    before_host: bool, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in emulated_node().items():
        monkeypatch.setenv(name, value)
    lived, simulated = must_move_alike(
        tmp_path, policy, "tier.vram.kind=gpu", "tier.vram.capacity=4MiB", "tier.vram.chunk=2MiB",
        "tier.vram.bounce=4MiB", "tier.vram.rate=0", f"tier.vram.policy={policy}",
        f"tier.vram.before_host={str(before_host).lower()}",
    )  # fmt: skip
    copied = lived.counters["device_blocks"]
    assert simulated.counters["device_blocks"] == pytest.approx(copied, rel=0.02) and (copied > 0) == before_host
    assert simulated.promoted == pytest.approx(lived.promoted, rel=0.02, abs=2)
    assert lived.promoted[0 if before_host else 1] > 0


def must_move_alike(directory: Path, policy: str, *more: str) -> tuple[Lived, Recorded]:
    """Assert that the daemon and the simulator move alike, with these settings; return what both did."""
    path = directory / "trace.jsonl.gz"
    chosen = (
        *SMALL_DRAM,
        *more,
        "nvme.slab=1MiB",
        f"host.policy={policy}",
        f"nvme.policy={policy}",
        "nvme.admission=always",
    )
    with clocked_daemon(*chosen, "nvme.capacity=12MiB", f"daemon.record={path}") as daemon:
        lived = live(daemon, some_requests())
    trace = read_trace(path, "kvstored", ReadOptions(as_recorded=True), lambda done, total: None)
    block = slot_bytes(MODEL.payload_bytes())
    config = load_config(None, chosen)
    for tier, blocks in zip(config.tiers, lived.most_blocks, strict=True):
        config = config.with_tier(tier.name, capacity_bytes=blocks * block)
    simulated = replay_recorded(trace, config, block)
    assert hits_of(trace, simulated.hits) == recorded_hits(path)
    assert lived.counters["promoted_bytes"] > 0 and lived.counters["evicted_blocks"] > 50
    for counter in ("stored_blocks", "written_back_bytes", "evicted_blocks"):
        assert simulated.counters[counter] == pytest.approx(lived.counters[counter], rel=0.02), counter
    moved, lived_moved = (
        sum(counters[name] for name in ("written_back_bytes", "promoted_bytes"))
        for counters in (simulated.counters, lived.counters)
    )
    assert moved == pytest.approx(lived_moved, rel=0.02)
    return lived, simulated
