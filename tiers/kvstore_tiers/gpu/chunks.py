"""The slots of the tier: chunks of device memory, each cut into slots of one size for one owner.

The module owns which chunks there are and which slots are in use; only the control thread uses it. It never waits for
the device: a chunk counts against the capacity from the moment it is planned. Each chunk has a *shadow* in DRAM, an
arena of its size and number, in which only header pages are ever written: for each block on the device, its header page
is in the shadow, from the end of its write until its slot is freed. So the shadow says at once, and without the device,
which blocks there are, in this process and the next; and no engine can write it. Invariants: chunks never exceed the
capacity, nor their header pages `header_room`; a chunk's number is never reused; a slot's generation only grows; a
chunk that was another owner's is given back and not handed on, since an engine may still map it.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from kvstore_proto.arena import HEADER_BYTES
from kvstore_tiers.adoption import AdoptedArena, take_over
from kvstore_tiers.arena import Arena, ArenaHome, ArenaRecord, ArenaWitness
from kvstore_tiers.arena_memory import ForeignMemory
from kvstore_tiers.base import ContainerReport
from kvstore_tiers.containers import Containers
from kvstore_tiers.image import Slot

HEADERS_PART, SMALL_HEADERS_BYTES = 128, 2 << 20


def header_room(capacity_bytes: int) -> int:
    """Return the most bytes of DRAM that the header pages of a GPU tier of `capacity_bytes` may take (each slot has
    one, of 4096 bytes). That is enough for slots of 512 KiB and more; a small tier may have slots of any size.
    """
    return max(capacity_bytes // HEADERS_PART, min(capacity_bytes // 2, SMALL_HEADERS_BYTES))


class Chunks(Containers[Arena]):
    """The list of a GPU tier's chunks, which hands out their slots. A chunk is a piece of device memory that is cut
    into slots of one size for one owner; its shadow is an arena in DRAM with the headers of its blocks. `device` is the
    identity of the device. `make` is called with each new chunk, `drop` with the number of a chunk to free. `witness`
    is notified of changes to the shadows.
    """

    def __init__(
        self, capacity_bytes: int, chunk_bytes: int, device: int, make: Callable[[Arena], None],
        drop: Callable[[int], None], first_number: int = 1, witness: ArenaWitness | None = None,
    ) -> None:  # fmt: skip
        super().__init__(capacity_bytes)
        self.chunk_bytes = chunk_bytes
        self.may_grow = True
        self.lacks_headers = False  # blocks are so small that the header pages of more have no room
        self._device = device
        self._make, self._drop = make, drop
        self._witness = witness
        self._next_number = first_number

    @property
    def headers_bytes(self) -> int:
        """The bytes of DRAM that the header pages of this tier's slots take once every slot was used."""
        return sum(map(_headers_of, self))

    def allocate(self, nbytes: int, owner: str) -> Slot | None:
        return self.take(nbytes, owner, lambda: self._cut(nbytes, owner))

    def free(self, slot: Slot) -> None:
        chunk = self.give_back(slot)
        if chunk.number in self.barred and not chunk.used_slots:
            self._discard(chunk)

    def of(self, slot: Slot) -> Arena:
        """Return the shadow (the arena in DRAM with the block headers) of the chunk that contains `slot`. Raises
        RuntimeError if the slot is not allocated.
        """
        chunk = super().of(slot)
        chunk.require_out(slot)
        return chunk

    def adopt(self, record: ArenaRecord, shadow: int) -> AdoptedArena | None:
        """Take over a chunk of device memory that a process left when it ended: `record` describes it. The blocks whose
        headers are in the arena behind the descriptor `shadow`, which the caller closes, become slots in use. Return
        None if the capacity has no room. Raises ForeignMemory or OSError.
        """
        if record.device != self._device:
            raise ForeignMemory("it is memory of another device")
        if record.nbytes != self.chunk_bytes:
            raise ForeignMemory(f"it has {record.nbytes} bytes, and chunks have {self.chunk_bytes} now")
        if self.nbytes + record.nbytes > self.capacity_bytes:
            return None
        if record.slot_bytes and not self._has_headers_for(record.slot_bytes):
            raise ForeignMemory("its header pages have no room")
        descriptor = os.dup(shadow)
        try:
            chunk, found = take_over(record, descriptor, self._witness)
        except (ForeignMemory, OSError):
            os.close(descriptor)
            raise
        self.add(chunk)
        self._next_number = max(self._next_number, chunk.number + 1)
        return found

    def abandon(self, number: int) -> None:
        """Forget the chunk `number`, which was taken over from another process and has no slot in use."""
        self._discard(self[number])

    def leave(self) -> None:
        """Close this process's descriptors of the shadows (arenas in DRAM with block headers), and leave their memory
        to the other processes that have it open.
        """
        for chunk in self:
            chunk.leave()

    def refuse(self, number: int) -> None:
        """Note that the device has no memory for the chunk `number`. None of its slots is handed out any more, and the
        chunk is forgotten once no slot of it is in use.
        """
        chunk = self.get(number)
        if chunk is not None:
            self.bar(chunk)
            if not chunk.used_slots:
                self._discard(chunk)

    def convertible(self, nbytes: int, owner: str) -> list[ContainerReport]:
        found = super().convertible(nbytes, owner)
        return [each for each in found if self._headers_fit(nbytes, in_place_of=self[each.container])]

    def _cut(self, nbytes: int, owner: str) -> Arena | None:
        chunk = self._empty_for(nbytes, owner)
        if chunk is not None:
            if chunk.slot_bytes:
                chunk.punch(0, chunk.nbytes)
            chunk.shape(nbytes)
        return chunk

    def _empty_for(self, nbytes: int, owner: str) -> Arena | None:
        """Return a chunk, in the order of falling preference: an empty chunk of this owner, new memory, new memory in
        place of another owner's.
        """
        if nbytes > self.chunk_bytes:
            return None
        empty = self.empty.values()
        own = next((each for each in empty if each.owner == owner), None)
        if own is not None:
            if not self._has_headers_for(nbytes, in_place_of=own):
                return None
            self.forget_room(own)
            return own
        is_full = self.nbytes + self.chunk_bytes > self.capacity_bytes or not self.may_grow
        self.lacks_headers = False
        if is_full or not self._has_headers_for(nbytes):
            other = next((each for each in empty if self._has_headers_for(nbytes, in_place_of=each)), None)
            if other is None:
                return None
            self._discard(other)
        try:
            chunk = Arena(
                self._next_number, self.chunk_bytes, owner, witness=self._witness, home=ArenaHome(device=self._device)
            )
        except OSError:  # no descriptor or mapping is left: as a full device
            return None
        self._next_number += 1
        self.add(chunk)
        if self._witness is not None:
            self._witness.made(chunk)
        self._make(chunk)
        return chunk

    def _has_headers_for(self, slot_bytes: int, in_place_of: Arena | None = None) -> bool:
        """Return whether a chunk may be cut into slots of this size; if not, `lacks_headers` says so from then on."""
        self.lacks_headers = not self._headers_fit(slot_bytes, in_place_of)
        return not self.lacks_headers

    def _headers_fit(self, slot_bytes: int, in_place_of: Arena | None = None) -> bool:
        others_bytes = self.headers_bytes - (_headers_of(in_place_of) if in_place_of is not None else 0)
        needed_bytes = self.chunk_bytes // slot_bytes * HEADER_BYTES
        return others_bytes + needed_bytes <= header_room(self.capacity_bytes)

    def _discard(self, chunk: Arena) -> None:
        self.remove(chunk)
        if self._witness is not None:
            self._witness.given_up(chunk.number)
        chunk.release()  # first: the memory that it names is not there any more
        self._drop(chunk.number)


def _headers_of(chunk: Arena) -> int:
    return chunk.slots * HEADER_BYTES
