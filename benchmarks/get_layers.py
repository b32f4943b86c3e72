"""Measures when an engine may begin to compute a prefix that is on NVMe: with its layers in one group, and in four
ranges.

24 blocks of 4 MiB: 16 layers of 4 KiB a token (8 heads of 128, K and V, f16). One group: a get of the whole. Four
ranges (`LayerGroup.split`): the first is readable when a quarter of the bytes is there. Baseline: the get, interleaved.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from support.daemon import BLOCK_TOKENS, MIB, POLL_S, BenchDaemon, bench_daemon, payloads, tokens_of
from support.report import Row, main, median, progress, time_once

from kvstore_client import Fingerprint, LayerGroup, Session
from kvstore_proto.v1 import admin_pb2

BLOCKS, BLOCK_BYTES, LAYERS, RANGES = 24, 4 * MIB, 16, 4
SETTINGS = ("host.capacity=512MiB", "nvme.capacity=2GiB", "host.prefault_ahead=384MiB")
WHOLE = Fingerprint("benchmark", "one group", groups=(
    LayerGroup(0, "full", 0, tuple(range(LAYERS)), BLOCK_BYTES // BLOCK_TOKENS // LAYERS),
))  # fmt: skip
SPLIT = replace(WHOLE, weights_digest="ranges", groups=WHOLE.groups[0].split(RANGES))
TOKENS = tokens_of(1, BLOCKS)


def measure(quick: bool) -> list[Row]:
    whole_s: list[float] = []
    first_s: list[float] = []
    all_s: list[float] = []
    with bench_daemon(*SETTINGS) as daemon, daemon.connect(WHOLE) as whole, daemon.connect(SPLIT) as split:
        put_s = time_once(lambda: _store(whole)), time_once(lambda: _store(split))
        progress(f"put, durable: {put_s[0] * 1e3:.0f} ms in one group, {put_s[1] * 1e3:.0f} ms in {RANGES} ranges")
        for turn in range(4 if quick else 16):
            _empty_dram(daemon)
            seconds = time_once(lambda: _get(whole))
            _empty_dram(daemon)
            came = _get_layers(split)
            if turn:  # the first maps arenas
                whole_s.append(seconds)
                first_s.append(came[0])
                all_s.append(came[-1])
    baseline_ms = median(whole_s) * 1e3
    return [
        Row("get_layers_first_of_4_ranges", median(first_s) * 1e3, "ms", baseline_ms, "a get of the whole"),
        Row("get_layers_all_4_ranges", median(all_s) * 1e3, "ms", baseline_ms, "a get of the whole"),
    ]


def _store(session: Session) -> None:
    for group in session.fingerprint.groups:
        data = payloads(BLOCKS, session.fingerprint.payload_bytes(group.group_id))
        stored = session.put(
            TOKENS, payloads=data, group=group.group_id, wait="settled", durability="always", deadline_s=60.0
        )
        if stored.stored_blocks != BLOCKS:
            raise RuntimeError("the blocks were not stored")


def _empty_dram(daemon: BenchDaemon) -> None:
    """Leases are given back a few milliseconds after their end, and keep their blocks until then."""
    while daemon.admin("Drop", admin_pb2.DropRequest(tier="host")).kept_blocks:
        time.sleep(POLL_S)


def _get(session: Session) -> None:
    with session.get(TOKENS) as lease:
        assert lease.blocks == BLOCKS


def _get_layers(session: Session) -> list[float]:
    """Seconds after which each range was readable whole."""
    came: list[float] = []
    started = time.perf_counter()
    with session.get_layers(TOKENS) as streams:
        for stream in streams:
            assert sum(lease.blocks for _, lease in stream) == BLOCKS
            came.append(time.perf_counter() - started)
    return came


if __name__ == "__main__":
    sys.exit(main(measure, __doc__))
