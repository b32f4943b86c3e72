"""Measures what it costs to ask where blocks are, by the lookup index in shared memory and by the stream.

Baseline of a probe: the lookup of the same keys in the same session, interleaved. A cold probe comes after this process
has streamed 32 MiB through its caches, as an engine does between two prompts. `contains` on a stopped daemon cannot be
answered by an index that was never handed over, and has to give up: the figure is what it takes beyond its deadline.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np
from support.daemon import MIB, BenchDaemon, bench_daemon, model, payloads, stopped, tokens_of
from support.report import AT_MOST, Row, main, median, percentile, progress, time_each, time_once, within

from kvstore_client import BlockKeys, Session

SMALL_BLOCK_BYTES = 4096
WARM_UP = 200
DEADLINE_S = 0.02
SETTINGS = ("host.capacity=160MiB", "host.arena=16MiB", "host.prefault_ahead=16MiB", "nvme.enabled=false")


def measure(quick: bool) -> list[Row]:
    rounds = 3 if quick else 12
    us = 1e6
    with bench_daemon(*SETTINGS) as daemon, daemon.connect(model(SMALL_BLOCK_BYTES), staging_bytes=MIB) as session:
        tokens = tokens_of(1, 64)
        session.put(tokens, payloads=payloads(64, SMALL_BLOCK_BYTES))
        keys = session.keys(tokens)
        assert keys is not None
        _wait_for_index(session, keys)
        probes_8, lookups_8 = _interleaved(session, keys[:8], rounds)
        probes_64, lookups_64 = _interleaved(session, keys, rounds)
        by_tokens = time_each(_checked(lambda: session.probe(tokens[: 8 * 64]).blocks, 8), 250 * rounds)
        cold = _cold(_checked(lambda: session.probe(keys=keys[:8]).blocks, 8), 10 * rounds)
        progress(f"probe of 8 blocks by their 512 token ids: p50 {median(by_tokens) * us:.1f} us")
        beyond = _beyond_the_deadline(daemon, keys, 20 if quick else 100)
    return [
        within("probe_8_p50", median(probes_8) * us, "us", 50.0),
        Row("probe_8_p99", percentile(probes_8, 99) * us, "us", percentile(lookups_8, 99) * us, "lookup p99"),
        Row("probe_8_cold_p50", median(cold) * us, "us", median(lookups_8) * us, "warm lookup"),
        Row("probe_8_vs_lookup", median(probes_8) * us, "us", median(lookups_8) * us, "lookup", AT_MOST, 0.2),
        Row("probe_64_vs_lookup", median(probes_64) * us, "us", median(lookups_64) * us, "lookup", AT_MOST, 0.5),
        Row("probe_64_p99", percentile(probes_64, 99) * us, "us", percentile(lookups_64, 99) * us, "lookup p99"),
        within("contains_stopped_beyond_deadline_p50", median(beyond) * 1e3, "ms", 1.0),
    ]


def _wait_for_index(session: Session, keys: BlockKeys) -> None:
    give_up = time.monotonic() + 5.0
    while session.probe(keys=keys).blocks != len(keys):
        if time.monotonic() > give_up:
            raise RuntimeError(f"no lookup index: {session.probe(keys=keys)}")
        time.sleep(0.001)


def _interleaved(session: Session, keys: BlockKeys, rounds: int) -> tuple[list[float], list[float]]:
    probe = _checked(lambda: session.probe(keys=keys).blocks, len(keys))
    look_up = _checked(lambda: session.lookup(keys=keys).blocks, len(keys))
    time_each(probe, WARM_UP)
    time_each(look_up, WARM_UP)
    probes: list[float] = []
    lookups: list[float] = []
    for _ in range(rounds):
        probes += time_each(probe, 250)
        lookups += time_each(look_up, 250)
    return probes, lookups


def _checked(ask: Callable[[], int], expected: int) -> Callable[[], None]:
    def action() -> None:
        found = ask()
        if found != expected:
            raise RuntimeError(f"{expected} blocks are stored, found {found}")

    return action


def _cold(action: Callable[[], None], times: int) -> list[float]:
    elsewhere = np.zeros(32 * MIB, np.uint8)
    seconds = []
    for _ in range(times):
        elsewhere += 1
        seconds.append(time_once(action))
    return seconds


def _beyond_the_deadline(daemon: BenchDaemon, keys: BlockKeys, times: int) -> list[float]:
    """A session without an index, opened before the daemon stops; it is degraded after a few timeouts, so one each."""
    beyond: list[float] = []
    for _ in range(times):
        with daemon.connect(model(SMALL_BLOCK_BYTES), staging_bytes=0) as session:
            session.lookup(keys=keys)
            with stopped(daemon.pid):
                started = time.perf_counter()
                answer = session.contains(keys=keys, deadline_s=DEADLINE_S)
                beyond.append(time.perf_counter() - started - DEADLINE_S)
            if answer is not None:
                raise RuntimeError(f"a stopped daemon answered: {answer}")
    return beyond


if __name__ == "__main__":
    sys.exit(main(measure, __doc__))
