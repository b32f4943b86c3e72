"""The memory that is left before the kernel kills a process for it: in the machine, and in every cgroup of this
process.

The module reads /proc and the cgroup files (version 2, or 1 if only that is there) and gives one number. It does not
decide what to do. Memory that can be reclaimed without loss (clean page cache) counts as free. Missing files are
ignored; with none of them there is no limit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_PART_BYTES = 16_384  # of a file: all of it, as a rule
_V1_NO_LIMIT = 1 << 62  # what version 1 shows where no limit is set is a little less than 2**63


class MemoryReading(NamedTuple):
    """A reading of the machine's free memory. `where` names the limit (machine or cgroup) that is nearest.
    `stalled_percent` is the share of the last 10 s in which all tasks waited for memory."""

    free_bytes: int
    where: str
    stalled_percent: float = 0.0


class MemoryWatch:
    """A reader of how much memory is left before the kernel kills a process. `proc` and `cgroups` are the folders in
    which the kernel shows that."""

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc = proc
        self._cgroups = cgroups

    def read(self) -> MemoryReading:
        found = list(self._levels())
        free_bytes, where = min(found, default=(1 << 62, "nothing that can be read"))
        return MemoryReading(max(0, free_bytes), where, self._stalled())

    def _levels(self) -> Iterator[tuple[int, str]]:
        machine = _fields(self._proc / "meminfo", scale=1024)
        if "MemAvailable:" in machine:
            yield machine["MemAvailable:"], "the machine"
        for line in _text(self._proc / "self/cgroup").splitlines():
            hierarchy, controllers, path = [*line.split(":", 2), "", ""][:3]
            if hierarchy == "0" and not controllers:
                for folder in _upwards(self._cgroups, path):
                    yield from _version_2(folder)
            elif "memory" in controllers.split(","):
                for folder in _upwards(self._cgroups / "memory", path):
                    yield from _version_1(folder)

    def _stalled(self) -> float:
        for line in _text(self._proc / "pressure/memory").splitlines():
            if line.startswith("full "):
                values = dict(item.split("=", 1) for item in line.split()[1:] if "=" in item)
                return float(values.get("avg10", "0"))
        return 0.0


def _upwards(root: Path, path: str) -> Iterator[Path]:
    """Yield the cgroup's folder and the folders above it, the root too: in a container that is the container's own."""
    folder = root / path.strip("/")
    while folder != root:
        yield folder
        folder = folder.parent
    yield root


def _version_2(folder: Path) -> Iterator[tuple[int, str]]:
    used_bytes = _number(folder / "memory.current")
    if used_bytes is None:
        return
    limits = [limit for name in ("memory.max", "memory.high") if (limit := _number(folder / name)) is not None]
    if limits:
        reclaimable = _fields(folder / "memory.stat").get("inactive_file", 0)
        yield min(limits) - used_bytes + reclaimable, f"cgroup {folder}"


def _version_1(folder: Path) -> Iterator[tuple[int, str]]:
    limit, used_bytes = _number(folder / "memory.limit_in_bytes"), _number(folder / "memory.usage_in_bytes")
    if limit is not None and used_bytes is not None and limit < _V1_NO_LIMIT:
        reclaimable = _fields(folder / "memory.stat").get("total_inactive_file", 0)
        yield limit - used_bytes + reclaimable, f"cgroup {folder}"


def _text(path: Path) -> str:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # requests wait meanwhile, and a file object takes longer
    except OSError:
        return ""
    try:
        found = b""
        while part := os.read(file, _PART_BYTES):
            found += part
        return found.decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(file)


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None  # "max" is no limit


def _fields(path: Path, scale: int = 1) -> dict[str, int]:
    """Return the fields of a file with lines of a name and a number."""
    found = {}
    for line in _text(path).splitlines():
        words = line.split()
        if len(words) >= 2 and words[1].isdigit():
            found[words[0]] = int(words[1]) * scale
    return found
