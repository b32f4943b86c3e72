"""Memory to read records to: of its own, and in whole pages as direct I/O wants it. Owns nothing."""

from __future__ import annotations

import mmap


def read_buffer(nbytes: int) -> memoryview:
    """So many zero bytes, given back with the last reference to them."""
    return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def whole_pages(nbytes: int) -> int:
    """The bytes of the pages that hold so many."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
