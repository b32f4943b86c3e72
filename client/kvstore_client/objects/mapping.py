"""One contiguous read-only mapping of an object: the payload pages of its parts, behind one another.

Parts lie in slots of the daemon's arenas, which this process has mapped already. Their payload begins and ends at
pages, so `mremap` with an old length of 0 maps them a second time, into a range of addresses that was set aside. No
byte is copied. The range is unmapped when the last array over it is freed, and only then are the parts given back.

Invariants: nobody writes a page that is in a live mapping, as long as its lease lives. A lease that ended is replaced
by a new one over the very same content, whose pages take the place of the former at the same addresses.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from kvstore_client.errors import DaemonUnavailable, no_answer
from kvstore_client.lease import Lease
from kvstore_client.memory import MADV_POPULATE_READ, Bytes
from kvstore_client.results import MAY_COME, REASON_DEADLINE, REASON_NO_DAEMON
from kvstore_client.session import Session
from kvstore_proto.arena import HEADER_BYTES
from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.identity import BlockKeys

RETRY_S = 0.02
_AWAITED = (*MAY_COME, REASON_DEADLINE)
_MAYMOVE, _FIXED = 1, 2  # MREMAP_…
_PROT_NONE, _PRIVATE, _ANONYMOUS, _NORESERVE = 0, 0x02, 0x20, 0x4000
_FAILED = ctypes.c_void_p(-1).value
_libc: Any = None


def _calls() -> Any:
    global _libc
    if _libc is None:
        library = ctypes.CDLL(None, use_errno=True)
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        library.mmap.argtypes = (pointer, size, number, number, number, ctypes.c_long)
        library.mremap.argtypes = (pointer, size, size, number, pointer)
        library.munmap.argtypes = library.madvise.argtypes = (pointer, size)
        library.madvise.argtypes = (pointer, size, number)
        library.mmap.restype = library.mremap.restype = pointer
        _libc = library
    return _libc


class _Range:
    """A range of addresses that NumPy shows as read-only bytes; arrays over it refer to it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (nbytes,), "data": (address, True)}


def lease_whole(session: Session, keys: BlockKeys, what: str, deadline_s: float) -> Lease:
    """Return a lease of `session` on the parts `keys` of the object `what`, promoted if need be. Raises KVStoreError if
    not all are in DRAM within `deadline_s` seconds."""
    until, held = time.monotonic() + deadline_s, Lease()
    while True:
        left_s = until - time.monotonic()
        lease = session.get(keys=keys, deadline_s=max(left_s, 0.001))
        held.release()
        if len(lease) == len(keys):
            return lease
        held = lease
        if lease.reason not in (*_AWAITED, "") or left_s <= 0:
            held.release()
            raise _not_whole(what, len(lease), len(keys), lease.reason)
        time.sleep(RETRY_S)


def _not_whole(what: str, held: int, wanted: int, reason: str) -> KVStoreError:
    if reason == REASON_NO_DAEMON:
        return DaemonUnavailable(f"{what}: {no_answer(reason).message}")
    why = f"part {held} of {wanted} is not stored any more ({reason}): put it again"
    if reason in _AWAITED:
        why = f"{held} of {wanted} parts came to DRAM in time: is it larger than the host tier?"
    return KVStoreError(ErrorKind.UNAVAILABLE, f"{what}: {why}")


class ObjectMapping:
    """The mapping of an object's content, `nbytes` bytes, by `lease`, which has its parts in order. `show` returns the
    content; as long as an array over it is in use, the mapping and the lease stay. `lease_again()` returns a new lease
    over the same parts, or None. Raises KVStoreError if the pages cannot be mapped.
    """

    def __init__(self, lease: Lease, nbytes: int, lease_again: Callable[[], Lease | None]) -> None:
        self._lengths = [block.payload_bytes for block in lease.held_blocks]
        self._held, self._lease_again = [lease], lease_again
        self._total = sum(self._lengths)
        address = _calls().mmap(None, self._total, _PROT_NONE, _PRIVATE | _ANONYMOUS | _NORESERVE, -1, 0)
        if address == _FAILED:
            raise _failure("no range of addresses is free", self._total)
        self.address, self.nbytes = int(address), nbytes
        try:
            self._map(lease)
        except BaseException:
            _calls().munmap(self.address, self._total)
            raise
        self._owner: Callable[[], _Range | None] = lambda: None

    def show(self) -> Bytes:
        """Return a read-only array over the content. Call this once, and keep the array or a view of it: the mapping
        ends with the last of them.
        """
        owner = _Range(self.address, self.nbytes)
        self._owner = weakref.ref(owner)
        weakref.finalize(owner, _end, self.address, self._total, self._held).atexit = False
        return np.asarray(owner)

    @property
    def is_live(self) -> bool:
        """True as long as an array over the mapping is in use."""
        return self._owner() is not None

    @property
    def usable_s(self) -> float:
        """The seconds until the lease ends; at most 0 if it has ended."""
        owner = self._owner()  # the range stays while this runs
        return 0.0 if owner is None or not self._held[0].valid else self._held[0].valid_until - time.monotonic()

    @property
    def valid(self) -> bool:
        """True if the lease lives, so that no byte can have changed."""
        owner = self._owner()  # the range stays while this runs
        return owner is not None and self._held[0].valid

    def populate(self) -> None:
        """Enter all pages into this process's page table now, so that no first read has to."""
        _calls().madvise(self.address, self._total, MADV_POPULATE_READ)

    def keep(self) -> bool:
        """Extend the lease, or replace one that has ended. Return False if the mapping is not valid afterwards."""
        owner = self._owner()  # the range stays while this runs
        if owner is None or self._held[0].keep():
            return True
        lease = self._lease_again()
        if lease is None or len(lease) < len(self._lengths):
            return False
        self._map(lease)
        former, self._held[0] = self._held[0], lease
        former.release()
        return self._held[0].valid

    def _map(self, lease: Lease) -> None:
        at = self.address
        for block, length in zip(lease.held_blocks, self._lengths, strict=True):
            if block.payload_bytes != length or length % mmap.PAGESIZE or block.chunk is not None:
                raise KVStoreError(ErrorKind.INTERNAL, "a part has another size than its manifest says")
            source = block.arena.ctypes.data + block.offset + HEADER_BYTES
            if _calls().mremap(source, 0, length, _MAYMOVE | _FIXED, at) == _FAILED:
                raise _failure("a part cannot be mapped", length)
            at += length


def _end(address: int, nbytes: int, held: list[Lease]) -> None:
    """Unmap a range and drop its lease, which the next request gives back: a finalizer may not send one."""
    _calls().munmap(address, nbytes)
    held.clear()


def _failure(what: str, nbytes: int) -> KVStoreError:
    code = ctypes.get_errno()
    hint = "; vm.max_map_count may be too low" if code == 12 else ""
    return KVStoreError(ErrorKind.UNAVAILABLE, f"{what} ({nbytes} bytes): {os.strerror(code)}{hint}")
