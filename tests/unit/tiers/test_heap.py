"""The C heap around a start: what was freed is used again, and goes back to the kernel in the end.

In a process of its own each time: advice to the allocator stays for as long as the process.
"""

from __future__ import annotations

import subprocess
import sys

MIB = 1 << 20
_SCRIPT = """
import ctypes
import resource
import sys
from array import array
from pathlib import Path
from kvstore_tiers.heap import expect, trim

def resident():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss:"))

def make():
    return [array("Q", [0]) * (1 << 20) for _ in range(6)]

ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: a page a fault, under any setting of the system
before = resident()
if sys.argv[1] == "expected":
    expect(64 << 20)
print(resident() - before)
columns = make()
print(resident() - before)
del columns
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
columns = make()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) * resource.getpagesize())
kept = columns[-1]
del columns
trim()
print(resident() - before)
"""


def _measured(how: str) -> list[int]:
    completed = subprocess.run([sys.executable, "-c", _SCRIPT, how], capture_output=True, text=True, check=True)
    return [int(line) for line in completed.stdout.split()]


def test_what_was_freed_is_used_again() -> None:
    assert _measured("expected")[2] < 4 * MIB
    assert _measured("not")[2] >= 40 * MIB, "the kernel gives 48 MiB again"


def test_expecting_takes_nothing_and_what_is_freed_goes_back() -> None:
    at_once, full, _, left = _measured("expected")
    assert at_once < 4 * MIB
    assert full >= 47 * MIB
    assert left < 16 * MIB, "one column of 8 MiB is kept, the last of six"
