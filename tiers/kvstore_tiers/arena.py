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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvstore_proto.arena import TOKEN_COUNT_OFFSET, TOKENS_OFFSET
from kvstore_tiers.arena_memory import ArenaMemory, ArenaMode, ForeignMemory, require_arena
from kvstore_tiers.base import Segment, Slot
from kvstore_tiers.image import erase_header, mark_retired
from kvstore_tiers.segments import Bytes, view_at

_WRITABLE = "+w"
_SHUT = "-"
_new_slot = tuple.__new__  # half the time of Slot's own


@dataclass(frozen=True, slots=True)
class ArenaRecord:
    """The facts about an arena (shared memory cut into slots) that are not in its bytes, and that a later process needs
    to take it over. `owner` is the tenant's digest in hex, `slot_bytes` the size of each slot, `handed_out` the number
    of slots that were ever in use, `high_generation` the highest generation of any slot.
    """

    number: int
    nbytes: int
    owner: str
    slot_bytes: int
    handed_out: int  # slots, counted from the front, that were ever in use since the arena was cut
    high_generation: int
    device: int = 0  # that has the blocks (`gpu.chunks`); 0 for DRAM


class ArenaWitness(Protocol):
    """A listener that is notified of each change of an arena (shared memory cut into slots), so that a later process
    can take the arena over. Its methods must be quick and must not raise.
    """

    def made(self, arena: Arena) -> None: ...

    def changed(self, arena: Arena) -> None:
        """Note a change of `arena`: it was cut into slots, one of its slots was used for the first time, or a slot
        reached a higher generation than any slot before.
        """
        ...

    def given_up(self, number: int) -> None:
        """Note that the tier no longer uses the arena `number`. Its memory is then freed, or it passes step by step to
        a new arena.
        """
        ...

    def released(self, number: int) -> None:
        """Note that all memory of the arena `number` was given back to the system. The thread that prefaults memory may
        make this call.
        """
        ...


class ChunkWitness(ArenaWitness, Protocol):
    """An arena witness that is also notified of chunks (pieces of device memory). The tier describes each chunk by an
    arena in DRAM, its shadow, which has the headers of the chunk's blocks.
    """

    def has_memory(self, number: int, descriptor: int) -> None:
        """Note that the device memory of chunk `number` exists now, before any block is in it. `descriptor` refers to
        that memory and stays the tier's to close. The call may come on any thread.
        """
        ...

    def worker_started(self, process: int) -> None:
        """Note that the tier has started a worker, with the process number `process`, that will write to arenas and
        chunks. A thread of the tier makes this call.
        """
        ...

    def worker_ended(self, process: int) -> None:
        """Note that the tier's worker with the process number `process` has ended. A thread of the tier makes this
        call.
        """
        ...


def writable_owner(owner: str) -> str:
    """Return the owner's name for arenas that clients of the tenant `owner` may write to: `owner` with a suffix."""
    return owner + _WRITABLE


def owners_of_places(owner: str) -> tuple[str, ...]:
    """Return the owners, in their names for arenas, whose arenas may take a block out of an arena of `owner`: itself,
    and for an arena that clients write to also the same tenant's arenas that they only read."""
    readable = owner.removesuffix(_WRITABLE)
    return (owner,) if readable == owner else (owner, readable)


def open_owner(owner: str) -> str:
    """Return the owner in the name that an arena has after `shut`; another name is returned as it is."""
    return owner.replace(_SHUT, "")


class ArenaHome(NamedTuple):
    """The place of an arena's memory (an arena is shared memory cut into slots). The memory is bound to the NUMA node
    `numa_node`, or to no node if that is -1. `device` is the identity of the device that has the blocks; 0 means DRAM.
    """

    numa_node: int = -1
    device: int = 0


