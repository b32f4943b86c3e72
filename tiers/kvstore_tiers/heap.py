"""The C heap during a start, which allocates large columns and frees many of them: reused meanwhile, then returned.

It is for glibc; elsewhere nothing happens. Both functions are advice: they change no results. Huge pages are left to
the system's own choice: they save a tenth of a second at a million blocks if memory is there, and cost three if a
virtual machine has given it back to its host, which brings it page by page.
"""

from __future__ import annotations

import contextlib
import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# The thresholds that glibc adopts by itself once a column of this size was freed: blocks up to this size are in the
# heap, not each in a mapping of its own, and it keeps up to twice as much free memory at the heap's end.
_LARGE_BYTES = 32 << 20
_MOST_BYTES = 1 << 30


def expect(nbytes: int) -> None:
    """Announce to the C library (glibc) that `nbytes` bytes will be allocated and freed several times, so that it keeps
    freed memory until `trim`. With another C library nothing happens.
    """
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, min(nbytes, _MOST_BYTES) + 2 * _LARGE_BYTES)


def trim() -> None:
    """Make the C library (glibc) give its freed memory back to the kernel. It takes some milliseconds for a large heap,
    and releases the GIL. With another C library nothing happens.
    """
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * _LARGE_BYTES)
        libc.malloc_trim(0)
