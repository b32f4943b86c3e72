"""One arena: a sealed memfd of the host tier, cut into slots of one size for one owner.

Owns the descriptor, the mapping and which slots are out. Never decides where a block goes (host.py) and never copies
payload. Clients get the arena as a read-only descriptor and map it whole, so one arena never serves two owners.

An arena of a `writable_owner` is handed out writable too, to clients that put blocks in place. Nothing in it is
believed that this process did not write: the header of each block is kept here as well (`vouch`), with the payload's
checksum.

Two modes. `owned`: mode 0600, sealed against resizing; another uid can map it only through the read-only descriptor it
was handed, and the daemon can still punch memory out of it. `sealed`: F_SEAL_FUTURE_WRITE on top, for clients that
share the daemon's uid or are root; the price is that the daemon too can never give its memory back before the last
client unmaps it, so a sealed arena stays with its owner for ever.

An arena that is lent (`loan`) is mapped by a device's process too, and the device copies from and to it. What `release`
and an heir would give back to the system stays until the last borrower has let go of it; neither waits for that.

Invariants: the number of an arena is never reused; slots are handed out for the first time in ascending order; a
slot's generation only grows, across changes of slot size and of the daemon too; prefaulting never changes a byte; of
the slots handed out, those and only those that hold a block have a header that holds.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import stat
import threading
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from kvstore_proto.arena import BlockHeader
from kvstore_tiers.base import Segment, Slot
from kvstore_tiers.image import erase_header, mark_retired
from kvstore_tiers.loan import Loan
from kvstore_tiers.numa import bind_to_node
from kvstore_tiers.segments import Bytes, view_at

ArenaMode = Literal["owned", "sealed"]

# <linux/fcntl.h>, <linux/falloc.h>, <asm-generic/mman-common.h>: Python 3.11 lacks some of them
F_SEAL_FUTURE_WRITE = 0x10
_FALLOC_PUNCH_HOLE_KEEP_SIZE = 3
_MADV_POPULATE_WRITE = 23

_NAME_PREFIX = "kvstore-arena-"
_WRITABLE = "+w"
_CATCH_UP_BYTES = 8 << 20  # 2.5 ms of punching, which the control thread may have to wait for
_NO_BLOCK = BlockHeader(bytes(16), bytes(16), bytes(32), bytes(16), 0)
_OUR_MEMORY = f"/memfd:{_NAME_PREFIX}"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


@dataclass(frozen=True, slots=True)
class ArenaRecord:
    """What a process must know of an arena, beyond its bytes, to take it over from one that has ended."""

    number: int
    nbytes: int
    owner: str
    slot_bytes: int
    handed_out: int  # slots, counted from the front, that were ever in use since the arena was cut
    high_generation: int
    device: int = 0  # that has the blocks (`gpu.chunks`); 0 for DRAM


class ArenaWitness(Protocol):
    """Receives what a later process must know of each arena. Raises nothing; quick."""

    def made(self, arena: Arena) -> None: ...

    def changed(self, arena: Arena) -> None:
        """It was cut, or a slot of it was used for the first time or reached its highest generation."""
        ...

    def given_up(self, number: int) -> None:
        """It is no longer the tier's; another arena inherits the rest of its memory, or that is freed at once."""
        ...

    def released(self, number: int) -> None:
        """Its memory is given back. May be called on the thread that prefaults."""
        ...


class ChunkWitness(ArenaWitness, Protocol):
    """Receives the shadow of each chunk of device memory too, and a descriptor of that memory."""

    def has_memory(self, number: int, descriptor: int) -> None:
        """The chunk is there now, before any block is in it. The descriptor stays the tier's. May be called on another
        thread."""
        ...

    def worker_started(self, process: int) -> None:
        """A process of the tier's has begun, which will write to arenas and chunks. On a thread of the tier's."""
        ...

    def worker_ended(self, process: int) -> None:
        """It is gone. On a thread of the tier's."""
        ...


def writable_owner(owner: str) -> str:
    """What owns the arenas that clients of `owner` may write."""
    return owner + _WRITABLE


class ForeignMemory(ValueError):
    """A descriptor is not the arena it is said to be; the message says why."""


class ArenaHome(NamedTuple):
    """`numa_node`: the memory is bound to it, -1: to none. `device`: what has the blocks, 0 for DRAM."""

    numa_node: int = -1
    device: int = 0


