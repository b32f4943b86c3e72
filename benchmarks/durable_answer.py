"""Measures how long an answer that blocks are durable takes, beyond what the disk takes.

Blocks are written to an NVMe tier, one or 64 at a time; then `sync` is timed. The baseline, in the same run and
directory, is what any answer has to wait for: two fdatasyncs of a file, one for the blocks' bytes and one for their
records, each after as many small writes. What is above it is our own: journal, records, hand-overs to and from the
thread that commits. Expected: the index costs nothing, since it comes behind the answer.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from support.report import Row, main, progress

from kvstore_proto.arena import slot_bytes
from kvstore_tiers.base import Completion
from kvstore_tiers.nvme import NvmeTier
from kvstore_tiers.segments import segment_of
from kvstore_tiers.testing.transfers import block, finish, finish_all

PAYLOAD_BYTES = 60_000
CAPACITY_BYTES = 1 << 30


def measure(quick: bool) -> list[Row]:
    rounds = 20 if quick else 100
    rows = []
    with tempfile.TemporaryDirectory(prefix="kvstored-durable-") as place:
        tier = NvmeTier.open(Path(place) / "nvme", CAPACITY_BYTES, slab_bytes=64 << 20)
        try:
            for blocks in (1, 64):
                progress(f"{blocks} blocks at a time")
                ours, floor = _interleaved(tier, Path(place) / "floor.bin", blocks, rounds)
                rows.append(
                    Row(f"durable answer, {blocks} blocks", ours * 1e3, "ms", floor * 1e3, "two fdatasyncs", target=2.5)
                )
        finally:
            tier.close()
    return rows


def _interleaved(tier: NvmeTier, floor: Path, blocks: int, rounds: int) -> tuple[float, float]:
    """Median seconds of a sync of `blocks` new blocks, and of the two fdatasyncs."""
    ours, theirs = [], []
    number = blocks * 1_000_000
    for at in range(rounds):
        starts: list[Callable[[Completion], None]] = []
        slots = []
        for _ in range(blocks):
            number += 1
            header, payload = block(number, PAYLOAD_BYTES)
            slot = tier.allocate(slot_bytes(PAYLOAD_BYTES))
            assert slot is not None
            slots.append(slot)
            starts.append(partial(tier.write, slot, header, [segment_of(payload)]))
        assert all(outcome.ok for outcome in finish_all(starts))
        began = time.perf_counter()
        assert finish(tier.sync).ok
        ours.append(time.perf_counter() - began)
        theirs.append(_two_syncs(floor, blocks, at))
        for slot in slots:
            tier.free(slot)
        assert finish(tier.sync).ok
    return statistics.median(ours), statistics.median(theirs)


def _two_syncs(path: Path, blocks: int, at: int) -> float:
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        page = np.full(4096, at % 251, np.uint8).tobytes()
        seconds = 0.0
        for half in range(2):
            for number in range(blocks):
                os.pwrite(file, page, (half * blocks + number) * 4096)
            began = time.perf_counter()
            os.fdatasync(file)
            seconds += time.perf_counter() - began
        return seconds
    finally:
        os.close(file)


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__))
