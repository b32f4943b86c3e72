"""One arena: a sealed memfd of the host tier, cut into slots of one size for one owner.

Owns the descriptor, the mapping and which slots are out. Never decides where a block goes (host.py) and never copies
payload. Clients get the arena as a read-only descriptor and map it whole, so one arena never serves two owners.

Two modes. `owned`: mode 0600, sealed against resizing; another uid can map it only through the read-only descriptor it
was handed, and the daemon can still punch memory out of it. `sealed`: F_SEAL_FUTURE_WRITE on top, for clients that
share the daemon's uid or are root; the price is that the daemon too can never give its memory back before the last
client unmaps it, so a sealed arena stays with its owner for ever.

Invariants: the number of an arena is never reused; slots handed out for the first time come in ascending order; a
slot's generation only grows, across changes of slot size too; prefaulting never changes a byte.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
from array import array
from typing import Literal

from kvstore_tiers.base import Segment, Slot
from kvstore_tiers.image import erase_header
from kvstore_tiers.segments import Bytes, view_at

ArenaMode = Literal["owned", "sealed"]

# <linux/fcntl.h>, <linux/falloc.h>, <asm-generic/mman-common.h>: Python 3.11 lacks some of them
F_SEAL_FUTURE_WRITE = 0x10
_FALLOC_PUNCH_HOLE_KEEP_SIZE = 3
_MADV_POPULATE_WRITE = 23

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class Arena:
    """`nbytes` of shared memory for `owner`. `slot_bytes` is 0 until the first slot is asked for.

    `donor` is an empty arena whose memory this one inherits: bytes of the donor are punched out before the same range
    is handed out here, so that both together never hold more than `nbytes`.
    """

    def __init__(
        self, number: int, nbytes: int, owner: str, *, mode: ArenaMode = "owned", donor: Arena | None = None
    ) -> None:
        self.number = number
        self.nbytes = nbytes
        self.owner = owner
        self.mode: ArenaMode = mode
        self.slot_bytes = 0
        self.populated_bytes = 0
        self._donor = donor
        self._inheriting = threading.Lock()  # between the control thread and whoever prefaults
        self.inherited_bytes = 0  # of a donor: how much of its memory was given back already
        self._generations = array("Q")
        self._first_generation = 1
        self._out = bytearray()
        self._returned: list[int] = []
        self.used_slots = 0
        self.fd = os.memfd_create(f"kvstore-arena-{number}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(self.fd, 0o600)  # a memfd is born 0777: any uid could reopen it writable through /proc
        os.ftruncate(self.fd, nbytes)
        self._mapping = mmap.mmap(self.fd, nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        if mode == "sealed":
            seals |= F_SEAL_FUTURE_WRITE
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)

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

    def allocate(self) -> Slot:
        """A free slot; the caller has looked at `has_room`."""
        if self._returned:
            index = self._returned.pop()
        else:
            index = len(self._generations)
            self._generations.append(self._first_generation)
            self._out.append(0)
            self._inherit((index + 1) * self.slot_bytes)
        self._out[index] = 1
        self.used_slots += 1
        return Slot(self.number, index * self.slot_bytes, self.slot_bytes, self._generations[index])

    def free(self, slot: Slot) -> None:
        """Take a slot back; its header is erased and its next use has a higher generation."""
        self.require_out(slot)
        index = slot.offset // self.slot_bytes
        erase_header(self.segment(slot))
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

    def segment(self, slot: Slot) -> Segment:
        """The slot's memory, header and payload, for direct I/O."""
        return Segment(self.address + slot.offset, slot.nbytes, owner=self._mapping, generation=slot.generation)

    def view(self, slot: Slot) -> Bytes:
        """A writable uint8[slot.nbytes] over the slot. It must not outlive the slot."""
        return view_at(self.address + slot.offset, slot.nbytes)

    def readonly_fd(self) -> int:
        """A new O_RDONLY descriptor of this arena for a client; the caller closes it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

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

    def release(self) -> None:
        """Give the memory back, even while clients still map it (`owned`), and close the descriptor. Idempotent."""
        with self._inheriting:
            if self._donor is not None:
                self._donor.release()
                self._donor = None
        if self.fd >= 0:
            if self.mode == "owned":
                self.punch(0, self.nbytes)
            os.close(self.fd)
            self.fd = -1

    def punch(self, start: int, nbytes: int) -> None:
        """Give a range's memory back to the system; it reads as zeros afterwards. Raises OSError."""
        if _libc.fallocate(self.fd, _FALLOC_PUNCH_HOLE_KEEP_SIZE, start, nbytes):
            number = ctypes.get_errno()
            raise OSError(number, f"cannot give memory of arena {self.number} back: {os.strerror(number)}")

    def _inherit(self, upto_bytes: int) -> None:
        """Take the donor's memory up to an offset: punching 64 MiB at once would stall the caller for 20 ms."""
        if self._donor is None:
            return
        with self._inheriting:
            donor = self._donor
            if donor is None:
                return
            if upto_bytes > donor.inherited_bytes:
                donor.punch(donor.inherited_bytes, upto_bytes - donor.inherited_bytes)
                donor.inherited_bytes = upto_bytes
            if donor.inherited_bytes == donor.nbytes:
                donor.release()
                self._donor = None
