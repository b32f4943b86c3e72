"""A workload to be recorded: it fills, frees, reuses, quarantines, moves, reshapes and reopens an NVMe tier, and marks
what it was promised.

    python -m kvstore_tiers.testing.powerloss.workload ROOT --seed 1 --phase 0 --steps 60 --end crash

Owns the tier in ROOT/nvme for one phase; a phase begins with what the phase before left (`close`: an orderly end,
`crash`: the process is gone, its writes stay in the page cache, `unsynced`: the same in the midst of a commit) and may
end in the middle of recovery, by KVSTORED_FAILPOINTS.
Several writes and a sync are in flight at most times. Invariant: a mark is in the log before a block is put or freed,
and after it was promised.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from kvstore_proto.arena import slot_bytes
from kvstore_tiers import failpoints
from kvstore_tiers.base import Outcome, Slot
from kvstore_tiers.segments import AlignedBuffer
from kvstore_tiers.testing.made_up_codec import MadeUpCodec
from kvstore_tiers.testing.powerloss.judge import is_encoded, open_tier
from kvstore_tiers.testing.powerloss.record import Marker
from kvstore_tiers.testing.transfers import PATIENCE_S, as_it_is, block, block_with_pattern, encoded, finish

SHORTER_BYTES = 64 << 10
SIZES_BYTES = (4096, 5000, 20_000, 50_000)
NUMBERS_A_PHASE = 100_000
IN_FLIGHT = 6
RESHAPE_EVERY = 20  # steps
SWITCH_S = 2e-5  # threads change places often: more orders of calls


class Workload:
    """A random sequence of operations on the NVMe tier in `directory`, for a recording of power losses; `seed` and
    `phase` determine it. It writes to `marker` which blocks the tier has promised to keep. A block's bytes follow from
    its number and size.
    """

    def __init__(self, directory: Path, marker: Marker, seed: int, phase: int) -> None:
        self._random = random.Random(f"{seed}/{phase}")
        self._marker = marker
        self._tier = open_tier(directory, io_threads=3)
        self._slots: dict[int, Slot] = {
            int.from_bytes(header.key, "big"): slot for slot, header in self._tier.recover()
        }
        self._sizes: dict[int, int] = {}
        self._next_number = 1 + phase * NUMBERS_A_PHASE
        self._ended: SimpleQueue[tuple[str, int, Outcome]] = SimpleQueue()
        self._writing: dict[int, AlignedBuffer] = {}
        self._unpromised: dict[int, Slot] = {}  # whole, and no sync was asked for since
        self._lives: dict[int, int] = {}  # how often a number was put
        self._unburied: dict[int, int] = {}  # freed in that life, and no sync was asked for since
        self._syncs: dict[int, tuple[dict[int, Slot], dict[int, int]]] = {}
        self._sync_number = 0
        marker.mark(durable=sorted(self._slots))  # a daemon that finds a block answers that it is durable

    def run(self, steps: int) -> None:
        actions = [
            self._put,
            self._put,
            self._put,
            self._free_some,
            self._put_again,
            self._quarantine_one,
            self._relocate_some,
        ]
        for step in range(steps):
            if step % RESHAPE_EVERY == RESHAPE_EVERY - 1:
                self._reshape()
            else:
                self._random.choice(actions)()
            if self._random.random() < 0.4:
                self._sync()
            while len(self._writing) > IN_FLIGHT or len(self._syncs) > 2:
                self._take_one()
        self.settle()

    def settle(self) -> None:
        """Wait until no write or sync is under way, so that every written block is durable."""
        while self._writing:
            self._take_one()
        self._sync()
        while self._syncs:
            self._take_one()

    def die_unsynced(self) -> None:
        """Kill this process in the next commit, after its records are written and before they are synced."""
        self._put()
        while not self._writing:  # there was no room
            self._free_some()
            self.settle()
            self._put()
        while self._writing:
            self._take_one()
        failpoints.arm("nvme.after-records-write=kill")
        self._sync()
        self._take_one()

    def close(self) -> None:
        self._tier.close()

    def _put(self) -> None:
        for _ in range(self._random.randint(1, 4)):
            self._put_block(self._next_number, self._random.choice(SIZES_BYTES))
            self._next_number += 1

    def _put_again(self) -> None:
        """Put a block that was freed again, with the same key."""
        back = sorted(number for number in self._sizes.keys() - self._slots.keys())
        if back:
            number = self._random.choice(back[-20:])
            self._put_block(number, self._sizes[number])

    def _put_block(self, number: int, payload_bytes: int) -> bool:
        image = _image_of(number, payload_bytes)
        slot = self._tier.allocate(image.nbytes)
        if slot is None:
            if self._random.random() < 0.5:
                self._free_some()
            return False
        if self._random.random() < 0.05:  # a caller that changes its mind
            self._tier.free(slot)
            return False
        self._marker.mark(put=[number])
        self._slots[number], self._sizes[number], self._writing[number] = slot, payload_bytes, image
        self._lives[number] = self._lives.get(number, 0) + 1
        key = block(number, 0)[0].key
        self._tier.move_in(slot, image.segment(image.nbytes), key, partial(self._note, "write", number))
        return True

    def _free_some(self) -> None:
        idle = sorted(self._slots.keys() - self._writing.keys())
        self._free(self._random.sample(idle, min(len(idle), self._random.randint(1, 6))))

    def _free(self, numbers: list[int]) -> None:
        self._marker.mark(freed=numbers)
        for number in numbers:
            self._tier.free(self._slots.pop(number))
            self._unpromised.pop(number, None)
            self._unburied[number] = self._lives.get(number, 0)

    def _quarantine_one(self) -> None:
        idle = sorted(self._slots.keys() - self._writing.keys())
        if idle and self._random.random() < 0.3:
            number = self._random.choice(idle)
            self._marker.mark(freed=[number])
            self._tier.quarantine(self._slots.pop(number), "the workload says so")
            self._unpromised.pop(number, None)
            self._unburied[number] = self._lives.get(number, 0)
            kept = sorted(self._tier.quarantined(), key=lambda slot: (slot.container, slot.offset))
            if len(kept) > 2:
                self._tier.free(kept[0])

    def _relocate_some(self) -> None:
        """Move blocks to other slots, as when a slab is emptied: everything is synced first, and the old slots are
        freed after the next sync.
        """
        self.settle()
        left: list[Slot] = []
        for number in self._random.sample(sorted(self._slots), min(len(self._slots), self._random.randint(1, 4))):
            source = self._slots[number]
            target = self._tier.allocate(source.nbytes)
            if target is not None:
                key = block(number, 0)[0].key
                assert finish(partial(self._tier.relocate, source, target, key)).ok
                self._slots[number] = target
                left.append(source)
        assert finish(self._tier.sync).ok
        for slot in left:
            self._tier.free(slot)

    def _reshape(self) -> None:
        """Free all blocks of all sizes but one and give their room to that size: slabs change their slot size. Where
        less room than before may be used, one slab becomes shorter.
        """
        while self._writing:
            self._take_one()
        size = self._random.choice(SIZES_BYTES)
        self._free([number for number, slot in sorted(self._slots.items()) if slot.nbytes != slot_bytes(size)])
        for slot in self._tier.quarantined():
            self._tier.free(slot)
        if self._random.random() < 0.5:
            self._sync()
        if self._random.random() < 0.5:
            self._tier.set_ceiling(self._tier.used_bytes - SHORTER_BYTES)
        for _ in range(30):
            self._put_block(self._next_number, size)
            self._next_number += 1
        self._tier.set_ceiling(self._tier.capacity_bytes)

    def _sync(self) -> None:
        self._sync_number += 1
        self._syncs[self._sync_number] = (self._unpromised, self._unburied)
        self._unpromised, self._unburied = {}, {}
        self._tier.sync(partial(self._note, "sync", self._sync_number))

    def _note(self, what: str, number: int, outcome: Outcome) -> None:
        self._ended.put((what, number, outcome))

    def _take_one(self) -> None:
        what, number, outcome = self._ended.get(timeout=PATIENCE_S)
        assert outcome.ok, outcome
        if what == "write":
            del self._writing[number]
            self._unpromised[number] = self._slots[number]
            return
        blocks, buried = self._syncs.pop(number)
        durable = [number for number, slot in blocks.items() if self._slots.get(number) == slot]
        gone = [n for n, life in buried.items() if n not in self._slots and self._lives.get(n, 0) == life]
        self._marker.mark(durable=durable, gone=gone)


def _image_of(number: int, payload_bytes: int) -> AlignedBuffer:
    """Return the image that is stored: every other block in the form of a codec."""
    if is_encoded(number):
        return encoded(MadeUpCodec(), *block_with_pattern(number, payload_bytes))
    return as_it_is(*block(number, payload_bytes))


def main() -> None:
    parser = argparse.ArgumentParser(description="the workload of the power-loss replays, one phase of it")
    parser.add_argument("root", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--phase", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--end", choices=("close", "crash", "unsynced"), default="close")
    parser.add_argument("--only-recover", action="store_true", help="open, close; no marks")
    arguments = parser.parse_args()
    if arguments.only_recover:
        open_tier(arguments.root / "nvme").close()
        return
    sys.setswitchinterval(SWITCH_S)
    workload = Workload(arguments.root / "nvme", Marker.of_this_process(), arguments.seed, arguments.phase)
    workload.run(arguments.steps)
    if arguments.end == "unsynced":
        workload.die_unsynced()
    if arguments.end == "crash":
        os._exit(0)
    workload.close()


if __name__ == "__main__":
    main()
