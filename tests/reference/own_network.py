"""A network of its own for a part of the tests' process: loopback, and nothing else.

For programs that listen on every address: what they open can be reached from nowhere.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def own_network() -> Iterator[None]:
    """The calling thread has it, and what that thread starts: threads and processes. Skips the test where the kernel
    refuses it, as it does to users other than root."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        if _libc.unshare(_CLONE_NEWNET):
            pytest.skip(f"no network namespace can be made: {os.strerror(ctypes.get_errno())}")
        try:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            yield
        finally:
            if _libc.setns(before, _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "the network of the tests' process could not be taken again")
    finally:
        os.close(before)
