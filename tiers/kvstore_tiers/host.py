"""The host tier: blocks in DRAM, in arenas that clients map read-only.

The module owns arenas and their capacity; `host_transfers` owns the copy threads. It does not know which client maps
what, nor leases. Capacity is hard and counts whole arenas (their free slots too, since touched memory stays touched)
and the daemon's `charge`s: staging, the ledger. Arenas of a process that has ended, whose descriptors were kept, can be
taken over (`adopt`, by way of `adoption`). Arenas are lent to tiers of device memory (`lend_to`), which copy from and
to them in place, and asked back before their memory is given back. A device registers all of an arena, which makes the
system provide its memory: so one is lent when all of it is in use or prefaulted, and nothing of it is inherited from
another arena any more. A payload that a client has written into its slot (`arena.writable_owner`) is stored by a
`write` whose only segment is the slot's own payload: nothing is copied, and its checksum identifies the block from then
on. Invariants: one owner and one slot size an arena; a container number is never reused; an arena is lent once, and its
memory is not given back before each borrower has returned it; no header in memory that clients can write is believed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from kvstore_proto.arena import ALIGNMENT_BYTES, BlockHeader
from kvstore_tiers.adoption import AdoptedArena, take_over
from kvstore_tiers.arena import Arena, ArenaHome, ArenaRecord, ArenaWitness, open_owner
from kvstore_tiers.arena_memory import ArenaMode
from kvstore_tiers.base import (
    UNCODED,
    Coding,
    Completion,
    ContainerReport,
    MemoryKind,
    Outcome,
    Segment,
    Slot,
    TierInfo,
    TierState,
    TierStatistics,
)
from kvstore_tiers.codecs import Codec, ShapeOf
from kvstore_tiers.containers import Containers, ContainerTier
from kvstore_tiers.counters import TransferCounters
from kvstore_tiers.host_transfers import HostTransfers, ImageRun, segment_of
from kvstore_tiers.image import aligned_down, require_slot_size
from kvstore_tiers.segments import Bytes

DEFAULT_ARENA_BYTES = 64 * 2**20
MAPPED_NAME = "host"


class Borrower(Protocol):
    """A tier that copies directly from and to memory of other tiers, which it maps. `Tier.share` explains the
    methods.
    """

    def share(self, descriptor: int, address: int, nbytes: int) -> int: ...

    def unshare(self, number: int, ended: Callable[[], None]) -> None: ...


class Lending:
    """A record of which arenas (pieces of shared DRAM) a host tier has lent to GPU tiers, which copy directly from and
    to them. Any thread may call `offer`; only the control thread calls the other methods."""

    def __init__(self) -> None:
        self._borrowers: list[Borrower] = []
        self._lent: dict[int, list[tuple[Borrower, int]]] = {}  # by arena: who has it, and under which number
        self._lock = threading.Lock()

    def begin(self, borrowers: Sequence[Borrower]) -> None:
        """Lend the arenas that `offer` gets from now on to the tiers `borrowers`."""
        self._borrowers = list(borrowers)

    def offer(self, arena: Arena) -> None:
        """Lend `arena` to all borrowers if all its memory is there and the arena is not lent yet."""
        if not self._borrowers or not arena.is_whole:
            return
        with self._lock:
            if arena.number not in self._lent:
                arena.loan.lend(len(self._borrowers))
                self._lent[arena.number] = [
                    (tier, tier.share(arena.fd, arena.address, arena.nbytes)) for tier in self._borrowers
                ]

    def withdraw(self, arena: Arena) -> None:
        """Ask the borrowers to return `arena`, in which no transfer may be under way. The call does not wait for
        them."""
        with self._lock:
            lent = self._lent.pop(arena.number, [])
        for tier, number in lent:
            tier.unshare(number, arena.loan.returned)


class SlowerMemory(NamedTuple):
    """The settings of a host tier whose memory clients do not map. If `numa_node` is 0 or more, all its memory comes
    from that NUMA node. `coding` is the form in which blocks are stored."""

    numa_node: int = -1
    coding: Coding = UNCODED


class HostTier(ContainerTier):
    """A tier that keeps blocks in `capacity_bytes` bytes of DRAM, in arenas (pieces of shared memory) of `arena_bytes`
    bytes. `copy_threads` threads copy blocks. Clients map the arenas of the tier called `MAPPED_NAME`, and of no other
    tier."""

    def __init__(
        self,
        capacity_bytes: int,
        *,
        arena_bytes: int = DEFAULT_ARENA_BYTES,
        mode: ArenaMode = "owned",
        copy_threads: int = 2,
        name: str = MAPPED_NAME,
        witness: ArenaWitness | None = None,
        first_number: int = 1,
        slower: SlowerMemory | None = None,
    ) -> None:
        slower = slower or SlowerMemory()
        arena_bytes, mapped = aligned_down(arena_bytes), name == MAPPED_NAME
        self.info = TierInfo(
            name, "shared" if mapped else "memory", MemoryKind.SYSTEM, is_mapped=mapped, container_bytes=arena_bytes,
            coding=slower.coding, dram_bytes=slower.coding.staging_bytes // 2,
        )  # fmt: skip
        self._numa_node = slower.numa_node
        self._refused = ""  # why the system gave no memory, the last time
        self._arena_bytes, self._mode = arena_bytes, mode
        self._arenas = self._containers = Containers[Arena](capacity_bytes)
        self.writable: set[int] = set()  # containers that clients may write to
        self._next_number, self._witness = first_number, witness
        self._lending = Lending()
        self._counters = TransferCounters()
        self._reshaping = threading.Lock()  # between the control thread and the one that prefaults
        self._transfers = HostTransfers(f"{name}-copy", copy_threads, self._counters, self._arenas.of)
        self._closed = False

    def allocate(self, nbytes: int, owner: str = "") -> Slot | None:
        return next(iter(self.allocate_run(1, nbytes, owner)), None)

    def allocate_run(self, most: int, nbytes: int, owner: str = "") -> list[Slot]:
        require_slot_size(nbytes)
        owner, found = open_owner(owner), list[Slot]()
        while len(found) < most and not self._closed:
            if (arena := self._arenas.with_room_for(nbytes, owner, lambda: self._arena_for(nbytes, owner))) is None:
                break
            try:
                found += arena.allocate_run(most - len(found))
            except OSError as error:  # a full tier, until slots of it are free again
                self._refused = f"the system gives no memory for a slot: {error}"
                break
            self._arenas.taken_from(arena)
            if not arena.has_room:
                self._lending.offer(arena)
        return found

    def free(self, slot: Slot) -> None:
        self._arenas.give_back(slot)

    def convertible(self, nbytes: int, owner: str = "") -> list[ContainerReport]:
        found = super().convertible(nbytes, owner)
        return [report for report in found if report.owner == owner or self._mode == "owned"]

    def charge(self, nbytes: int, label: str) -> bool:
        """Count `nbytes` of memory outside the arenas, under `label`, against the tier's capacity, and return True. If
        there is no room, empty arenas are given back first (20 ms for 64 MiB). Return False if that is not enough."""
        if self._closed:
            return False
        releasable = [arena for arena in self._arenas.empty.values() if arena.mode == "owned"]
        while self.used_bytes + nbytes > self.ceiling_bytes:
            if not releasable:
                return False
            self._release(releasable.pop())
        self._arenas.charges[label] += nbytes
        return True

    @property
    def charged_bytes(self) -> int:
        return self._arenas.charges.total()

    def take_empty(self) -> Callable[[], None] | None:
        """Remove an empty arena from the tier, and return a function that gives its memory back, on any thread: in 20
        ms for 64 MiB, and once GPU tiers have returned it. Return None if no arena is empty and not sealed."""
        arena = next((arena for arena in self._arenas.empty.values() if arena.mode == "owned"), None)
        if arena is None:
            return None
        with self._reshaping:
            self._drop(arena)

        def give_back() -> None:
            arena.loan.wait()
            arena.release()

        return give_back

    def lend_to(self, borrowers: Sequence[Borrower]) -> None:
        """Let the tiers `borrowers` copy directly from and to each arena, as soon as all memory of the arena is there.
        The borrowers must be closed before `leave` is called."""
        self._lending.begin(borrowers)
        for arena in self._arenas:
            self._lending.offer(arena)

    def view(self, slot: Slot) -> Bytes:
        """Return a writable array uint8[slot.nbytes] over header and payload of `slot`. The caller drops it before the
        slot is freed."""
        return self._arenas.of(slot).view(slot)

    def slot_segment(self, slot: Slot) -> Segment:
        return segment_of(self._arenas.of(slot), slot)

    def arena(self, container: int) -> Arena:
        """Return the arena with the number `container`. Raises KeyError if there is no such arena."""
        return self._arenas[container]

    def owner(self, container: int) -> str | None:
        """Return the owner of the arena with the number `container`; None if there is no such arena."""
        arena = self._arenas.get(container)
        return arena.owner if arena is not None else None

    def precreate(self, owner: str, nbytes: int) -> int:
        """Make empty arenas for `owner` until they have `nbytes` bytes together, or until no room is left. Return the
        bytes of the arenas that were made."""
        reserved_bytes = 0
        while reserved_bytes < nbytes:
            arena = self._fresh_arena(ALIGNMENT_BYTES, owner)
            if arena is None:
                break
            reserved_bytes += arena.nbytes
        return reserved_bytes

    @property
    def is_prefaulted(self) -> bool:
        """True if the system has provided the memory of all arenas."""
        return all(arena.populated_bytes == arena.nbytes for arena in self._arenas)

    def shut(self, owner: str) -> None:
        """Put no more blocks into the arenas that `owner` has now (`Arena.shut`), except sealed ones."""
        for arena in self._arenas:
            if arena.owner == owner and arena.mode == "owned":
                self._arenas.forget_room(arena)
                arena.shut()

    def prefault_slice(self, budget_bytes: int) -> tuple[int, int]:
        """Make the system provide up to `budget_bytes` of arena memory now, before puts need it. Return the bytes
        provided so far and the bytes of all arenas. One background thread at a time may call it."""
        with self._reshaping:
            for arena in list(self._arenas):
                if budget_bytes <= 0 or self.ceiling_bytes < self.capacity_bytes:
                    break  # under memory pressure nothing is touched ahead of need
                try:
                    budget_bytes -= arena.populate(budget_bytes)
                except OSError as error:
                    self._refused = f"the system gives no memory for an arena: {error}"
                    break
                self._lending.offer(arena)
            return sum(arena.populated_bytes for arena in self._arenas), sum(arena.nbytes for arena in self._arenas)

    def write(self, slot: Slot, header: BlockHeader, segments: Sequence[Segment], done: Completion) -> None:
        self._transfers.store(slot, header, segments, done)

    def write_many(self, images: ImageRun, done: Callable[[Sequence[Outcome]], None]) -> None:
        """Write the blocks of `images` as `write` does. `done` is called once, when all have ended, with the outcomes
        in the order of `images`, without headers. A small batch is written before this returns."""
        self._transfers.store_many(images, done)

    def read(self, slot: Slot, expect_key: bytes, segments: Sequence[Segment], done: Completion) -> None:
        self._transfers.load(slot, expect_key, segments, done)

    def encode(
        self, codec: Codec, shape_of: ShapeOf, source: Segment, expect_key: bytes, target: Segment, done: Completion
    ) -> None:
        """Write the slot image `source` in the form of `codec` to `target`, memory outside the slots. `source` must
        hold the block `expect_key`. It runs on a copy thread; `encode_image` describes the outcomes."""
        self._transfers.encode(codec, shape_of, source, expect_key, target, done)

    def move_in(self, slot: Slot, source: Segment, expect_key: bytes, done: Completion) -> None:
        self._transfers.move(source, slot, expect_key, done)

    def relocate(self, source: Slot, target: Slot, expect_key: bytes, done: Completion) -> None:
        self._transfers.move(self.slot_segment(source), target, expect_key, done)

    def verify(self, slot: Slot, expect_key: bytes, done: Completion) -> None:
        """Check that `slot` still contains the block with the key `expect_key` as it was stored. `done` gets DONE or
        CORRUPT. Nothing is copied, and the check is not counted as a transfer."""
        self._transfers.verify(slot, expect_key, done)

    def adopt(self, record: ArenaRecord, descriptor: int) -> AdoptedArena | None:
        """Take over an arena (shared memory cut into slots) of a process that has ended, with its blocks; `record`
        describes it and `descriptor` refers to it. Return None if there is no room. The caller closes the descriptor
        only after None, ForeignMemory or OSError."""
        if self._closed or self._mode != "owned" or self.used_bytes + record.nbytes > self.capacity_bytes:
            return None
        arena, found = take_over(record, descriptor, self._witness)
        self._list(arena)
        self._lending.offer(arena)
        self._next_number = max(self._next_number, arena.number + 1)
        return found

    def retire(self, slot: Slot) -> None:
        """Mark the block in `slot` as gone. Its bytes stay until `free`, but no later process takes it for a block."""
        self._arenas.of(slot).retire(slot)

    def leave(self) -> None:
        """Close the tier, and leave the arenas' memory to the other processes that have descriptors of it."""
        self._end(Arena.leave)

    @property
    def state(self) -> TierState:
        return TierState.CLOSED if self._closed else TierState.FULL if self._refused else TierState.OK

    def statistics(self) -> TierStatistics:
        blocks_bytes = self._arenas.blocks_bytes
        used_by = {"blocks": blocks_bytes, "free": self._arenas.nbytes - blocks_bytes}
        used_by.update({label: nbytes for label, nbytes in self._arenas.charges.items() if nbytes})
        blocks, used_bytes = self._arenas.blocks, self.used_bytes
        found = TierStatistics(
            self.state, self.capacity_bytes, used_bytes, blocks, used_by=used_by, message=self._refused
        )
        return self._counters.report(found)

    def close(self) -> None:
        self._end(Arena.release)

    def _end(self, part_with: Callable[[Arena], None]) -> None:
        if self._closed:
            return
        self._closed = True
        self._transfers.close()
        with self._reshaping:
            for arena in self._arenas:
                self._lending.withdraw(arena)
                part_with(arena)
            self._arenas.clear()
        self._arenas.charges.clear()

    def _arena_for(self, nbytes: int, owner: str) -> Arena | None:
        """Return an arena with room, in the order of falling preference: an empty one of this owner, new memory,
        another owner's empty one.
        """
        empty = [arena for arena in self._arenas.empty.values() if arena.nbytes >= nbytes]
        own = next((arena for arena in empty if arena.owner == owner), None)
        if own is not None:
            self._arenas.forget_room(own)
            own.shape(nbytes)
            return own
        arena = self._fresh_arena(nbytes, owner)
        if arena is None:
            donor = next((arena for arena in empty if arena.mode == "owned"), None)
            if donor is None or (arena := self._inherit(donor, owner)) is None:
                return None
        arena.shape(nbytes)
        return arena

    def _fresh_arena(self, at_least_bytes: int, owner: str) -> Arena | None:
        room_bytes = aligned_down(max(0, self.ceiling_bytes - self.used_bytes))
        nbytes = min(max(self._arena_bytes, at_least_bytes), room_bytes)
        return self._add(nbytes, owner) if nbytes >= at_least_bytes else None

    def _inherit(self, donor: Arena, owner: str) -> Arena | None:
        """Return a new arena in the place of an empty one of another owner, whose clients may still map the old one.
        None if the system gives none: then the old one stays.
        """
        with self._reshaping:
            arena = self._add(donor.nbytes, owner, donor)
            if arena is not None:
                self._drop(donor)
            return arena

    def _add(self, nbytes: int, owner: str, donor: Arena | None = None) -> Arena | None:
        """Return a new arena; None if the system has no memory or no descriptor left: that is a full tier, not a broken
        one.
        """
        try:
            arena = Arena(
                self._next_number, nbytes, owner, mode=self._mode, donor=donor, witness=self._witness,
                home=ArenaHome(numa_node=self._numa_node),
            )  # fmt: skip
        except OSError as error:
            self._refused = f"the system gives no memory for another arena: {error}"
            return None
        self._refused = ""
        self._next_number += 1
        self._list(arena)
        if self._witness is not None:
            self._witness.made(arena)
        return arena

    def _list(self, arena: Arena) -> None:
        self._arenas.add(arena)
        if arena.is_writable:
            self.writable.add(arena.number)

    def _release(self, arena: Arena) -> None:
        with self._reshaping:
            self._drop(arena)
            arena.release()

    def _drop(self, arena: Arena) -> None:
        self._arenas.remove(arena)
        self.writable.discard(arena.number)
        self._lending.withdraw(arena)
        if self._witness is not None:
            self._witness.given_up(arena.number)
