"""The memory of one arena: a sealed memfd, its mapping, and the other processes that have it mapped.

The module owns the descriptor and the mapping. It does not know the content. Clients get the memory as a read-only
descriptor and map it whole.

Two modes. `owned`: mode 0600, sealed against resizing; another uid can map it only through the read-only descriptor it
was handed, and the daemon can still punch memory out of it. `sealed`: F_SEAL_FUTURE_WRITE on top, for clients that
share the daemon's uid or are root; then the daemon too can never give its memory back before the last client unmaps it,
so a sealed arena stays with its owner for ever.

Memory that is lent (`loan`) is mapped by a device's process too, and the device copies from and to it. Memory that
`release` and an heir would give back to the system stays until the last borrower has returned it; neither waits for
that. Invariants: prefaulting never changes a byte; memory and its donor's together never exceed the size of one.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import platform
import stat
import threading
from collections.abc import Callable
from typing import Literal, Self

ArenaMode = Literal["owned", "sealed"]

# <linux/fcntl.h>, <linux/falloc.h>, <asm-generic/mman-common.h>: Python 3.11 lacks some of them
F_SEAL_FUTURE_WRITE = 0x10
_FALLOC_PUNCH_HOLE_KEEP_SIZE = 3
_MADV_POPULATE_WRITE = 23
_MBIND = {"x86_64": 237, "aarch64": 235}  # the number of the system call
_MPOL_BIND = 2
_BITS = 64

_NAME_PREFIX = "kvstore-arena-"
_CATCH_UP_BYTES = 8 << 20  # 2.5 ms of punching, which the control thread may have to wait for
_OUR_MEMORY = f"/memfd:{_NAME_PREFIX}"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class ForeignMemory(ValueError):
    """An error: a descriptor does not refer to the expected arena (shared memory cut into slots). The message names the
    difference.
    """


class Loan:
    """A counter of the other processes (borrowers) that have the memory of one arena mapped. It can delay an action
    until no borrower has it mapped. Any thread may call it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._borrowers = 0
        self._waiting: list[Callable[[], None]] = []

    def lend(self, borrowers: int) -> None:
        """Add `borrowers` processes that have the memory mapped to the count. Each of them later calls `returned`
        once.
        """
        with self._changed:
            self._borrowers += borrowers

    def returned(self) -> None:
        """Note that one borrower no longer has the memory mapped. If it was the last one, this call runs the actions
        that were given to `defers`, which may take milliseconds.
        """
        with self._changed:
            self._borrowers -= 1
            waiting: list[Callable[[], None]] = []
            if not self._borrowers:
                waiting, self._waiting = self._waiting, waiting
            self._changed.notify_all()
        for then in waiting:
            then()

    def defers(self, then: Callable[[], None]) -> bool:
        """Return True if a borrower (another process) still has the memory mapped; `then` is called when the last one
        has returned it. Otherwise return False, and `then` is never called.
        """
        with self._changed:
            if self._borrowers:
                self._waiting.append(then)
            return self._borrowers > 0

    def wait(self) -> None:
        """Wait until no borrower (another process) has the memory mapped."""
        with self._changed:
            self._changed.wait_for(lambda: not self._borrowers)


