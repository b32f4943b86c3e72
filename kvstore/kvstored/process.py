"""What the daemon asks of its own process: descriptors, its age, an end that waits for nothing."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import time
from pathlib import Path

from kvstored.exits import EXIT_HANGS

log = logging.getLogger(__name__)
LEAST_CONNECTIONS = 4


def raise_descriptor_limit() -> None:
    """A client takes a few descriptors; the usual soft limit of 1024 would not do for `limits.max_clients`."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def connections_within(most: int) -> int:
    """Return how many connections a listener takes at once: `most`, and at most a sixteenth of the descriptors that
    this process may have, so that all listeners together leave most of them to engines."""
    return max(LEAST_CONNECTIONS, min(most, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 16))


def set_priority(nice: int) -> None:
    """For the calling thread and those it begins from now on, unless the process was given a priority by others. A
    higher one takes a right (CAP_SYS_NICE) that the daemon may lack: it does without."""
    if os.getpriority(os.PRIO_PROCESS, 0) == 0:
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, nice)


def since_process_start_s() -> float:
    """Seconds since this process was started, by the kernel's account."""
    started_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")


def end_without_order(limit_s: float) -> None:
    """In a thread of its own: the loop may be what hangs."""
    try:
        log.critical("stopping hangs for %.0f s, probably on a disk: ending without order", limit_s)
    finally:
        os._exit(EXIT_HANGS)
