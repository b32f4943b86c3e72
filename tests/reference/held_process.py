"""A process that does not go when it is killed, as one that hangs in the kernel: another process traces it, and its end
is not seen until that one lets go. Linux alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_TRACER = """
import ctypes, sys
trace = ctypes.CDLL(None).ptrace
trace.argtypes, trace.restype = [ctypes.c_long] * 4, ctypes.c_long
PTRACE_SEIZE = 0x4206
print(trace(PTRACE_SEIZE, int(sys.argv[1]), 0, 0), flush=True)
sys.stdin.read()
"""


@contextmanager
def held(process: int) -> Iterator[None]:
    """Skips the test where this user may not trace."""
    command = [sys.executable, "-c", _TRACER, str(process)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as tracer:
        assert tracer.stdin is not None and tracer.stdout is not None
        if tracer.stdout.readline().strip() != "0":
            pytest.skip("this user may not trace a process")
        yield
        tracer.stdin.close()
