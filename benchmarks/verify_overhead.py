"""What does verifying every block cost an NVMe read? The same reads with and without checksums, interleaved.

The tier has no way to read without verifying, so the side without is made here, by patching this process: header judged
by nothing, payload checksum not computed. Both read the same slots of the same files into the same arenas, one round
each in turn, in changing order, so that a shared disk's moods fall on both; the medians of the rounds are compared.
Target: reads with verification reach at least 0.95 of the throughput of reads without.

Also reported: the same from a tmpfs instead of the disk, where reads do not wait and the checksum is the whole
difference. It has no target: no disk is that fast.

    python benchmarks/verify_overhead.py [--json] [--quick]
"""

from __future__ import annotations

import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

from support.report import AT_LEAST, Row, main

from kvstore_proto.arena import BlockHeader, slot_bytes
from kvstore_tiers.base import Slot
from kvstore_tiers.host import HostTier
from kvstore_tiers.nvme import NvmeTier
from kvstore_tiers.nvme.slot_transfers import ImageRead
from kvstore_tiers.segments import segment_of
from kvstore_tiers.testing import block, finish_all

KIB, MIB = 1 << 10, 1 << 20
SIZES = (256 * KIB, MIB, 4 * MIB)
SHARE = 0.95  # of the throughput without verification
ROUNDS, QUICK_ROUNDS = 24, 6
ROUND_BYTES = 256 * MIB
WARM_UP_ROUNDS = 2


class Reads:
    """Blocks of one size in slabs, and host slots to read them into."""

    def __init__(self, directory: Path, payload_bytes: int) -> None:
        self.payload_bytes = payload_bytes
        count = ROUND_BYTES // payload_bytes
        room = count * (slot_bytes(payload_bytes) + 64 * KIB) + 64 * MIB
        self.host = HostTier(room)
        self.nvme = NvmeTier.open(directory / f"tier-{payload_bytes}", room)
        self.header, payload = block(1, payload_bytes)
        slots = [(self._slot(self.nvme), self._slot(self.host)) for _ in range(count)]
        self._moves = [(place, self.host.slot_segment(image)) for place, image in slots]
        writes = [partial(self.nvme.write, place, self.header, [segment_of(payload)]) for place, _ in slots]
        for outcome in finish_all(writes):
            if not outcome.ok:
                raise SystemExit(f"a write failed: {outcome.message}")

    def bytes_per_s(self) -> float:
        starts = [partial(self.nvme.move_out, place, memory, self.header.key) for place, memory in self._moves]
        started = time.perf_counter()
        outcomes = finish_all(starts)
        elapsed_s = time.perf_counter() - started
        failed = [outcome for outcome in outcomes if not outcome.ok]
        if failed:
            raise SystemExit(f"a read failed: {failed[0].message}")
        return len(starts) * self.payload_bytes / elapsed_s

    def close(self) -> None:
        self.nvme.close()
        self.host.close()

    def _slot(self, tier: HostTier | NvmeTier) -> Slot:
        slot = tier.allocate(slot_bytes(self.payload_bytes))
        assert slot is not None
        return slot


@contextmanager
def unverified(reads: Reads) -> Iterator[None]:
    """Reads of this process trust what they get: the header is taken as written, the payload's checksum as right."""
    trusted = replace(reads.header, payload_bytes=reads.payload_bytes, checksum=1)

    def trust(raw: bytes, expect_key: bytes, room_bytes: int, generation: int | None = None) -> BlockHeader:
        return trusted

    with ExitStack() as patches:
        patches.enter_context(mock.patch("kvstore_tiers.nvme.slot_transfers.judge_header", trust))
        patches.enter_context(mock.patch.object(ImageRead, "checksum", lambda image: 1))
        yield


def compare(directory: Path, payload_bytes: int, rounds: int) -> tuple[float, float]:
    """Bytes a second, (verified, not verified): the medians of `rounds` of each."""
    reads = Reads(directory, payload_bytes)
    found: dict[bool, list[float]] = {True: [], False: []}
    try:
        for number in range(-WARM_UP_ROUNDS, rounds):
            for verified in (True, False) if number % 2 else (False, True):
                gc.collect()
                if verified:
                    speed = reads.bytes_per_s()
                else:
                    with unverified(reads):
                        speed = reads.bytes_per_s()
                if number >= 0:
                    found[verified].append(speed)
    finally:
        reads.close()
    return statistics.median(found[True]), statistics.median(found[False])


def measure(quick: bool) -> Sequence[Row]:
    rows = []
    rounds = QUICK_ROUNDS if quick else ROUNDS
    for where, parent, target in (("disk", None, SHARE), ("tmpfs", "/dev/shm", None)):
        if parent is not None and not Path(parent).is_dir():
            continue
        with tempfile.TemporaryDirectory(prefix="verify-overhead-", dir=parent) as directory:
            for payload_bytes in SIZES:
                verified, trusting = compare(Path(directory), payload_bytes, rounds)
                size = f"{payload_bytes // KIB}kib" if payload_bytes < MIB else f"{payload_bytes // MIB}mib"
                rows.append(
                    Row(
                        f"verified_read_{where}_{size}",
                        verified / 1e6,
                        "MB/s",
                        trusting / 1e6,
                        "the same reads, not verified",
                        AT_LEAST,
                        target,
                    )
                )
    return rows


if __name__ == "__main__":
    sys.exit(main(measure, __doc__ or ""))
