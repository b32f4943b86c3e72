"""Measures how long a lookup of 64 keys takes: on an idle daemon, and beside two clients at full put and get load.

Idle, on either stream, against an empty echo of the same kind of stream in the same run, interleaved. The target is the
gRPC stream's. Beside the load, on the direct stream: against the idle lookup, and as what is possible an empty echo
beside the same load, to a server that does nothing else. The load moves some 450 blocks of 1 MiB a second each way, and
every put has to evict; the keys looked up are leased, so they stay. The last row says how much of that is a lack of
processors: of each second beside the load, how long the daemon's control thread was ready and had none, against how
long it ran. What it waits in the middle of a request, the lookups behind that wait too, and no code can leave out.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path

from support.daemon import MIB, BenchDaemon, bench_daemon, model, payloads, tokens_of
from support.echo import EchoClient, echo
from support.report import AT_MOST, Row, main, median, percentile, progress, time_each

import kvstore_client
from kvstore_client import BlockKeys, Session
from kvstore_proto.v1 import admin_pb2

KEYS = 64
SMALL_BLOCK_BYTES = 4096
WARM_UP = 200
LIMIT_MS = 5.0
ECHO_BESIDE = "an empty echo beside the load"
GRPC_ECHO = "gRPC stream echo"
DIRECT_ECHO = "direct stream echo"
SETTINGS = (
    "host.capacity=160MiB", "host.staging=40MiB", "host.arena=16MiB", "host.prefault_ahead=16MiB",
    "nvme.capacity=512MiB", "nvme.slab=64MiB", "limits.staging_per_client=16MiB", "limits.lease_ttl_ms=120000",
)  # fmt: skip
START_TIMEOUT_S = 30.0
BLOCKS_A_PUT = 8


def measure(quick: bool) -> list[Row]:
    with bench_daemon(*SETTINGS) as daemon, echo() as floor, echo("grpc") as grpc_floor:  # noqa: SIM117
        with (
            daemon.connect(model(SMALL_BLOCK_BYTES), staging_bytes=MIB) as session,
            daemon.connect(model(SMALL_BLOCK_BYTES), staging_bytes=0, stream="grpc") as through_grpc,
        ):
            tokens = tokens_of(1, KEYS)
            session.put(tokens, payloads=payloads(KEYS, SMALL_BLOCK_BYTES), wait="settled")
            keys = session.keys(tokens)
            assert keys is not None
            with session.get(keys=keys) as held:  # a lease, so that the storm cannot evict what is looked up
                assert len(held) == KEYS
                rounds = 3 if quick else 8
                idle, echoes = _idle(session, keys, floor, rounds)
                grpc_idle, grpc_echoes = _idle(through_grpc, keys, grpc_floor, rounds)
                seconds = 2.0 if quick else 8.0
                busy, echoes_busy, (ran_s, waited_s) = _beside_load(daemon, session, keys, floor, seconds)
    ms = 1e3
    return [
        Row(
            "lookup_64_idle_grpc_p50", median(grpc_idle) * ms, "ms", median(grpc_echoes) * ms, GRPC_ECHO, AT_MOST, 2.0
        ),
        Row(
            "lookup_64_idle_grpc_p99", percentile(grpc_idle, 99) * ms, "ms", percentile(grpc_echoes, 99) * ms, GRPC_ECHO
        ),
        Row("lookup_64_idle_p50", median(idle) * ms, "ms", median(echoes) * ms, DIRECT_ECHO),
        Row("lookup_64_idle_p99", percentile(idle, 99) * ms, "ms", percentile(echoes, 99) * ms, DIRECT_ECHO),
        Row("lookup_64_idle_p50_vs_grpc", median(idle) * ms, "ms", median(grpc_idle) * ms, "the same through gRPC"),
        Row(
            "lookup_64_load_p50", median(busy) * ms, "ms", median(idle) * ms, "idle lookup", AT_MOST, 4.0,
            median(echoes_busy) * ms, ECHO_BESIDE,
        ),
        Row(
            "lookup_64_load_p99", percentile(busy, 99) * ms, "ms", LIMIT_MS, "limit", AT_MOST, 1.0,
            percentile(echoes_busy, 99) * ms, ECHO_BESIDE,
        ),
        Row("lookup_64_load_control_waits", waited_s * ms, "ms/s", ran_s * ms, "control thread runs"),
    ]  # fmt: skip


def _idle(session: Session, keys: BlockKeys, floor: EchoClient, rounds: int) -> tuple[list[float], list[float]]:
    lookups: list[float] = []
    echoes: list[float] = []
    look_up = lambda: _look_up(session, keys)  # noqa: E731
    time_each(look_up, WARM_UP)
    time_each(floor.ping, WARM_UP)
    for _ in range(rounds):
        lookups += time_each(look_up, 250)
        echoes += time_each(floor.ping, 250)
    return lookups, echoes


def _beside_load(
    daemon: BenchDaemon, session: Session, keys: BlockKeys, floor: EchoClient, seconds: float
) -> tuple[list[float], list[float], tuple[float, float]]:
    """Return the times of lookups and of echoes, and for how much of a second the control thread ran and waited."""
    with full_load(daemon.socket_dir, MIB):
        time_each(lambda: _look_up(session, keys), WARM_UP)
        before, control, started = _counters(daemon), daemon.control_run_and_wait_s(), time.perf_counter()
        lookups: list[float] = []
        echoes: list[float] = []
        while time.perf_counter() < started + seconds:
            lookups += time_each(lambda: _look_up(session, keys), 50)
            echoes += time_each(floor.ping, 25)
        elapsed_s, after = time.perf_counter() - started, _counters(daemon)
        ran_s, waited_s = (now - then for now, then in zip(daemon.control_run_and_wait_s(), control, strict=True))
    rates = {
        name: (after[name] - before[name]) / elapsed_s for name in ("stored_blocks", "acquired_blocks", "evictions")
    }
    progress("load: " + ", ".join(f"{rate:.0f} {name.replace('_', ' ')}/s" for name, rate in rates.items()))
    if rates["evictions"] < rates["stored_blocks"] / 2:
        raise RuntimeError(f"no eviction storm: {rates}")
    return lookups, echoes, (ran_s / elapsed_s, waited_s / elapsed_s)


def _look_up(session: Session, keys: BlockKeys) -> None:
    found = session.lookup(keys=keys)
    if found.blocks != KEYS:
        raise RuntimeError(f"{KEYS} blocks were stored and leased, the lookup found {found}")


def _counters(daemon: BenchDaemon) -> dict[str, int]:
    counters: dict[str, int] = dict(daemon.admin("Status", admin_pb2.StatusRequest()).counters)
    tiers = daemon.admin("Tiers", admin_pb2.TiersRequest()).tiers
    return {**counters, "evictions": next(tier.evicted_blocks for tier in tiers if tier.name == "host")}


@contextmanager
def full_load(socket_dir: Path, block_bytes: int, clients: int = 2) -> Iterator[None]:
    """`clients` processes put and get without pause while the context lasts. Raises RuntimeError if one has failed."""
    spawning = multiprocessing.get_context("spawn")
    stop = spawning.Event()
    going = [spawning.Event() for _ in range(clients)]
    children = [
        spawning.Process(target=_work, args=(socket_dir, block_bytes, number, going[number], stop), daemon=True)
        for number in range(clients)
    ]
    for child in children:
        child.start()
    try:
        if not all(event.wait(START_TIMEOUT_S) for event in going):
            raise RuntimeError("a load client did not get going")
        yield
        if not all(child.is_alive() for child in children):
            raise RuntimeError("a load client ended before the measurement did")
    finally:
        stop.set()
        for child in children:
            child.join(START_TIMEOUT_S)


def _work(socket_dir: Path, block_bytes: int, number: int, going: Event, stop: Event) -> None:
    data = payloads(BLOCKS_A_PUT, block_bytes)
    conversation = number
    fingerprint = model(block_bytes, f"load {number}")
    with kvstore_client.connect(socket_dir, fingerprint=fingerprint, required=True, deadline_s=10.0) as session:
        while not stop.is_set():
            tokens = tokens_of(conversation % 2000, BLOCKS_A_PUT)
            conversation += 1
            session.put(tokens, payloads=data)
            with session.get(tokens) as lease:
                lease.copy_into(data[: len(lease)])
            going.set()


if __name__ == "__main__":
    sys.exit(main(measure, __doc__))
