"""Gives memory that was freed back to the kernel: after a start, when large columns were used once.

glibc keeps freed memory for the next allocation, which may never come. Elsewhere nothing happens.
"""

from __future__ import annotations

import contextlib
import ctypes


def trim() -> None:
    """Takes some milliseconds for a large heap; releases the GIL."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
