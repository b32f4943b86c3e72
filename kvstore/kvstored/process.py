"""The daemon's own process, and the kernel's facts about processes, files and users."""

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
_ALL_IDS = 2**32 - 1  # -1 is no id
_DEFAULT_OVERFLOW = 65534


def set_limits(nice: int) -> None:
    """Set the limits of this process and its later children: no core dumps, since memory has token ids in it, as many
    descriptors as allowed, and the priority `nice`.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    raise_descriptor_limit()
    set_priority(nice)


def raise_descriptor_limit() -> None:
    """Raise this process's limit of open descriptors as far as allowed, since each client takes a few."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def connections_within(most: int) -> int:
    """Return how many connections a listener may accept at once: `most`, but at most a sixteenth of this process's
    descriptors.
    """
    return max(LEAST_CONNECTIONS, min(most, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 16))


def set_priority(nice: int) -> None:
    """Set the nice value of the calling thread, and of threads that it starts later, to `nice`, unless the process has
    been given one. Without the right to do so (CAP_SYS_NICE) nothing changes.
    """
    if os.getpriority(os.PRIO_PROCESS, 0) == 0:
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, nice)


def since_process_start_s() -> float:
    """Return the seconds since this process was started."""
    started_ticks = start_ticks(os.getpid()) or 0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")


def start_ticks(pid: int) -> int | None:
    """Return when the process `pid` was started, in clock ticks since boot, or None if that cannot be seen. A later
    process with the same number has another value.
    """
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def ticks_now() -> int:
    """Return the present moment in the clock ticks since boot in which `start_ticks` counts, rounded down."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def file_identity(path: str | Path) -> tuple[int, int] | None:
    """Return the device and inode of `path`, which identify the file while it exists, or None if there is none."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def end_without_order(limit_s: float) -> None:
    """End this process at once, since its orderly stop has taken `limit_s` seconds. It is called from a thread, because
    the event loop may hang."""
    try:
        log.critical("stopping hangs for %.0f s, probably on a disk: ending without order", limit_s)
    finally:
        os._exit(EXIT_HANGS)


def is_unmapped(kind: str, number: int, proc: Path = Path("/proc")) -> bool:
    """Return whether `number`, an id of `kind` "uid" or "gid", may stand for any user or group that this process's user
    namespace does not map. `proc` is where procfs is mounted. Without procfs the answer is True for the usual overflow
    id alone.

    To a process in a user namespace the kernel shows every user that the namespace does not map as one number, the
    overflow uid (usually 65534); groups likewise. So in a namespace that does not map all users that number is no
    identity, even if it is mapped too, since both look alike."""
    return number == _overflow(proc / f"sys/kernel/overflow{kind}") and not _maps_all(proc / f"self/{kind}_map")


def _overflow(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return _DEFAULT_OVERFLOW


def _maps_all(path: Path) -> bool:
    """Return whether the lines of a map, `inside outside length`, cover every id. They never overlap."""
    try:
        return sum(int(line.split()[2]) for line in path.read_text().splitlines()) >= _ALL_IDS
    except (OSError, ValueError, IndexError):
        return False
