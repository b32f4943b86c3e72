"""A child process that fills, reuses and reformats an NVMe tier until a failpoint kills it.

Run as `python -m tests.faults.nvme_writer DIR`, armed by KVSTORED_FAILPOINTS. Says on stdout, before and after the
fact, what its parent may count on: `durable N...` once a sync answered for these blocks, `freed N...` before they are
freed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kvstore_tiers.base import Slot
from kvstore_tiers.nvme import NvmeTier
from kvstore_tiers.testing import block, finish
from kvstore_tiers.testing.transfers import put

CAPACITY_BYTES = 3 << 20
SLAB_BYTES = 512 << 10
TINY_BYTES = 0
SMALL_BYTES = 4096
LARGE_BYTES = 50_000
SHORTER_BYTES = 64 << 10


ENCRYPTS = "KVSTORED_TEST_ENCRYPTS"


def open_tier(directory: str) -> NvmeTier:
    keys = None
    if os.environ.get(ENCRYPTS):
        from kvstored.clients.tenants.data_keys import DataKeyFile

        keys = DataKeyFile(Path(directory).parent, bytes(32), lambda digest: True)
    return NvmeTier.open(directory, CAPACITY_BYTES, slab_bytes=SLAB_BYTES, io_threads=2, keys=keys)


class Writer:
    """Puts numbered blocks and reports what became of them."""

    def __init__(self, tier: NvmeTier) -> None:
        self.tier = tier
        self.slots: dict[int, Slot] = {int.from_bytes(h.key, "big"): slot for slot, h in tier.recover()}
        self.next_number = max(self.slots, default=0) + 1
        self.unsynced: list[int] = []

    def put(self, payload_bytes: int) -> bool:
        number = self.next_number
        slot = put(self.tier, *block(number, payload_bytes))
        if slot is None:
            return False
        self.next_number += 1
        self.slots[number] = slot
        self.unsynced.append(number)
        return True

    def fill(self, payload_bytes: int) -> None:
        while self.put(payload_bytes):
            if len(self.unsynced) == 16:
                self.sync()
        self.sync()

    def free(self, numbers: list[int]) -> None:
        self.say("freed", numbers)
        for number in numbers:
            self.tier.free(self.slots.pop(number))
        self.unsynced = [number for number in self.unsynced if number not in numbers]

    def relocate(self, numbers: list[int]) -> None:
        """Copy blocks to other slots, and give the old ones up once the copies are durable."""
        left = {number: self.slots[number] for number in numbers}
        for number, source in left.items():
            target = self.tier.allocate(source.nbytes)
            assert target is not None
            key = number.to_bytes(16, "big")
            assert finish(lambda done: self.tier.relocate(source, target, key, done)).ok  # noqa: B023
            self.slots[number] = target
        self.sync()
        for source in left.values():
            self.tier.free(source)
        self.sync()

    def sync(self) -> None:
        assert finish(self.tier.sync).ok
        self.say("durable", self.unsynced)
        self.unsynced = []

    def say(self, what: str, numbers: list[int]) -> None:
        print(what, *numbers, flush=True)


def main(directory: str) -> None:
    writer = Writer(open_tier(directory))
    writer.fill(SMALL_BYTES)
    writer.free(sorted(writer.slots)[::2])  # freed and taken again before a sync: the old records must go first
    writer.fill(SMALL_BYTES)
    spoiled = min(writer.slots)
    writer.say("freed", [spoiled])
    writer.tier.quarantine(writer.slots.pop(spoiled), "to see it survive")
    writer.sync()
    writer.free(sorted(writer.slots))  # all slabs but the quarantined slot's become large ones
    writer.fill(LARGE_BYTES)
    writer.free(sorted(writer.slots)[:3])
    writer.fill(LARGE_BYTES)
    writer.free(sorted(writer.slots)[-4:])
    writer.relocate(sorted(writer.slots)[:4])
    writer.fill(LARGE_BYTES)  # where the relocated blocks were
    writer.free(sorted(writer.slots)[1:])
    writer.tier.set_ceiling(writer.tier.used_bytes - SHORTER_BYTES)
    writer.fill(TINY_BYTES)  # a slab gets shorter
    writer.tier.close()


if __name__ == "__main__":
    main(sys.argv[1])
