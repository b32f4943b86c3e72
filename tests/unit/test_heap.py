"""The C heap around a start: what is expected lies in huge pages, and what was freed goes back to the kernel.

In a process of its own each time: advice to the allocator stays for as long as the process.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MIB = 1 << 20
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_SCRIPT = """
import sys
from array import array
from pathlib import Path
from kvstore_tiers.heap import expect, trim

def resident(field):
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))

before = resident("Rss")
if sys.argv[1] == "expected":
    expect(64 << 20)
print(resident("Rss") - before)
columns = [array("Q", [0]) * (1 << 20) for _ in range(6)]
print(resident("AnonHugePages"))
print(resident("Rss") - before)
kept = columns[-1]
del columns
trim()
print(resident("Rss") - before)
"""


def _measured(how: str) -> list[int]:
    told = subprocess.run([sys.executable, "-c", _SCRIPT, how], capture_output=True, text=True, check=True)
    return [int(line) for line in told.stdout.split()]


def _has_huge_pages() -> bool:
    return _HUGE_PAGES.exists() and "[madvise]" in _HUGE_PAGES.read_text()


@pytest.mark.skipif(not _has_huge_pages(), reason="huge pages are not to be had on advice here")
def test_columns_that_were_expected_lie_in_huge_pages() -> None:
    _, huge, _, _ = _measured("expected")
    assert huge >= 40 * MIB, "of 48 MiB"
    assert _measured("not")[1] < 8 * MIB


def test_expecting_takes_nothing_and_what_is_freed_goes_back() -> None:
    at_once, _, full, left = _measured("expected")
    assert at_once < 4 * MIB
    assert full >= 47 * MIB
    assert left < 16 * MIB, "one column of 8 MiB is kept, the last of six"
