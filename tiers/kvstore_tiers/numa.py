"""Memory of one NUMA node, by mbind(2), for which the C library has no function of its own."""

from __future__ import annotations

import ctypes
import os
import platform

_MBIND = {"x86_64": 237, "aarch64": 235}  # the number of the system call
_MPOL_BIND = 2
_BITS = 64
_libc = ctypes.CDLL(None, use_errno=True)


def bind_to_node(address: int, nbytes: int, node: int) -> None:
    """Let pages of a mapping that are touched from now on come from `node` alone. For shared memory that holds in
    every process that maps it. Raises OSError: there is no such node, or the system has no mbind."""
    number = _MBIND.get(platform.machine())
    if number is None:
        raise OSError(0, f"memory cannot be bound to a NUMA node on {platform.machine()}")
    words = node // _BITS + 1
    mask = (ctypes.c_uint64 * words)()
    mask[node // _BITS] = 1 << node % _BITS
    arguments = (
        ctypes.c_void_p(address), ctypes.c_ulong(nbytes), ctypes.c_int(_MPOL_BIND), mask,
        ctypes.c_ulong(words * _BITS + 1), ctypes.c_uint(0),
    )  # fmt: skip
    if _libc.syscall(ctypes.c_long(number), *arguments):
        error = ctypes.get_errno()
        raise OSError(error, f"memory cannot be bound to NUMA node {node}: {os.strerror(error)}")
