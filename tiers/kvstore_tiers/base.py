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

import numpy as np
import numpy.typing as npt

from kvstore_proto.arena import HEADER_BYTES, BlockHeader
from kvstore_tiers.codec_rates import CodecRates
from kvstore_tiers.image import FileImage, Slot, image_header, stamp_header
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
    "Segment",
    "Slot",
    "Tier",
    "TierInfo",
    "TierState",
    "TierStatistics",
    "require_fits",
]


class OutcomeKind(Enum):
    DONE = "done"
    CORRUPT = "corrupt"  # bytes came back and are wrong: quarantine
    MISSING = "missing"  # the tier has forgotten the block, as one that is addressed by key may
    UNREADABLE = "unreadable"  # the bytes are as they were stored, and this build does not have their codec
    FAILED = "failed"  # the medium refused: retry or shed the tier
    CANCELLED = "cancelled"  # closed before it ran


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a transfer. `header` is the verified header after a successful read or write."""

    kind: OutcomeKind
    header: BlockHeader | None = None
    nbytes: int = 0
    message: str = ""
    errno: int = 0

    @property
    def ok(self) -> bool:
        return self.kind is OutcomeKind.DONE


Completion = Callable[[Outcome], None]
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
    """The abilities of a tier. `is_durable`: what was synced outlives the process, and is never forgotten. `is_mapped`:
    clients map its memory, so puts are stored there and leases are given on it. `is_exported`: clients that asked for
    device memory may import its containers, to read. `lends_files`: another tier may read its slots from their file
    (`lend`); `loads_files`: it can (`loader`). `shares_memory`: it copies from and to memory of other tiers in place
    that is shared with it (`share`). `coding`: who moves a block there gives it that form first."""

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
        """True if another tier may read and fill its slots in place, by `slot_segment`."""
        return self.memory is MemoryKind.SYSTEM

    @property
    def is_memory(self) -> bool:
        """True if it is memory of this machine, from which a block comes faster than from any medium."""
        return self.memory is not MemoryKind.FILE


@dataclass(frozen=True, slots=True)
class ContainerReport:
    """One arena or slab: it holds slots of `slot_bytes` for `owner` until it is empty. `owner` is "" if a tier does not
    separate owners."""

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
    """The figures of a tier at one moment. `used_by` splits `used_bytes` by holder (blocks, free, quarantine...)."""

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


def require_fits(slot: Slot, header: BlockHeader, segments: Sequence[Segment]) -> None:
    """Raise RuntimeError when what a write stores is not what its header says or does not fit its slot."""
    given_bytes = sum(segment.nbytes for segment in segments)
    if given_bytes != header.stored_bytes:
        raise RuntimeError(f"the header says {header.stored_bytes} stored bytes, the segments hold {given_bytes}")
    if HEADER_BYTES + given_bytes > slot.nbytes:
        raise RuntimeError(f"{given_bytes} stored bytes and a header do not fit a slot of {slot.nbytes}")


class Tier(ABC):
    """A place for blocks; the module has the obligations of both sides."""

    info: TierInfo

    @abstractmethod
    def allocate(self, nbytes: int, owner: str = "") -> Slot | None:
        """Return a slot of at least `nbytes` (a multiple of 4096), or None if there is no room within the capacity.

        `owner` separates memory that may be mapped by different tenants; tiers that are never mapped ignore it. Raises
        ValueError for a size that is not a positive multiple of 4096."""

    @abstractmethod
    def free(self, slot: Slot) -> None:
        """Give a slot back. Raises RuntimeError when it is not allocated (a broken invariant, not a result)."""

    def makes_room(self, container: int, nbytes: int, owner: str = "") -> bool:
        """Return whether freeing a slot of `container` helps `allocate(nbytes, owner)`. False if it holds slots of
        another size or owner: then the whole container has to be emptied."""
        return True

    def containers(self) -> list[ContainerReport]:
        """Return all containers; an empty list if room is not given out by containers."""
        return []

    def convertible(self, nbytes: int, owner: str = "") -> list[ContainerReport]:
        """Return the containers of another size or owner that could serve `allocate(nbytes, owner)` once they are
        empty."""
        return []

    def set_aside(self, container: int) -> None:
        """Hand out no slot of this container until `put_back`: the caller is emptying it. Slots of it can be freed."""
        return

    def put_back(self, container: int) -> bool:
        """End `set_aside`; return whether the container is empty now, and so open to any size or owner."""
        return False

    @abstractmethod
    def write(self, slot: Slot, header: BlockHeader, segments: Sequence[Segment], done: Completion) -> None:
        """Store bytes (the concatenation of `segments`, `header.stored_bytes` long) and header in `slot`.

        `done` gets the header as stored, with the payload's checksum (computed from the stored copy when
        `header.checksum` is 0, else taken as given) and the slot's generation. A tier that verifies what it stored says
        CORRUPT where a given checksum does not hold.
        Raises RuntimeError when lengths disagree or the bytes do not fit."""

    @abstractmethod
    def read(self, slot: Slot, expect_key: bytes, segments: Sequence[Segment], done: Completion) -> None:
        """Fill `segments` with the payload of the block in `slot`; bytes of them beyond it are unchanged or zeroed.

        Magic, key, generation and checksums are checked before DONE is reported; CORRUPT says that the destination
        holds garbage, UNREADABLE that it does and that nothing is wrong with the block. Segments shorter than the
        payload end in FAILED."""

    def slot_segment(self, slot: Slot) -> Segment:
        """Return the slot's memory, for another tier's `move_in` and `move_out`. Raises RuntimeError if the slot is not
        allocated, and in a tier that is not in this process's memory."""
        raise RuntimeError(f"the tier {self.info.name} is not in memory")

    def move_in(self, slot: Slot, source: Segment, expect_key: bytes, done: Completion) -> None:
        """Store a whole slot image (header and payload) from another tier's memory.

        The header is stored with this slot's generation. CORRUPT if `source` does not hold the block `expect_key`."""
        header = image_header(source, expect_key)
        if isinstance(header, str):
            done(Outcome(OutcomeKind.CORRUPT, message=header))
            return
        self.write(slot, header, [source.part(HEADER_BYTES, header.stored_bytes)], done)

    def move_out(self, slot: Slot, destination: Segment, expect_key: bytes, done: Completion) -> None:
        """Fill `destination` with the slot image, verified as in `read`; its header is written last and carries
        `destination.generation`."""

        def stamp(outcome: Outcome) -> None:
            if outcome.header is not None and outcome.ok:
                stamp_header(destination, outcome.header)
            done(outcome)

        self.read(slot, expect_key, [destination.part(HEADER_BYTES, destination.nbytes - HEADER_BYTES)], stamp)

    def lend(self, slot: Slot, load: Load, done: Completion) -> None:
        """Let another tier, whose `loader` it is, read the image in `slot` from its file: `load(image, ended)` is
        called once, and closes the descriptor. Its end is judged as the end of a `read`, and passed on."""
        raise RuntimeError(f"the tier {self.info.name} lends no files")

    def loader(self, slot: Slot, expect_key: bytes) -> Load:
        """Return a function that stores in `slot` an image that this tier reads from a file by itself, from any thread;
        it closes the descriptor, after a failure too.

        The header is stored with this slot's generation. CORRUPT if the file does not hold the block `expect_key`
        whole. FAILED with an `errno` says that the file cannot be read; without one, the file is not at fault."""
        raise RuntimeError(f"the tier {self.info.name} loads no files")

    def share(self, descriptor: int, address: int, nbytes: int) -> int:
        """Let transfers copy from and to this memory in place, soon: `nbytes` of a memfd, mapped here at `address`.
        Return a number for `unshare`. The descriptor stays the caller's, open until that has ended. From any thread."""
        raise RuntimeError(f"the tier {self.info.name} has no memory shared with it")

    def unshare(self, number: int, ended: Callable[[], None]) -> None:
        """Take back memory in which no transfer is under way. Returns at once; no later transfer uses it in place.
        `ended` is called when no process has it mapped for this tier: from then on it may be given back to the
        system. `ended` may take its time, and be called on the caller's thread."""
        raise RuntimeError(f"the tier {self.info.name} has no memory shared with it")

    def relocate(self, source: Slot, target: Slot, expect_key: bytes, done: Completion) -> None:
        """Copy the block `expect_key` from one slot of this tier to another, verified as in `read`. `source` stays
        unchanged. Durable tiers make the copy durable with the next `sync`: call `sync` before, so that it is known
        which of two records is newer, and free `source` after it.
        """
        buffer = AlignedBuffer(source.nbytes)

        def store(outcome: Outcome) -> None:
            if outcome.header is None or not outcome.ok:
                done(outcome)
            else:
                self.write(target, outcome.header, [buffer.segment(outcome.header.payload_bytes)], done)

        self.read(source, expect_key, [buffer.segment(buffer.nbytes)], store)

    def sync(self, done: Completion) -> None:
        """Make every write that was begun and every slot freed before this call durable, then call `done`: after the
        completions of those writes, each of which says how that write ended.

        Volatile tiers answer at once, from the caller's thread.
        """
        done(Outcome(OutcomeKind.DONE))

    @property
    def keeps_recovered(self) -> bool:
        """True if the blocks that `recover` found are known to be on the medium. If not, none of them may be called
        durable before a probe or a `sync` succeeded, which brings them there.
        """
        return True

    def probe(self, done: Completion, *, thorough: bool = True) -> None:
        """Find out whether the medium can be trusted, without touching a block; FAILED says why not.

        `thorough`: write, sync, read back and compare scratch bytes; a tier that had shed itself takes work again when
        that succeeds. Otherwise only check whether its place (directory, peer) is still there. Volatile tiers answer at
        once.
        """
        done(Outcome(OutcomeKind.DONE))

    def quarantine(self, slot: Slot, reason: str) -> None:
        """Take a corrupt slot out of use and keep its bytes for inspection, within a bound; beyond it, free the
        slot.
        """
        self.free(slot)

    def quarantined(self) -> dict[Slot, str]:
        """Return the slots out of use, with the reasons. `free` ends their quarantine."""
        return {}

    def explain_quarantined(self, reasons: Mapping[Slot, str]) -> None:  # noqa: B027  # optional
        """Set the reasons of slots in quarantine, as another process knew them; slots that are not in quarantine, or
        whose reason is known, are ignored.
        """

    def describe_quarantined(self, slot: Slot) -> BlockHeader | None:
        """Return the remaining knowledge of the block in a quarantined slot, without token ids. Reads the medium: may
        wait.
        """
        return None

    def check_books(self) -> list[str]:
        """Return broken invariants of the tier's own records; an empty list if all hold."""
        return []

    def check_held(self, containers: Column, offsets: Column, generations: Column) -> list[str]:
        """Return the faults of slots that the caller holds, named by columns."""
        return []

    def publish_again(self, slot: Slot, header: BlockHeader) -> None:
        """Name the verified block in `slot` on the medium again with the next `sync`: its present record is damaged, or
        names a copy that is given up.
        """
        return

    def location(self, slot: Slot) -> str:
        """Return the place of the bytes of an allocated `slot` for an operator, before they are written as well:
        FILE:OFFSET if there is a file.
        """
        return f"{self.info.name}:{slot.container}+{slot.offset}"

    def recover(self) -> Iterator[tuple[Slot, BlockHeader]]:
        """Yield the blocks that survived the last process, each once, with its slot allocated. Headers carry no token
        ids.

        A durable tier allocates only from containers that were recovered; a volatile one recovers nothing.
        """
        return iter(())

    def recover_columns(self) -> RecoveredBlocks:
        """Return the blocks of `recover` as columns, for a caller that takes over very many."""
        return as_columns(self.recover())

    @abstractmethod
    def statistics(self) -> TierStatistics: ...

    @abstractmethod
    def close(self) -> None:
        """Finish transfers under way, release memory and descriptors. Idempotent."""
