"""The C heap around a start, which makes large columns once: taken in huge pages, and what was freed given back.

For glibc; elsewhere nothing happens. It owns nothing: both are advice, and memory means the same with or without them.
"""

from __future__ import annotations

import contextlib
import ctypes

_MADV_HUGEPAGE = 14
_HUGE_BYTES = 2 << 20
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
# What glibc comes to by itself once a column of so many bytes was freed: others up to that lie in the heap, not each in
# a mapping of its own, and free memory at its end is kept up to twice as much.
_LARGE_BYTES = 32 << 20
_MOST_BYTES = 1 << 30
_TOP_PAD_BYTES = 128 << 10  # its default


def expect(nbytes: int) -> None:
    """So many bytes are about to be allocated by this thread, if it is the first one: lay them in huge pages.

    A million blocks touch some 200 MB at a start: to be given them in pages of 4 KiB takes a virtual machine 0.2 s of
    processor time. Nothing is taken before it is touched.
    """
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None, use_errno=True)
        libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
        libc.free.argtypes = [ctypes.c_void_p]
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        nbytes = min(nbytes, _MOST_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, nbytes + 2 * _LARGE_BYTES)  # or the first large column that is freed undoes it
        libc.mallopt(_M_TOP_PAD, nbytes)
        first = libc.malloc(_HUGE_BYTES)  # moves the end of the heap, and the pad with it
        libc.mallopt(_M_TOP_PAD, _TOP_PAD_BYTES)
        end = libc.sbrk(0)
        if first and end and first < end:
            begin = -(-first // _HUGE_BYTES) * _HUGE_BYTES
            libc.madvise(begin, end - begin, _MADV_HUGEPAGE)
        libc.free(first)


def trim() -> None:
    """Give memory that was freed back to the kernel: glibc keeps it for the next allocation, which may never come.
    Takes some milliseconds for a large heap; releases the GIL."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
