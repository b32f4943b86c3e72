"""The C heap during a start, which allocates large columns and frees many of them: reused meanwhile, then returned.

It is for glibc on Linux; elsewhere nothing happens. All functions are advice: they change no results. Huge pages are
left to the system's own choice: they save a tenth of a second at a million blocks if memory is there, and cost three if
a virtual machine has given it back to its host, which brings it page by page.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from array import array

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# The thresholds that glibc adopts by itself once a column of this size was freed: blocks up to this size are in the
# heap, not each in a mapping of its own, and it keeps up to twice as much free memory at the heap's end.
_LARGE_BYTES = 32 << 20
_MOST_BYTES = 1 << 30
_SERVING_BYTES = 1 << 20  # a copy of a column, which a check makes once a minute, is gone when it is freed
_FEW_BYTES = 1 << 18


def expect(nbytes: int) -> None:
    """Announce to the C library (glibc) that `nbytes` bytes will be allocated and freed several times, so that it keeps
    freed memory until `trim`. With another C library nothing happens.
    """
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, min(nbytes, _MOST_BYTES) + 2 * _LARGE_BYTES)


def trim() -> None:
    """Make the C library (glibc) give its freed memory back to the kernel, and from now on give back at once what is
    large. It takes some milliseconds for a large heap, and releases the GIL. With another C library nothing happens.
    """
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _SERVING_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, 4 * _SERVING_BYTES)
        libc.malloc_trim(0)


def release_zeros(column: array[int] | array[float] | bytearray, first: int) -> None:
    """Give the memory of `column` from entry `first` on, which are zeros, back to the kernel. They stay zeros; a page
    takes memory again when one of its entries is written. Nothing happens for less than 256 KiB.
    """
    size = column.itemsize if isinstance(column, array) else 1
    if (len(column) - first) * size < _FEW_BYTES:
        return
    with contextlib.suppress(AttributeError, OSError):
        held = (ctypes.c_char * (len(column) * size)).from_buffer(column)
        begin, end = ctypes.addressof(held) + first * size, ctypes.addressof(held) + len(held)
        begin, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)
