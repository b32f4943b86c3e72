"""Memory that two processes map: an unlinked, unnamed file.

The module owns the descriptor and the sizes. It does not decide what the memory holds. Invariant: the file cannot
shrink under a mapping (sealed), so no reader gets SIGBUS.
"""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np


class SharedMemory:
    """Memory without a file name (a memfd) that a child process can map through `descriptor`. With `touched`, all its
    pages are in RAM from the start; otherwise each page is allocated when it is first written. Call `allocate` once.
    """

    def __init__(self, name: str, *, touched: bool) -> None:
        self.descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._touched = touched

    def allocate(self, size_bytes: int) -> mmap.mmap:
        """Allocate the shared memory, `size_bytes` bytes of zeros, and return its mapping in this process."""
        os.ftruncate(self.descriptor, size_bytes)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        memory = attach(self.descriptor, size_bytes)
        if self._touched:
            np.frombuffer(memory, np.uint8).fill(0)
        return memory

    def close(self) -> None:
        """Close the descriptor. The memory lasts as long as something refers to its mapping."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def attach(descriptor: int, size_bytes: int) -> mmap.mmap:
    """Return a mapping of the first `size_bytes` bytes of the shared memory that another process made. `descriptor` is
    the inherited descriptor of that memory. Raises ValueError if the memory is smaller.
    """
    memory = mmap.mmap(descriptor, size_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)  # has an effect where transparent_hugepage/shmem_enabled is "advise"
    return memory