class ArenaMemory:
    """Shared memory (a memfd) of `nbytes` bytes, mapped into this process, for the arena with the number `number`.
    `descriptor` refers to existing memory; with -1 new memory is made. New pages come from the NUMA node `numa_node`,
    or from any node if that is -1. `released` is called with the number when the memory is given back to the system.
    `donor` is unused memory that this memory replaces step by step: before a range is used here, the same range is
    freed in the donor, so that the two together never take more than `nbytes` bytes. Raises OSError, with nothing left
    behind, if the system refuses memory, a mapping or a descriptor.
    """

    def __init__(
        self, number: int, nbytes: int, *, mode: ArenaMode, donor: Self | None, descriptor: int, numa_node: int,
        released: Callable[[int], None] | None,
    ) -> None:  # fmt: skip
        self.number = number
        self.nbytes = nbytes
        self.mode: ArenaMode = mode
        self.populated_bytes = 0
        self._donor = donor
        self._inheriting = threading.Lock()  # between the control thread and the one that prefaults
        self.inherited_bytes = 0  # of a donor: how much of its memory was given back already
        self.loan = Loan()
        self._owed_bytes = 0  # of a donor that is lent: how much of its memory is to be given back
        self._released = released
        is_new = descriptor < 0
        self.fd = _new_memory(number, nbytes) if is_new else descriptor
        try:
            self._mapping = mmap.mmap(self.fd, nbytes)
            self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
            if numa_node >= 0:
                bind_to_node(self.address, nbytes, numa_node)
            if is_new:
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS | (F_SEAL_FUTURE_WRITE if mode == "sealed" else 0))
        except OSError:
            if is_new:
                os.close(self.fd)
            raise
        if donor is not None:
            donor._give_up_donor()  # else arenas that are never used whole would pile up, each with its descriptor

    def readonly_fd(self) -> int:
        """Return a new O_RDONLY descriptor of this arena for a client; the caller closes it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def populate(self, budget_bytes: int) -> int:
        """Let the system provide the next pages of this memory, at most `budget_bytes` bytes, without changing their
        content. Return the number of bytes that this call provided; 0 means that all pages are there. Only one thread
        at a time may call it.
        """
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
        """Give the memory back to the system and close the descriptor. A client that still maps it then reads zeros. If
        other processes borrow the memory, this happens when the last one returns it. A second call does nothing.
        """
        self._give_up_donor()
        if not self.loan.defers(self._give_back):
            self._give_back()

    def _give_back(self) -> None:
        if self.fd >= 0:
            if self.mode == "owned":
                with contextlib.suppress(OSError):  # then it goes with the last process that maps it
                    self.punch(0, self.nbytes)
            if self._released is not None:
                self._released(self.number)
            os.close(self.fd)
            self.fd = -1

    def leave(self) -> None:
        """Close this process's descriptor, and leave the memory to the other processes that have it open. A second call
        does nothing.
        """
        self._give_up_donor()  # a later process does not know that they share one arena's worth of capacity
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def punch(self, start: int, nbytes: int) -> None:
        """Give the memory of `nbytes` bytes from offset `start` back to the system. These bytes are zeros afterwards.
        Raises OSError if the kernel refuses.
        """
        if _libc.fallocate(self.fd, _FALLOC_PUNCH_HOLE_KEEP_SIZE, start, nbytes):
            number = ctypes.get_errno()
            raise OSError(number, f"cannot give memory of arena {self.number} back: {os.strerror(number)}")

    @property
    def held_bytes(self) -> int:
        """The number of bytes of RAM that this memory takes now, as the kernel counts them."""
        return os.fstat(self.fd).st_blocks * 512

    def _give_up_donor(self) -> None:
        """Release the donor, whose memory is not taken step by step any more."""
        with self._inheriting:
            donor, self._donor = self._donor, None
        if donor is not None:
            donor.release()

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
        """Take the donor's memory for ranges handed out here meanwhile: the donor has been returned."""
        while self._owed_bytes:
            with self._inheriting:
                donor, owed_bytes = self._donor, self._owed_bytes
                upto_bytes = min(owed_bytes, donor.inherited_bytes + _CATCH_UP_BYTES) if donor is not None else 0
                if donor is not None:
                    try:
                        self._take_from(donor, upto_bytes)
                    except OSError:  # nobody would try again: these ranges are in use already
                        donor.release()
                        self._donor = None
                if donor is None or upto_bytes == owed_bytes:
                    self._owed_bytes = 0

    def _take_from(self, donor: Self, upto_bytes: int) -> None:
        if upto_bytes > donor.inherited_bytes:
            donor.punch(donor.inherited_bytes, upto_bytes - donor.inherited_bytes)
            donor.inherited_bytes = upto_bytes
        if donor.held_bytes > donor.nbytes - donor.inherited_bytes:  # a client read there since, which makes pages
            donor.punch(0, donor.inherited_bytes)
        if donor.inherited_bytes == donor.nbytes:
            donor.release()
            self._donor = None


def bind_to_node(address: int, nbytes: int, node: int) -> None:
    """Bind the mapping of `nbytes` bytes at `address` to the NUMA node `node`: each page touched from now on comes from
    that node. For shared memory this holds in every process that maps it. Raises OSError if there is no such node or
    the system has no mbind call.
    """
    number = _MBIND.get(platform.machine())
    if number is None:
        raise OSError(0, f"memory cannot be bound to a NUMA node on {platform.machine()}")
    words = node // _BITS + 1
    mask = (ctypes.c_uint64 * words)()
    mask[node // _BITS] = 1 << node % _BITS
    arguments = (
        ctypes.c_void_p(address), ctypes.c_ulong(nbytes), ctypes.c_int(_MPOL_BIND), mask,
        ctypes.c_ulong(words * _BITS + 1), ctypes.c_uint(0),
    )  # fmt: skip
    if _libc.syscall(ctypes.c_long(number), *arguments):
        error = ctypes.get_errno()
        raise OSError(error, f"memory cannot be bound to NUMA node {node}: {os.strerror(error)}")


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


def require_arena(descriptor: int, number: int, nbytes: int) -> None:
    """Raise ForeignMemory unless `descriptor` is a memfd of `nbytes` that a daemon of this user made as arena `number`,
    with the usual mode and seals.
    """
    try:
        found, seals = os.fstat(descriptor), fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        name = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError as error:
        raise ForeignMemory(f"no memfd: {error.strerror}") from None
    if name != f"/memfd:{_name(number)} (deleted)":
        raise ForeignMemory(f"it is {name}")
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) != 0o600:
        raise ForeignMemory(f"it belongs to uid {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}")
    if found.st_size != nbytes:
        raise ForeignMemory(f"it has {found.st_size} bytes, {nbytes} were expected")
    if seals != _SEALS:
        raise ForeignMemory(f"its seals are {seals:#x}")


def empty_memory(descriptor: int) -> None:
    """Give all memory of an unwanted arena (shared memory cut into slots) back to the system, even while former clients
    map it. If `descriptor` is not of an arena of this user, nothing happens.
    """
    with contextlib.suppress(OSError):
        found = os.fstat(descriptor)
        if found.st_uid == os.geteuid() and os.readlink(f"/proc/self/fd/{descriptor}").startswith(_OUR_MEMORY):
            _libc.fallocate(descriptor, _FALLOC_PUNCH_HOLE_KEEP_SIZE, 0, found.st_size)
