"""The default number of compute threads: one for each physical core that this process may use, less one of four or
more.

ggml's threads spin at every barrier, so a thread too many costs far more than a thread too few: hyperthreads share the
vector units, and a step waits for a descheduled thread. The spare core is for the daemon, copies in and out of the
pool, and the rest of the machine. A container's CPU quota counts as cores.
"""

import contextlib
import math
import os
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_ENOUGH_TO_SPARE_ONE = 4


def default_threads() -> int:
    """Return the number of compute threads for this process on this machine, at least 1."""
    cores = physical_cores(_usable_cpus(), _CPUS)
    quota = cpu_quota(_QUOTA)
    if quota is not None:
        cores = min(cores, max(1, math.floor(quota)))
    return cores - 1 if cores >= _ENOUGH_TO_SPARE_ONE else max(1, cores)


def physical_cores(cpus: set[int], topology: Path) -> int:
    """Return how many physical cores the logical processors with the numbers `cpus` belong to. `topology` is the
    kernel's folder that describes the processors.
    """
    cores = set()
    for cpu in cpus:
        siblings = str(cpu)
        with contextlib.suppress(OSError):
            siblings = (topology / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
        cores.add(siblings)
    return max(1, len(cores))


def cpu_quota(path: Path) -> float | None:
    """Return the CPU quota in cores from the control group's file `path` (`cpu.max`); None if there is none."""
    try:
        quota, period = path.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _usable_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))
