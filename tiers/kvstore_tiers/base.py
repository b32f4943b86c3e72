"""The contract of a tier: a place where blocks' bytes live.

A tier knows slots and bytes. The daemon knows what is worth keeping, which tenant owns a block and whether a client
reads it. A slot holds one block in the layout of kvstore_proto.arena (4096-byte header, then payload).

Obligations
- The caller allocates, writes once, then may read many times, then frees; it never frees a slot with a transfer in
  flight, and never writes a slot twice without freeing it.
- The implementation MUST keep `used_bytes <= capacity_bytes` at every instant, counting everything it holds (slots,
  quarantine, free space it cannot give back); MUST return None from `allocate` rather than exceed it; MUST make
  the outcome of every transfer available exactly once; MUST NOT report DONE for bytes that fail verification.
- `allocate`, `free`, `quarantine` and `statistics` are called from one control thread, never wait for a device, and
  take microseconds.
- `write`, `move_in` and `relocate` keep the bytes that they are given, of any codec; `read` and `move_out` give the
  payload as it was put, and a header that says so.
- Transfers return at once; their completion is called from a thread of the tier's own (from the caller's own only
  when the tier is closed already). A completion must be quick and must not raise.

`kvstore_tiers.testing` holds the suite that proves an implementation keeps its side."""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore_proto.arena import HEADER_BYTES, BlockHeader
from kvstore_tiers.codec_rates import CodecRates
from kvstore_tiers.image import FileImage, Slot, image_header, require_fits, stamp_header
from kvstore_tiers.outcomes import Completion, Outcome, OutcomeKind, RunCompletion, together
from kvstore_tiers.recovered import RecoveredBlocks, as_columns
from kvstore_tiers.segments import AlignedBuffer, MemoryKind, Segment

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})  # the medium works and is full
# Nothing can be written, for now or to this user; what is there may be read all the same.
CANNOT_WRITE = NO_ROOM | {errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM}
ERRORS_IN_A_ROW = 8  # failed reads or writes in a row after which the medium is at fault, not the block


__all__ = [
    "UNCODED",
    "Coding",
    "Completion",
    "ContainerReport",
    "FileImage",
    "Load",
    "MemoryKind",
    "Outcome",
    "OutcomeKind",
    "RunCompletion",
    "Segment",
    "Slot",
    "Tier",
    "TierInfo",
    "TierState",
    "TierStatistics",
    "require_fits",
]


Load = Callable[[FileImage, Completion], None]
Column = npt.NDArray[np.unsignedinteger]


@dataclass(frozen=True, slots=True)
class Coding:
    """The form in which a tier is given blocks: by the codec of this name, "none" for payloads as they are, "auto" for
    the one that `rates` say. `staging_bytes` of DRAM hold the blocks that are in that form and not yet stored, and
    those being turned back."""

    codec: str = "none"
    staging_bytes: int = 0
    rates: CodecRates = field(default_factory=CodecRates, compare=False, repr=False)

    @property
    def is_none(self) -> bool:
        return self.codec == "none"


UNCODED = Coding()


@dataclass(frozen=True, slots=True)
class TierInfo:
    """The abilities of a tier. `is_durable`: synced blocks outlive the process. `is_mapped`: clients map its memory.
    `is_exported`: clients may import its device memory to read it. `lends_files`: another tier may read its slots from
    their file (`lend`). `loads_files`: it can read from a lent file (`loader`). `shares_memory`: it copies directly
    from and to memory of other tiers (`share`). `coding`: blocks are converted to that form before they are moved
    there."""

    name: str
    kind: str  # shared | gpu | memory | nvme | keyed
    memory: MemoryKind
    is_durable: bool = False
    is_mapped: bool = False
    is_exported: bool = False
    container_bytes: int = 0  # of an arena or slab; 0 where room is not given out by containers
    dram_bytes: int = 0  # at most, of header pages and staging in DRAM; the mapped tier's capacity has room for them
    lends_files: bool = False
    loads_files: bool = False
    shares_memory: bool = False
    coding: Coding = UNCODED

    @property
    def is_in_memory(self) -> bool:
        """True if other tiers may read and fill its slots directly in this process's memory, by `slot_segment`."""
        return self.memory is MemoryKind.SYSTEM

    @property
    def is_memory(self) -> bool:
        """True if the tier is memory of this machine (DRAM or device memory), not files or a remote store."""
        return self.memory is not MemoryKind.FILE


