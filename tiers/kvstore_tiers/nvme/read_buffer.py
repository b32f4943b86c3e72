"""Memory to read records to: of its own, page-aligned as direct I/O wants it, and in huge pages where there are any.

Owns nothing. A start that finds a million blocks reads 256 MB; page by page, being given that memory would cost a
virtual machine more time than reading it.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

_HUGE_BYTES = 2 << 20  # what is a multiple of this is placed so that huge pages fit


def read_buffer(nbytes: int) -> memoryview:
    """So many zero bytes, given back with the last reference to them."""
    room_bytes = -(-nbytes // _HUGE_BYTES) * _HUGE_BYTES if nbytes >= _HUGE_BYTES else nbytes
    memory = mmap.mmap(-1, room_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has no huge pages
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)[:nbytes]
