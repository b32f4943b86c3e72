"""One arena of the host tier: shared memory, cut into slots of one size for one owner.

The module owns which slots are in use. It does not decide where a block goes (host.py) and does not copy payload;
`arena_memory` has the descriptor and the mapping. Clients map an arena whole, so one arena never serves two owners.

An arena of a `writable_owner` is handed out writable too, to clients that put blocks in place. Only bytes that this
process wrote are believed: the header of each block is kept here as well (`vouch`), with the payload's checksum.

Invariants: the number of an arena is never reused; slots are handed out for the first time in ascending order; a slot's
generation only grows, across changes of slot size and of the daemon too; among the slots handed out, exactly the ones
with a block have a valid header.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvstore_proto.arena import BlockHeader
from kvstore_tiers.arena_memory import ArenaMemory, ArenaMode, ForeignMemory, require_arena
from kvstore_tiers.base import Segment, Slot
from kvstore_tiers.image import erase_header, mark_retired
from kvstore_tiers.segments import Bytes, view_at

_WRITABLE = "+w"
_NO_BLOCK = BlockHeader(bytes(16), bytes(16), bytes(32), bytes(16), 0)


@dataclass(frozen=True, slots=True)
class ArenaRecord:
    """The facts about an arena, beyond its bytes, that a process needs to take it over from one that has ended."""

    number: int
    nbytes: int
    owner: str
    slot_bytes: int
    handed_out: int  # slots, counted from the front, that were ever in use since the arena was cut
    high_generation: int
    device: int = 0  # that has the blocks (`gpu.chunks`); 0 for DRAM


class ArenaWitness(Protocol):
    """A receiver of the facts that a later process must know of each arena. Raises nothing; quick."""

    def made(self, arena: Arena) -> None: ...

    def changed(self, arena: Arena) -> None:
        """Note that the arena was cut, or a slot of it was used for the first time or reached its highest
        generation.
        """
        ...

    def given_up(self, number: int) -> None:
        """Note that an arena is no longer the tier's; another arena inherits the rest of its memory, or that is freed
        at once.
        """
        ...

    def released(self, number: int) -> None:
        """Note that an arena's memory is given back. May be called on the thread that prefaults."""
        ...


class ChunkWitness(ArenaWitness, Protocol):
    """A witness that receives the shadow of each chunk of device memory too, and a descriptor of that memory."""

    def has_memory(self, number: int, descriptor: int) -> None:
        """Note that the chunk exists now, before any block is in it. The descriptor stays the tier's. May be called on
        another thread.
        """
        ...

    def worker_started(self, process: int) -> None:
        """Note that a process of the tier has begun, which will write to arenas and chunks. Called on a thread of the
        tier's.
        """
        ...

    def worker_ended(self, process: int) -> None:
        """Note that a process of the tier is gone. Called on a thread of the tier's."""
        ...


def writable_owner(owner: str) -> str:
    """Return the owner of the arenas that clients of `owner` may write."""
    return owner + _WRITABLE


class ArenaHome(NamedTuple):
    """The home of an arena. `numa_node`: the memory is bound to it, -1: to none. `device`: the device that has the
    blocks, 0 for DRAM.
    """

    numa_node: int = -1
    device: int = 0