class Arena:
    """`nbytes` of shared memory for `owner`. `slot_bytes` is 0 until the first slot is asked for.

    `donor` is an empty arena whose memory this one inherits: bytes of the donor are punched out before the same range
    is handed out here, so that both together never hold more than `nbytes`. Raises OSError, with nothing left behind,
    where the system has no memory, no mapping or no descriptor for it.
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
        self.number = number
        home = home or ArenaHome()
        self.device = home.device
        self.nbytes = nbytes
        self.owner = owner
        self.mode: ArenaMode = mode
        self.slot_bytes = 0
        self.populated_bytes = 0
        self._donor = donor
        self._inheriting = threading.Lock()  # between the control thread and the one that prefaults
        self.inherited_bytes = 0  # of a donor: how much of its memory was given back already
        self.loan = Loan()
        self._owed_bytes = 0  # of a donor that is lent: how much of its memory is to be given back
        self._generations = array("Q")
        self.high_generation = 0  # of all that slots ever had
        self._first_generation = 1
        self._out = bytearray()
        self._returned: list[int] = []
        self._vouched: dict[int, BlockHeader] = {}  # by offset
        self.used_slots = 0
        self._witness = witness
        is_new = descriptor < 0
        self.fd = _new_memory(number, nbytes) if is_new else descriptor
        try:
            self._mapping = mmap.mmap(self.fd, nbytes)
            self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
            if home.numa_node >= 0:
                bind_to_node(self.address, nbytes, home.numa_node)
            if is_new:
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS | (F_SEAL_FUTURE_WRITE if mode == "sealed" else 0))
        except OSError:
            if is_new:
                os.close(self.fd)
            raise

    @classmethod
    def adopt(cls, record: ArenaRecord, descriptor: int, witness: ArenaWitness | None) -> Arena:
        """The arena of a process that has ended, with no slot out yet: `occupy` follows. Takes the descriptor.

        Raises ForeignMemory, and OSError where it cannot be mapped; the descriptor is the caller's then.
        """
        require_arena(descriptor, record)
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
        """Say of an adopted arena which slots are out, in which generation. All others that were ever handed out are
        free, without a header, and will have generations that no slot had before."""
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
        """A free slot; the caller has looked at `has_room`."""
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
        """Whether clients may write to it."""
        return self.owner.endswith(_WRITABLE)

    def vouch(self, slot: Slot, header: BlockHeader) -> None:
        """This process has written `header` to the slot, for a payload that has its checksum. May be called on the
        thread that did, before the outcome is delivered."""
        if self.is_writable:
            self._vouched[slot.offset] = header

    def view(self, slot: Slot) -> Bytes:
        """A writable uint8[slot.nbytes] over the slot. It must not outlive the slot."""
        return view_at(self.address + slot.offset, slot.nbytes)

    def readonly_fd(self) -> int:
        """A new O_RDONLY descriptor of this arena for a client; the caller closes it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def writable_fd(self) -> int:
        """A new descriptor for a client that may write here; the caller closes it. Raises RuntimeError for an arena of
        which clients must not write a byte."""
        if not self.is_writable or self.mode == "sealed":
            raise RuntimeError(f"arena {self.number} is not to be written by clients")
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)

    def populate(self, budget_bytes: int) -> int:
        """Fault the next pages in, without changing a byte; bytes now populated. May run on any one thread."""
        nbytes = min(budget_bytes, self.nbytes - self.populated_bytes)
        if nbytes <= 0:
            return 0
        start = self.populated_bytes
        self._inherit(start + nbytes)
        if _libc.madvise(self.address + start, nbytes, _MADV_POPULATE_WRITE):
            os.posix_fallocate(self.fd, start, nbytes)  # before Linux 5.14: pages without page table entries
        self.populated_bytes = start + nbytes
        return nbytes

    @property
    def is_whole(self) -> bool:
        """Whether all of its memory is its own, and is there or will be at once."""
        is_in_use = self.slot_bytes > 0 and len(self._generations) == self.slots
        return self._donor is None and (is_in_use or self.populated_bytes == self.nbytes)

    def release(self) -> None:
        """Give the memory back, even while clients still map it (`owned`), and close the descriptor: of an arena that
        is lent, when it has been returned. Idempotent."""
        with self._inheriting:
            if self._donor is not None:
                self._donor.release()
                self._donor = None
        if not self.loan.defers(self._give_back):
            self._give_back()

    def _give_back(self) -> None:
        if self.fd >= 0:
            if self.mode == "owned":
                self.punch(0, self.nbytes)
            if self._witness is not None:
                self._witness.released(self.number)
            os.close(self.fd)
            self.fd = -1

    def leave(self) -> None:
        """Close the descriptor and leave the memory to the other holders of it. Idempotent."""
        with self._inheriting:
            donor, self._donor = self._donor, None
        if donor is not None:  # a later process does not know that they share one arena's worth of capacity
            donor.release()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def punch(self, start: int, nbytes: int) -> None:
        """Give a range's memory back to the system; it reads as zeros afterwards. Raises OSError."""
        if _libc.fallocate(self.fd, _FALLOC_PUNCH_HOLE_KEEP_SIZE, start, nbytes):
            number = ctypes.get_errno()
            raise OSError(number, f"cannot give memory of arena {self.number} back: {os.strerror(number)}")

    @property
    def held_bytes(self) -> int:
        """Memory that it takes now, by the kernel's account."""
        return os.fstat(self.fd).st_blocks * 512

    def _hand_out(self) -> int:
        """The next slot that was never in use since the arena was cut."""
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

    def _inherit(self, upto_bytes: int) -> None:
        """Take the donor's memory up to an offset: punching 64 MiB at once would stall the caller for 20 ms."""
        if self._donor is None:
            return
        with self._inheriting:
            donor = self._donor
            if donor is None:
                return
            if self._owed_bytes or donor.loan.defers(self._catch_up):
                self._owed_bytes = max(self._owed_bytes, upto_bytes)
                return
            self._take_from(donor, upto_bytes)

    def _catch_up(self) -> None:
        """The donor has been returned: take what was handed out here meanwhile."""
        while self._owed_bytes:
            with self._inheriting:
                donor, owed_bytes = self._donor, self._owed_bytes
                upto_bytes = min(owed_bytes, donor.inherited_bytes + _CATCH_UP_BYTES) if donor is not None else 0
                if donor is not None:
                    self._take_from(donor, upto_bytes)
                if donor is None or upto_bytes == owed_bytes:
                    self._owed_bytes = 0

    def _take_from(self, donor: Arena, upto_bytes: int) -> None:
        if upto_bytes > donor.inherited_bytes:
            donor._inherit(upto_bytes)  # what it had not yet taken of its own donor
            donor.punch(donor.inherited_bytes, upto_bytes - donor.inherited_bytes)
            donor.inherited_bytes = upto_bytes
        if donor.held_bytes > donor.nbytes - donor.inherited_bytes:  # a client read there since, which makes pages
            donor.punch(0, donor.inherited_bytes)
        if donor.inherited_bytes == donor.nbytes:
            donor.release()
            self._donor = None


