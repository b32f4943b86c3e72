"""Judges a crash state: opens the tier on it, recovers, reads everything, and compares it with the promises.

Owns the verdict. A judge is `judge(directory, promises) -> Verdict`; this one is for the workload of this package. What
must hold: every promised block is there with the right bytes; nothing freed for good is; every other block is whole or
absent (a record never names other bytes than its block's); never more bytes than the capacity; the tier takes and keeps
new blocks; a second recovery finds the same; after the close the walker finds nothing to complain about.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from kvstore_proto.arena import BlockHeader
from kvstore_tiers.base import OutcomeKind, Slot
from kvstore_tiers.nvme import NvmeTier
from kvstore_tiers.nvme.check import check_directory
from kvstore_tiers.segments import Bytes, segment_of
from kvstore_tiers.testing.made_up_codec import allow_made_up_codec
from kvstore_tiers.testing.powerloss.promises import Item, Promises
from kvstore_tiers.testing.transfers import block, block_with_pattern, finish, finish_all, put

CAPACITY_BYTES = 3 << 19
SLAB_BYTES = 256 << 10
PROBE_NUMBER = 1 << 30
PROBE_BYTES = 4096


@dataclass
class Verdict:
    """The faults of a tier that was opened after a power loss: promised blocks that are `lost`, blocks with `wrong`
    bytes, other rules that are `broken`, bytes over the capacity. `corrupt_reads` counts blocks that the tier itself
    refused to read, which is no fault.
    """

    lost: list[Item] = field(default_factory=list)  # promised, and not there or not whole
    wrong: list[str] = field(default_factory=list)  # bytes that were never written so, or that had been freed for good
    broken: list[str] = field(default_factory=list)  # any other rule
    over_capacity_bytes: int = 0
    corrupt_reads: int = 0

    @property
    def is_sound(self) -> bool:
        return not (self.lost or self.wrong or self.broken or self.over_capacity_bytes)


Judge = Callable[[Path, Promises], Verdict]


def open_tier(directory: Path, *, io_threads: int = 1) -> NvmeTier:
    """Open the NVMe tier of the power-loss workload in `directory`, with `io_threads` threads, and return it."""
    allow_made_up_codec()
    return NvmeTier.open(directory, CAPACITY_BYTES, slab_bytes=SLAB_BYTES, io_threads=io_threads)


def judge_tier(root: Path, promises: Promises) -> Verdict:
    """Open the tier in `root`/nvme, check that every promise in `promises` is kept and that the tier works, and return
    the faults.
    """
    directory, verdict = root / "nvme", Verdict()
    found = _examined(directory, promises, verdict)
    findings = check_directory(directory, capacity_bytes=CAPACITY_BYTES, verify_payloads=True)
    verdict.broken += [f"after recovery and close: {finding}" for finding in findings]
    with closing(open_tier(directory)) as tier:
        again = {_number(header) for _, header in tier.recover()}
        if again != found:
            verdict.broken.append(f"a second recovery differs: {sorted(again ^ found)}")
    return verdict


def _examined(directory: Path, promises: Promises, verdict: Verdict) -> set[int]:
    """Recover, read and judge every block, give up the corrupt ones, and store one more. Return the numbers of the
    blocks that stay.
    """
    with closing(open_tier(directory)) as tier:
        recovered = list(tier.recover())
        if len({header.key for _, header in recovered}) != len(recovered):
            verdict.wrong.append("one key was recovered twice")
        found = set()
        for number, is_whole, slot in _read_all(tier, recovered, verdict, promises.durable):
            if is_whole:
                found.add(number)
            else:
                tier.free(slot)
        verdict.lost += sorted(promises.durable - found, key=str)
        verdict.wrong += [f"block {item} had been freed for good" for item in sorted(promises.gone & found, key=str)]
        if tier.statistics().blocks != len(found):
            verdict.broken.append(f"{tier.statistics().blocks} blocks in the books, {len(found)} found")
        if PROBE_NUMBER not in found and put(tier, *_block(PROBE_NUMBER, PROBE_BYTES)) is not None:
            found.add(PROBE_NUMBER)
        synced = finish(tier.sync)
        if not synced.ok:
            verdict.broken.append(f"the recovered tier cannot sync: {synced.message}")
        verdict.over_capacity_bytes = max(0, tier.statistics().used_bytes - CAPACITY_BYTES)
    return found


def _read_all(
    tier: NvmeTier, recovered: list[tuple[Slot, BlockHeader]], verdict: Verdict, promised: set[Item]
) -> list[tuple[int, bool, Slot]]:
    """Return (number, whole, slot) of every recovered block; wrong bytes are added to the verdict."""
    copies = [np.zeros(header.payload_bytes, dtype=np.uint8) for _, header in recovered]
    outcomes = finish_all(
        [
            partial(tier.read, slot, header.key, [segment_of(copy)])
            for (slot, header), copy in zip(recovered, copies, strict=True)
        ]
    )
    read = []
    for (slot, header), copy, outcome in zip(recovered, copies, outcomes, strict=True):
        number = _number(header)
        if outcome.ok:
            expected, payload = _block(number, header.payload_bytes)
            same = np.array_equal(copy, payload) and outcome.header is not None
            if not same or (header.parent, header.depth, header.tenant) != (
                expected.parent, expected.depth, expected.tenant,
            ):  # fmt: skip
                verdict.wrong.append(f"block {number} has bytes that were never written")
        elif outcome.kind is OutcomeKind.CORRUPT:
            verdict.corrupt_reads += 1
            if number not in promised:
                verdict.broken.append(f"a record names block {number}, its slot holds something else")
        else:
            verdict.broken.append(f"block {number} cannot be read: {outcome.message}")
        read.append((number, outcome.ok, slot))
    return read


def _number(header: BlockHeader) -> int:
    return int.from_bytes(header.key, "big")


@lru_cache(maxsize=4096)
def _block(number: int, payload_bytes: int) -> tuple[BlockHeader, Bytes]:
    return block_with_pattern(number, payload_bytes) if is_encoded(number) else block(number, payload_bytes)


def is_encoded(number: int) -> bool:
    """Return True if the power-loss workload stores block `number` encoded by the codec for tests."""
    return number % 2 == 1