class ContainerReport(NamedTuple):
    """Figures about one container of a tier (an arena or a slab file), which is cut into slots of `slot_bytes` bytes.
    While one of its slots is used, all slots belong to `owner`; it is "" in a tier that does not separate owners."""

    container: int
    owner: str
    nbytes: int
    slot_bytes: int
    slots: int
    used_slots: int


class TierState(Enum):
    OK = "ok"
    FULL = "full"  # the medium has no room although the capacity would allow it
    READ_ONLY = "read-only"  # writes fail, reads work
    FAILED = "failed"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """Figures about a tier at one moment. Counts are since it was opened. `used_by` splits `used_bytes` by purpose,
    such as "blocks", "free", "quarantine". `message` explains a `state` other than OK.
    """

    state: TierState
    capacity_bytes: int
    used_bytes: int
    blocks: int
    bytes_read: int = 0
    bytes_written: int = 0
    reads: int = 0
    writes: int = 0
    errors: int = 0
    corrupt: int = 0
    quarantined_slots: int = 0
    used_by: dict[str, int] = field(default_factory=dict)
    message: str = ""


class Tier(ABC):
    """A place that stores blocks in slots: DRAM, device memory, files or a remote store. The text of its module lists
    the duties of callers and of implementations.
    """

    info: TierInfo

    @abstractmethod
    def allocate(self, nbytes: int, owner: str = "") -> Slot | None:
        """Return a free slot of at least `nbytes` bytes, a multiple of 4096; None if the tier's capacity has no room.
        Slots of different `owner`s never share memory that clients map; tiers that are not mapped ignore `owner`.
        Raises ValueError for another size."""

    def allocate_run(self, most: int, nbytes: int, owner: str = "") -> list[Slot]:
        """Return up to `most` free slots of `nbytes` bytes, as `allocate` would return them one by one."""
        return list(islice(iter(partial(self.allocate, nbytes, owner), None), most))

    @abstractmethod
    def free(self, slot: Slot) -> None:
        """Give an allocated `slot` back to the tier. Raises RuntimeError when it is not allocated, which is an error in
        the caller.
        """

    def makes_room(self, container: int, nbytes: int, owner: str = "") -> bool:
        """Return True if `allocate(nbytes, owner)` succeeds once one slot of the container number `container` is freed.
        Return False if that container has slots of another size or owner, so that all its slots must be freed first."""
        return True

    def containers(self) -> list[ContainerReport]:
        """Return a report of each container; an empty list if the tier has no containers."""
        return []

    def convertible(self, nbytes: int, owner: str = "") -> list[ContainerReport]:
        """Return reports of the containers that are cut for another size or owner now, and that could serve
        `allocate(nbytes, owner)` once all their slots are free."""
        return []

    def set_aside(self, container: int) -> None:
        """Allocate no more slots in the container number `container` until `put_back` is called, because the caller is
        emptying it. Its slots can still be freed.
        """
        return

    def put_back(self, container: int) -> bool:
        """Allocate slots in the container number `container` again, after `set_aside`. Return True if no slot of it is
        used now, so that it can be cut for any size or owner.
        """
        return False

    @abstractmethod
    def write(self, slot: Slot, header: BlockHeader, segments: Sequence[Segment], done: Completion) -> None:
        """Store `header` and the bytes of all `segments` in order (`header.stored_bytes` bytes together) in the
        allocated `slot`. `done` later gets an outcome with the header as it was stored: with the slot's generation, and
        with a checksum, which is computed if `header.checksum` is 0. A tier that verifies writes reports CORRUPT if a
        given checksum is wrong. Raises RuntimeError if the lengths disagree or the bytes do not fit."""

    @abstractmethod
    def read(self, slot: Slot, expect_key: bytes, segments: Sequence[Segment], done: Completion) -> None:
        """Fill `segments` with the payload of the block in `slot`, whose key must be `expect_key`. Bytes of the
        segments beyond the payload stay unchanged or become zero. `done` gets DONE only after magic, key, generation
        and checksums were checked, and FAILED if the segments are too short. After CORRUPT (the block is damaged) and
        UNREADABLE (this build lacks its codec) the segments contain garbage."""

    def slot_segment(self, slot: Slot) -> Segment:
        """Return the memory of `slot` in this process, for another tier's `move_in` and `move_out`. Raises RuntimeError
        if the slot is not allocated or the tier is not memory of this process."""
        raise RuntimeError(f"the tier {self.info.name} is not in memory")

    def move_in(self, slot: Slot, source: Segment, expect_key: bytes, done: Completion) -> None:
        """Store a whole slot image (header page and payload) from `source`, which is memory of another tier, in `slot`,
        with the generation of `slot`. `done` gets CORRUPT if `source` does not contain the block with the key
        `expect_key`."""
        header = image_header(source, expect_key)
        if isinstance(header, str):
            done(Outcome(OutcomeKind.CORRUPT, message=header))
            return
        self.write(slot, header, [source.part(HEADER_BYTES, header.stored_bytes)], done)

    def move_out(self, slot: Slot, destination: Segment, expect_key: bytes, done: Completion) -> None:
        """Fill `destination` with the slot image (header page and payload) from `slot`, verified as in `read`. The
        header is written last, with `destination.generation`."""

        def stamp(outcome: Outcome) -> None:
            if outcome.header is not None and outcome.ok:
                stamp_header(destination, outcome.header)
            done(outcome)

        self.read(slot, expect_key, [destination.part(HEADER_BYTES, destination.nbytes - HEADER_BYTES)], stamp)

    def move_in_run(
        self, slots: Sequence[Slot], sources: Sequence[Segment], keys: Sequence[bytes], done: RunCompletion
    ) -> None:
        """Store slot images as `move_in` does for each. `done` is called once, with the outcomes in order."""
        together([partial(self.move_in, *each) for each in zip(slots, sources, keys, strict=True)], done)

    def move_out_run(
        self, slots: Sequence[Slot], destinations: Sequence[Segment], keys: Sequence[bytes], done: RunCompletion
    ) -> None:
        """Fill slot images as `move_out` does for each. `done` is called once, with the outcomes in order."""
        together([partial(self.move_out, *each) for each in zip(slots, destinations, keys, strict=True)], done)

    def lend(self, slot: Slot, load: Load, done: Completion) -> None:
        """Let another tier read the image in `slot` from its file. `load`, which the other tier's `loader` returned, is
        called once as `load(image, ended)` and closes the descriptor in `image`. `done` gets the outcome, which is
        counted like a `read`."""
        raise RuntimeError(f"the tier {self.info.name} lends no files")

    def loader(self, slot: Slot, expect_key: bytes) -> Load:
        """Return a function that stores the block with the key `expect_key` in `slot`, reading it from a file of
        another tier, which calls it in `lend`. Any thread may call the function. It writes the slot's generation, and
        closes the descriptor even after a failure. It reports CORRUPT if the file does not contain the whole block,
        FAILED with an `errno` if the file cannot be read, and FAILED without one for other causes."""
        raise RuntimeError(f"the tier {self.info.name} loads no files")

    def share(self, descriptor: int, address: int, nbytes: int) -> int:
        """Let transfers soon copy directly from and to memory of another tier: `nbytes` bytes of the memfd
        `descriptor`, mapped here at `address`. Return a number for `unshare`. The caller keeps the descriptor open
        until `unshare` has called `ended`. Any thread may call it."""
        raise RuntimeError(f"the tier {self.info.name} has no memory shared with it")

    def unshare(self, number: int, ended: Callable[[], None]) -> None:
        """Stop using the memory that `share` returned this `number` for, in which no transfer may be under way. The
        call returns at once. `ended` is called, perhaps on the caller's thread, when no process has the memory mapped
        for this tier, so that it may be freed."""
        raise RuntimeError(f"the tier {self.info.name} has no memory shared with it")

    def relocate(self, source: Slot, target: Slot, expect_key: bytes, done: Completion) -> None:
        """Copy the block with the key `expect_key` from the slot `source` of this tier to its slot `target`, and verify
        it as `read` does. `source` stays unchanged. In a durable tier the caller calls `sync` before, so that a later
        start can see which copy is newer, and again before it frees `source`.
        """
        buffer = AlignedBuffer(source.nbytes)

        def store(outcome: Outcome) -> None:
            if outcome.header is None or not outcome.ok:
                done(outcome)
            else:
                self.write(target, outcome.header, [buffer.segment(outcome.header.payload_bytes)], done)

        self.read(source, expect_key, [buffer.segment(buffer.nbytes)], store)

    def sync(self, done: Completion) -> None:
        """Make every write that was begun, and every slot that was freed, before this call durable. `done` is called
        after the completions of those writes; in a volatile tier at once, on the caller's thread.
        """
        done(Outcome(OutcomeKind.DONE))

    @property
    def keeps_recovered(self) -> bool:
        """True if the blocks that `recover` found are known to be on the medium. If False, none of them may be called
        durable until a `probe` or a `sync` succeeds.
        """
        return True

    def probe(self, done: Completion, *, thorough: bool = True) -> None:
        """Test whether the medium works, without touching a block; `done` gets DONE, or FAILED with the reason. With
        `thorough` the tier writes, syncs, reads and compares scratch bytes; if it had stopped because of failures, a
        success makes it work again. Otherwise it only checks that its directory or peer exists.
        """
        done(Outcome(OutcomeKind.DONE))

    def quarantine(self, slot: Slot, reason: str) -> None:
        """Take `slot`, whose block is corrupt for `reason`, out of use, and keep its bytes for an operator. If
        too many slots are kept already, the slot is freed.
        """
        self.free(slot)

    def quarantined(self) -> dict[Slot, str]:
        """Return the slots in quarantine with the reason of each. `free` ends a slot's quarantine."""
        return {}

    def explain_quarantined(self, reasons: Mapping[Slot, str]) -> None:  # noqa: B027  # optional
        """Set the `reasons` of slots in quarantine, as a former process knew them. Slots that are not in quarantine or
        have a reason already are left unchanged.
        """

    def describe_quarantined(self, slot: Slot) -> BlockHeader | None:
        """Return a header with the facts that are still known of the block in a quarantined `slot`, without token ids;
        None if nothing is known. It reads the medium and may wait.
        """
        return None

    def check_books(self) -> list[str]:
        """Return a sentence for each broken invariant of the tier's own records; an empty list if all hold."""
        return []

    def check_held(self, containers: Column, offsets: Column, generations: Column) -> list[str]:
        """Return a sentence for each slot that the caller holds and the tier does not know. Slot i is `containers[i]`,
        `offsets[i]` (bytes), `generations[i]`.
        """
        return []

    def publish_again(self, slot: Slot, header: BlockHeader) -> None:
        """Write a new record of the verified block in `slot` with the next `sync`, because the record on the medium is
        damaged or names another copy. `header` is the block's header."""
        return

    def location(self, slot: Slot) -> str:
        """Return the place of the bytes of the allocated `slot` in words for an operator: FILE:OFFSET if the tier has
        files. The slot may not be written yet.
        """
        return f"{self.info.name}:{slot.container}+{slot.offset}"

    def recover(self) -> Iterator[tuple[Slot, BlockHeader]]:
        """Yield the blocks that the tier has kept since the last process, each once, as an allocated slot and a header
        without token ids. A durable tier allocates slots only in containers that were recovered.
        """
        return iter(())

    def recover_columns(self) -> RecoveredBlocks:
        """Return the blocks that `recover` would yield as arrays, which is quicker for millions of blocks."""
        return as_columns(self.recover())

    @abstractmethod
    def statistics(self) -> TierStatistics: ...

    @property
    def state(self) -> TierState:
        """The state that `statistics` reports."""
        return self.statistics().state

    @abstractmethod
    def close(self) -> None:
        """Finish the transfers under way, then release memory and descriptors. A second call does nothing."""
