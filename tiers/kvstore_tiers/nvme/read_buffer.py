"""Memory to read records to: of its own, and page-aligned as direct I/O wants it. Owns nothing."""

from __future__ import annotations

import mmap


def read_buffer(nbytes: int) -> memoryview:
    """So many zero bytes, given back with the last reference to them."""
    return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