class Arena(ArenaMemory):
    """An arena: `nbytes` of shared memory for `owner`, see `ArenaMemory`. `slot_bytes` is 0 until the first slot is
    asked for.
    """

    def __init__(
        self,
        number: int,
        nbytes: int,
        owner: str,
        *,
        mode: ArenaMode = "owned",
        donor: Arena | None = None,
        witness: ArenaWitness | None = None,
        descriptor: int = -1,
        home: ArenaHome | None = None,
    ) -> None:
        home = home or ArenaHome()
        super().__init__(
            number, nbytes, mode=mode, donor=donor, descriptor=descriptor, numa_node=home.numa_node,
            released=witness.released if witness is not None else None,
        )  # fmt: skip
        self.device = home.device
        self.owner = owner
        self.slot_bytes = 0
        self._generations = array("Q")
        self.high_generation = 0  # of all that slots ever had
        self._first_generation = 1
        self._out = bytearray()
        self._returned: list[int] = []
        self._vouched: dict[int, BlockHeader] = {}  # by offset
        self.used_slots = 0
        self._witness = witness

    @classmethod
    def adopt(cls, record: ArenaRecord, descriptor: int, witness: ArenaWitness | None) -> Arena:
        """Return the arena of a process that has ended, with no slot in use yet: call `occupy` next. Takes the
        descriptor.

        Raises ForeignMemory, and OSError if it cannot be mapped; the descriptor is the caller's then.
        """
        require_arena(descriptor, record.number, record.nbytes)
        if not 0 <= record.slot_bytes <= record.nbytes:
            raise ForeignMemory(f"its slots have {record.slot_bytes} bytes, and it has {record.nbytes}")
        arena = cls(
            record.number,
            record.nbytes,
            record.owner,
            witness=witness,
            descriptor=descriptor,
            home=ArenaHome(device=record.device),
        )
        arena.slot_bytes = record.slot_bytes
        arena.high_generation = record.high_generation
        return arena

    def occupy(self, generations: Mapping[int, int], handed_out: int) -> None:
        """Set which slots of an adopted arena are in use, and in which generation. All others that were ever handed out
        are free, without a header, and will have generations that no slot had before.
        """
        self.high_generation = max(self.high_generation, max(generations.values(), default=0))
        self._first_generation = self.high_generation + 1
        self._generations = array("Q", [self._first_generation]) * handed_out
        self._out = bytearray(handed_out)
        for index, generation in generations.items():
            self._generations[index] = generation
            self._out[index] = 1
        for index in range(handed_out - 1, -1, -1):
            if not self._out[index]:
                erase_header(Segment(self.address + index * self.slot_bytes, self.slot_bytes, owner=self._mapping))
                self._returned.append(index)
        self.used_slots = len(generations)
        if self._returned:  # the next process is to believe what is written into them
            self._reached(self._first_generation)

    @property
    def record(self) -> ArenaRecord:
        return ArenaRecord(
            self.number, self.nbytes, self.owner, self.slot_bytes, len(self._generations), self.high_generation,
            self.device,
        )  # fmt: skip

    @property
    def slots(self) -> int:
        return self.nbytes // self.slot_bytes if self.slot_bytes else 0

    @property
    def has_room(self) -> bool:
        return bool(self._returned) or len(self._generations) < self.slots

    def shape(self, slot_bytes: int) -> None:
        """Cut an empty arena into slots of another size."""
        assert self.used_slots == 0 and slot_bytes <= self.nbytes
        self._first_generation = max(self._generations, default=self._first_generation - 1) + 1
        self.slot_bytes = slot_bytes
        self._generations = array("Q")
        self._out = bytearray()
        self._returned = []
        if self._witness is not None:
            self._witness.changed(self)

    def allocate(self) -> Slot:
        """Return a free slot; the caller has checked `has_room`."""
        index = self._returned.pop() if self._returned else self._hand_out()
        self._out[index] = 1
        self.used_slots += 1
        return Slot(self.number, index * self.slot_bytes, self.slot_bytes, self._generations[index])

    def free(self, slot: Slot) -> None:
        """Take a slot back; its header is erased and its next use has a higher generation."""
        self.require_out(slot)
        index = slot.offset // self.slot_bytes
        erase_header(self.segment(slot))
        self._vouched.pop(slot.offset, None)
        self._out[index] = 0
        self._generations[index] += 1
        self._returned.append(index)
        self.used_slots -= 1
        if self._generations[index] > self.high_generation:
            self._reached(self._generations[index])

    def retire(self, slot: Slot) -> None:
        """Mark the block in a slot as gone while readers still look at it: a later process will not take it over."""
        self.require_out(slot)
        mark_retired(self.segment(slot))

    def require_out(self, slot: Slot) -> None:
        """Raise RuntimeError unless exactly this use of the slot is allocated."""
        index, misplaced = divmod(slot.offset, self.slot_bytes or 1)
        known = not misplaced and slot.nbytes == self.slot_bytes and index < len(self._out)
        if not known or not self._out[index] or self._generations[index] != slot.generation:
            raise RuntimeError(f"{slot} is not allocated")

    def segment(self, slot: Slot) -> Segment:
        """The slot's memory, header and payload, for direct I/O."""
        vouched = self._vouched.get(slot.offset, _NO_BLOCK) if self.is_writable else None
        return Segment(
            self.address + slot.offset, slot.nbytes, owner=self._mapping, generation=slot.generation, vouched=vouched
        )

    @property
    def is_writable(self) -> bool:
        """True if clients may write to it."""
        return self.owner.endswith(_WRITABLE)

    def vouch(self, slot: Slot, header: BlockHeader) -> None:
        """Remember that this process has written `header` to the slot, for a payload that has its checksum. May be
        called on the thread that wrote, before the outcome is delivered.
        """
        if self.is_writable:
            self._vouched[slot.offset] = header

    def view(self, slot: Slot) -> Bytes:
        """Return a writable uint8[slot.nbytes] over the slot. It must not outlive the slot."""
        return view_at(self.address + slot.offset, slot.nbytes)

    def writable_fd(self) -> int:
        """Return a new descriptor for a client that may write here; the caller closes it. Raises RuntimeError for an
        arena in which clients must not write.
        """
        if not self.is_writable or self.mode == "sealed":
            raise RuntimeError(f"arena {self.number} is not to be written by clients")
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)

    @property
    def is_whole(self) -> bool:
        """True if all of its memory is its own, and is there or will be at once."""
        is_in_use = self.slot_bytes > 0 and len(self._generations) == self.slots
        return self._donor is None and (is_in_use or self.populated_bytes == self.nbytes)

    def _hand_out(self) -> int:
        """Return the next slot that was never in use since the arena was cut."""
        index = len(self._generations)
        self._inherit((index + 1) * self.slot_bytes)
        if self._first_generation > 1:  # cut before: bytes of an old payload must not pass for a header
            erase_header(Segment(self.address + index * self.slot_bytes, self.slot_bytes, owner=self._mapping))
        self._generations.append(self._first_generation)
        self._out.append(0)
        self._reached(max(self.high_generation, self._first_generation))
        return index

    def _reached(self, generation: int) -> None:
        self.high_generation = generation
        if self._witness is not None:
            self._witness.changed(self)