class Arena(ArenaMemory):
    """A piece of shared memory of `nbytes` bytes that is cut into slots of one size, all for blocks of `owner`.
    `slot_bytes` is 0 until `shape` sets the size of the slots. The other parameters are explained at `ArenaMemory`.
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
        self._vouched: dict[int, bytes] = {}  # headers by offset, up to their token ids
        self.used_slots = 0
        self._witness = witness

    @classmethod
    def adopt(cls, record: ArenaRecord, descriptor: int, witness: ArenaWitness | None) -> Arena:
        """Return an arena over the memory that a process left when it ended; `record` describes it and `descriptor`
        refers to it. No slot is in use yet; the caller calls `occupy` next. The arena closes the descriptor later.
        Raises ForeignMemory if the descriptor is not of this arena, and OSError if it cannot be mapped; after an error
        the caller still has to close the descriptor.
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
        """Set which slots of an adopted arena are in use: `generations` has the generation of each used slot by its
        number. The other slots among the first `handed_out` become free. Their headers are erased, and their next
        generation is higher than any before.
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
                erase_header(self.address + index * self.slot_bytes)
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
        """Cut an arena that has no used slot into slots of `slot_bytes` bytes. The generations of the new slots are
        higher than all earlier ones.
        """
        assert self.used_slots == 0 and slot_bytes <= self.nbytes
        self._first_generation = max(self._generations, default=self._first_generation - 1) + 1
        self.slot_bytes = slot_bytes
        self._generations = array("Q")
        self._out = bytearray()
        self._returned = []
        if self._witness is not None:
            self._witness.changed(self)

    def allocate(self) -> Slot:
        """Take a free slot of this arena and return it. The caller has checked before that `has_room` is true."""
        return self.allocate_run(1)[0]

    def allocate_run(self, most: int) -> list[Slot]:
        """Take up to `most` free slots of this arena and return them. Raises OSError if the system refuses memory for
        the first of them."""
        taken = [self._returned.pop() for _ in range(min(most, len(self._returned)))]
        if len(taken) < most:
            try:
                taken += self._hand_out(most - len(taken))
            except OSError:
                if not taken:
                    raise
        number, size, generations, out = self.number, self.slot_bytes, self._generations, self._out
        for index in taken:
            out[index] = 1
        self.used_slots += len(taken)
        return [_new_slot(Slot, (number, index * size, size, generations[index])) for index in taken]

    def free(self, slot: Slot) -> None:
        """Make the allocated `slot` free. Its header is erased, and its next use will have a higher generation. Raises
        RuntimeError if it is not allocated.
        """
        self.require_out(slot)
        index = slot.offset // self.slot_bytes
        erase_header(self.address + slot.offset)
        self._vouched.pop(slot.offset, None)
        self._out[index] = 0
        self._generations[index] += 1
        self._returned.append(index)
        self.used_slots -= 1
        if self._generations[index] > self.high_generation:
            self._reached(self._generations[index])

    def retire(self, slot: Slot) -> None:
        """Mark the block in `slot` as gone in its header. Readers that have a lease may still read the payload, but a
        process that takes the arena over later does not keep this block. Raises RuntimeError if the slot is not
        allocated.
        """
        self.require_out(slot)
        mark_retired(self.segment(slot))

    def shut(self) -> None:
        """Give no more slots of this arena, since processes map it that may see no later block. Its
        blocks stay until they are evicted or moved; no later process takes it over."""
        name, writable, _ = open_owner(self.owner).partition(_WRITABLE)
        self.owner = name + _SHUT + writable
        if self._witness is not None:
            self._witness.given_up(self.number)

    def require_out(self, slot: Slot) -> None:
        """Raise RuntimeError unless `slot` is allocated in this arena in exactly its generation."""
        self.require_all_out((slot,))

    def require_all_out(self, slots: Sequence[Slot]) -> None:
        """Raise RuntimeError unless each of `slots` is allocated in this arena in exactly its generation."""
        size, out, generations, known = self.slot_bytes or 1, self._out, self._generations, len(self._out)
        for _, offset, nbytes, generation in slots:
            index = offset // size
            if not (
                nbytes == size
                and index < known
                and index * size == offset
                and out[index]
                and generations[index] == generation
            ):
                raise RuntimeError(f"no slot of {nbytes} bytes is allocated at {offset} in generation {generation}")

    def segment(self, slot: Slot) -> Segment:
        """Return the memory of `slot` in this process, its header and its payload."""
        vouched = self._vouched.get(slot.offset, b"") if self.is_writable else None
        return Segment(
            self.address + slot.offset, slot.nbytes, owner=self._mapping, generation=slot.generation, vouched=vouched
        )

    @property
    def is_writable(self) -> bool:
        """True if clients may map this arena's memory to write to it."""
        return self.owner.endswith(_WRITABLE)

    def vouch(self, slots: Sequence[Slot], headers: Bytes) -> None:
        """Remember that this process itself wrote `headers`, uint8[slots, 4096], to `slots`. A header that a client
        writes there later is then not believed. Nothing happens in an arena that clients cannot write. Any thread may
        call it.
        """
        if self.is_writable:
            counts = headers[:, TOKEN_COUNT_OFFSET : TOKEN_COUNT_OFFSET + 4].copy().view("<u4")
            width = TOKENS_OFFSET + 4 * int(counts.max())
            packed = headers[:, :width].tobytes()
            for at, (_, offset, _, _) in enumerate(slots):
                self._vouched[offset] = packed[at * width : (at + 1) * width]

    def view(self, slot: Slot) -> Bytes:
        """Return a writable array uint8[slot.nbytes] over the memory of `slot`. The caller drops it before the slot is
        freed.
        """
        return view_at(self.address + slot.offset, slot.nbytes)

    def writable_fd(self) -> int:
        """Return a new descriptor through which a client can map this arena to write to it; the caller closes it.
        Raises RuntimeError for an arena that clients must not write to.
        """
        if not self.is_writable or self.mode == "sealed":
            raise RuntimeError(f"arena {self.number} is not to be written by clients")
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)

    @property
    def is_whole(self) -> bool:
        """True if this arena no longer takes over memory of another arena step by step, and all its slots were used
        once or all its pages are prefaulted.
        """
        is_in_use = self.slot_bytes > 0 and len(self._generations) == self.slots
        return self._donor is None and (is_in_use or self.populated_bytes == self.nbytes)

    def _hand_out(self, most: int) -> range:
        """Return up to `most` of the next slots that were never in use since the arena was cut."""
        first = len(self._generations)
        fresh = range(first, min(first + most, self.slots))
        if not fresh:
            return fresh
        self._inherit(fresh.stop * self.slot_bytes)
        if self._first_generation > 1:  # cut before: bytes of an old payload must not pass for a header
            for index in fresh:
                erase_header(self.address + index * self.slot_bytes)
        self._generations.extend([self._first_generation] * len(fresh))
        self._out.extend(bytes(len(fresh)))
        self._reached(max(self.high_generation, self._first_generation))
        return fresh

    def _reached(self, generation: int) -> None:
        self.high_generation = generation
        if self._witness is not None:
            self._witness.changed(self)
