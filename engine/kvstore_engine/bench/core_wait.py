"""How long this process's threads were ready to run and had no core: what others on the machine cost a measurement.

Owns the reading of the kernel's scheduling statistics. A figure whose side waited much says more of its neighbours
than of itself.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

_TASKS = Path("/proc/self/task")


def core_wait_s() -> float:
    """Seconds since the threads that live now were made, summed over them; 0 where the kernel does not say."""
    waited_ns = 0
    with contextlib.suppress(OSError):
        for task in _TASKS.iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):  # a thread that has just ended
                waited_ns += int((task / "schedstat").read_text().split()[1])
    return waited_ns / 1e9
