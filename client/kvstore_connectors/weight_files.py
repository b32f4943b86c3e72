"""The files of a running model's weights, and whether they are still unchanged.

Weights that are mapped change with their file. The module owns open descriptors of these files, so that a file that is
renamed over or deleted is still watched, their digest, and their state when it was taken. Limit: a change is noticed by
the next `changed` after it; a change whose time was set back is noticed only if a digest was taken, by reading again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import xxhash

_CHUNK_BYTES = 64 << 20
_TICK_S = 0.02  # times of files move in steps: a write within the same one as the last would not be seen
DELETED = " (deleted)"


@dataclass(frozen=True, slots=True)
class Mapping:
    """A range of addresses of this process, from `begin` to `end` - 1, that maps a file. `path` ends in " (deleted)" if
    the file no longer has that name.
    """

    begin: int
    end: int
    device: int
    inode: int
    path: str


class WeightFiles:
    """A set of open files that hold a model's weights, which notices when one of them is written to. The files are
    closed when the object is freed.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        """Open `paths` and remember their present state. Raises OSError."""
        self._descriptors: list[int] = []
        self.paths = list(paths)
        try:
            for path in self.paths:
                self._descriptors.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            self.close()
            raise
        self._marks = [_settled(descriptor) for descriptor in self._descriptors]
        self._digest = ""

    @property
    def states(self) -> list[os.stat_result]:
        """The present status of each file, as `os.fstat` returns it."""
        return [os.fstat(descriptor) for descriptor in self._descriptors]

    def digest(self) -> str:
        """Return the xxh3 digest of the content of all files, in order, as text. It guards against mix-ups, not
        forgery.
        """
        hashing = xxhash.xxh3_128()
        for descriptor in self._descriptors:
            offset = 0
            while chunk := os.pread(descriptor, _CHUNK_BYTES, offset):
                hashing.update(chunk)
                offset += len(chunk)
        self._digest = self._digest or hashing.hexdigest()
        return hashing.hexdigest()

    def changed(self, *, by_content: bool = False) -> str:
        """Return the path of a file that was written to or truncated since it was opened, or "" if there is none. With
        `by_content` the caller compares contents afterwards, so other permissions, and a time that was set back, count
        as changes too.
        """
        for index, path in enumerate(self.paths):
            try:
                now = _mark(os.fstat(self._descriptors[index]))
                if now == self._marks[index]:
                    continue
                is_same = now[:2] == self._marks[index][:2] and not by_content
                if is_same and (not self._digest or self.digest() == self._digest):
                    self._marks[index] = now  # another name or other permissions
                    continue
            except OSError:  # a file system that is gone, or a handle that a server no longer knows
                pass
            return str(path)
        return ""

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def __del__(self) -> None:
        self.close()


def why_unknown(files: WeightFiles, mappings: list[Mapping], began: float) -> str:
    """Return a sentence if this process, which began at `began` (Unix time in seconds), may have loaded other bytes
    than `files` have now. Return "" if every file is in one of `mappings`, or is older than the process, with all links
    to it.
    """
    for path, state in zip(files.paths, files.states, strict=True):
        real = os.path.realpath(path)
        shown = [each for each in mappings if each.path in (real, real + DELETED)]
        if any(each.path == real and (each.inode == state.st_ino or each.device != state.st_dev) for each in shown):
            continue
        if shown:
            return f"{path} was replaced after it was loaded: open the model again"
        if _youngest(path, state) >= began:
            return f"{path} is younger than this process, and not mapped: what was loaded cannot be known from it"
    return ""


def process_began() -> float:
    """Return the time at which this process began, as Unix time in seconds, at most a clock tick too early."""
    with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    uptime = ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + uptime - _TICK_S


def mappings_now() -> list[Mapping]:
    """Return the mappings of files in this process's memory, one for each range of addresses."""
    found = []
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            addresses, _, _, device, inode, *path = line.rstrip("\n").split(maxsplit=5)
            if path and inode != "0":
                begin, end = (int(part, 16) for part in addresses.split("-"))
                major, minor = (int(part, 16) for part in device.split(":"))
                found.append(Mapping(begin, end, os.makedev(major, minor), int(inode), path[0]))
    return found


def _youngest(path: Path, state: os.stat_result) -> float:
    """Return when the file, or a symbolic link on the way to it, last changed or came to its name."""
    links = [part for part in (path.absolute(), *path.absolute().parents) if part.is_symlink()]
    return max([state.st_ctime, *(link.lstat().st_ctime for link in links)])


def _settled(descriptor: int) -> tuple[int, int, int]:
    """Return a file's mark once a later write is sure to change it: at most a clock tick after its last write."""
    state = os.fstat(descriptor)
    age_s = time.time() - max(state.st_mtime, state.st_ctime)
    if 0 <= age_s < _TICK_S:
        time.sleep(_TICK_S - age_s)
        state = os.fstat(descriptor)
    return _mark(state)


def _mark(state: os.stat_result) -> tuple[int, int, int]:
    return state.st_size, state.st_mtime_ns, state.st_ctime_ns
