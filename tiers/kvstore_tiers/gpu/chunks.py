"""The slots of the tier: chunks of device memory, each cut into slots of one size for one owner.

Owns which chunks there are and which slots are out; used from the control thread alone. Never waits for the device: a
chunk counts against the capacity from the moment it is planned.
Invariants: chunks never exceed the capacity; a chunk's number is never reused; a slot's generation only grows; a chunk
that was another owner's is given back and not handed on, since an engine may still map it.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable

from kvstore_tiers.base import ContainerReport
from kvstore_tiers.slot import Slot


class Chunk:
    """`nbytes` for `owner`; `slot_bytes` is that of its slots until it is cut anew."""

    def __init__(self, number: int, nbytes: int, owner: str) -> None:
        self.number, self.nbytes, self.owner = number, nbytes, owner
        self.slot_bytes = self.used_slots = 0
        self._first_generation = 1
        self._generations, self._out = array("Q"), bytearray()
        self._returned: list[int] = []

    @property
    def slots(self) -> int:
        return self.nbytes // self.slot_bytes if self.slot_bytes else 0

    @property
    def has_room(self) -> bool:
        return self.used_slots < self.slots

    def shape(self, slot_bytes: int) -> None:
        """Cut an empty chunk into slots of another size."""
        self._first_generation = max(self._generations, default=self._first_generation - 1) + 1
        self.slot_bytes = slot_bytes
        self._generations = array("Q", [self._first_generation]) * self.slots
        self._out = bytearray(self.slots)
        self._returned = list(range(self.slots - 1, -1, -1))

    def allocate(self) -> Slot:
        index = self._returned.pop()
        self._out[index] = 1
        self.used_slots += 1
        return Slot(self.number, index * self.slot_bytes, self.slot_bytes, self._generations[index])

    def free(self, slot: Slot) -> None:
        self.require_out(slot)
        index = slot.offset // self.slot_bytes
        self._out[index] = 0
        self._generations[index] += 1
        self._returned.append(index)
        self.used_slots -= 1

    def require_out(self, slot: Slot) -> None:
        """Raise RuntimeError unless exactly this use of the slot is allocated."""
        index, misplaced = divmod(slot.offset, self.slot_bytes or 1)
        known = not misplaced and slot.nbytes == self.slot_bytes and index < len(self._out)
        if not known or not self._out[index] or self._generations[index] != slot.generation:
            raise RuntimeError(f"{slot} is not allocated")


class Chunks:
    """`make` and `drop` are called with a chunk that is to be made, and with the number of one to give back."""

    def __init__(
        self, capacity_bytes: int, chunk_bytes: int, make: Callable[[Chunk], None], drop: Callable[[int], None],
        first_number: int = 1,
    ) -> None:  # fmt: skip
        self.capacity_bytes, self.chunk_bytes = capacity_bytes, chunk_bytes
        self.may_grow = True
        self._make, self._drop = make, drop
        self._chunks: dict[int, Chunk] = {}
        self._with_room: defaultdict[tuple[str, int], list[Chunk]] = defaultdict(list)  # each chunk once
        self._aside: set[int] = set()
        self._refused: set[int] = set()
        self._next_number = first_number

    @property
    def used_bytes(self) -> int:
        return len(self._chunks) * self.chunk_bytes

    @property
    def blocks(self) -> int:
        return sum(chunk.used_slots for chunk in self._chunks.values())

    @property
    def blocks_bytes(self) -> int:
        return sum(chunk.used_slots * chunk.slot_bytes for chunk in self._chunks.values())

    def allocate(self, nbytes: int, owner: str) -> Slot | None:
        rooms = self._with_room[owner, nbytes]
        if not rooms:
            chunk = self._empty_for(nbytes, owner)
            if chunk is None:
                return None
            chunk.shape(nbytes)
            rooms.append(chunk)
        chunk = rooms[-1]
        slot = chunk.allocate()
        if not chunk.has_room:
            rooms.pop()
        return slot

    def free(self, slot: Slot) -> None:
        chunk = self.of(slot)
        had_room = chunk.has_room
        chunk.free(slot)
        if chunk.number in self._refused:
            if not chunk.used_slots:
                self._discard(chunk)
        elif not had_room and chunk.number not in self._aside:
            self._with_room[chunk.owner, chunk.slot_bytes].append(chunk)

    def of(self, slot: Slot) -> Chunk:
        """Raises RuntimeError for a slot that is not allocated."""
        chunk = self._chunks.get(slot.container)
        if chunk is None:
            raise RuntimeError(f"{slot} is in no chunk")
        chunk.require_out(slot)
        return chunk

    def owner(self, number: int) -> str | None:
        """Whose chunk that is; None where there is none."""
        chunk = self._chunks.get(number)
        return chunk.owner if chunk is not None else None

    def refuse(self, number: int) -> None:
        """The device has no memory for this chunk: hand out no slot of it, and forget it when it is empty."""
        chunk = self._chunks.get(number)
        if chunk is not None:
            self._refused.add(number)
            self._forget_room(chunk)
            if not chunk.used_slots:
                self._discard(chunk)

    def makes_room(self, number: int, nbytes: int, owner: str) -> bool:
        chunk = self._chunks[number]
        return (chunk.owner, chunk.slot_bytes) == (owner, nbytes) and number not in self._aside | self._refused

    def reports(self) -> list[ContainerReport]:
        return [
            ContainerReport(each.number, each.owner, each.nbytes, each.slot_bytes, each.slots, each.used_slots)
            for each in self._chunks.values()
        ]

    def convertible(self, nbytes: int, owner: str) -> list[ContainerReport]:
        unfit = self._aside | self._refused
        return [
            report
            for report in self.reports()
            if report.nbytes >= nbytes
            and report.container not in unfit
            and (report.owner, report.slot_bytes) != (owner, nbytes)
        ]

    def set_aside(self, number: int) -> None:
        self._aside.add(number)
        self._forget_room(self._chunks[number])

    def put_back(self, number: int) -> bool:
        self._aside.discard(number)
        chunk = self._chunks.get(number)
        if chunk is None:
            return False
        if chunk.has_room and number not in self._refused:
            self._with_room[chunk.owner, chunk.slot_bytes].append(chunk)
        return chunk.used_slots == 0

    def _empty_for(self, nbytes: int, owner: str) -> Chunk | None:
        """By falling cost: an empty chunk of this owner, new memory, new memory in place of another owner's."""
        if nbytes > self.chunk_bytes:
            return None
        unfit = self._aside | self._refused
        empty = [each for each in self._chunks.values() if not each.used_slots and each.number not in unfit]
        own = next((each for each in empty if each.owner == owner), None)
        if own is not None:
            self._forget_room(own)
            return own
        if self.used_bytes + self.chunk_bytes > self.capacity_bytes or not self.may_grow:
            if not empty:
                return None
            self._discard(empty[0])
        chunk = Chunk(self._next_number, self.chunk_bytes, owner)
        self._next_number += 1
        self._chunks[chunk.number] = chunk
        self._make(chunk)
        return chunk

    def _discard(self, chunk: Chunk) -> None:
        self._forget_room(chunk)
        self._refused.discard(chunk.number)
        del self._chunks[chunk.number]
        self._drop(chunk.number)

    def _forget_room(self, chunk: Chunk) -> None:
        rooms = self._with_room.get((chunk.owner, chunk.slot_bytes))
        if rooms and chunk in rooms:
            rooms.remove(chunk)