def _new_memory(number: int, nbytes: int) -> int:
    descriptor = os.memfd_create(_name(number), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(descriptor, 0o600)  # a memfd is born 0777: any uid could reopen it writable through /proc
        os.ftruncate(descriptor, nbytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _name(number: int) -> str:
    return f"{_NAME_PREFIX}{number}"


def require_arena(descriptor: int, record: ArenaRecord) -> None:
    """Raise ForeignMemory unless the descriptor is a memfd that a daemon of this user made as that arena."""
    try:
        found, seals = os.fstat(descriptor), fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        name = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError as error:
        raise ForeignMemory(f"no memfd: {error.strerror}") from None
    if name != f"/memfd:{_name(record.number)} (deleted)":
        raise ForeignMemory(f"it is {name}")
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) != 0o600:
        raise ForeignMemory(f"it belongs to uid {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}")
    if found.st_size != record.nbytes or not 0 <= record.slot_bytes <= record.nbytes:
        raise ForeignMemory(f"it has {found.st_size} bytes, {record.nbytes} were expected")
    if seals != _SEALS:
        raise ForeignMemory(f"its seals are {seals:#x}")


def empty_memory(descriptor: int) -> None:
    """Give back the memory of an arena that is not wanted, even while former clients map it. Anything else that the
    descriptor may be is left as it is."""
    with contextlib.suppress(OSError):
        found = os.fstat(descriptor)
        if found.st_uid == os.geteuid() and os.readlink(f"/proc/self/fd/{descriptor}").startswith(_OUR_MEMORY):
            _libc.fallocate(descriptor, _FALLOC_PUNCH_HOLE_KEEP_SIZE, 0, found.st_size)
