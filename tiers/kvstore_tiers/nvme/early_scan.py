"""The early record scan: a process judges records while the daemon loads its modules, before the tier is opened.

The scan runs in a process of its own (early_scan_process.py), since a scan and an import in one process compete for the
GIL. Owns that process, the queue of slabs that both processes take from, and the memory in which the scan leaves its
columns. Knows nothing of records. Imports only modules that are loaded already. Invariant: a report is used only by a
process that holds the directory's lock and found the mark of the holder that the scan saw, and only for a slab file
that has not changed since (restoring a backup takes no lock). The caller scans the slabs without a report: the scan
died, or could not read them.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from kvstore_tiers.nvme.directory_files import LockMark, slab_numbers, slab_path
from kvstore_tiers.nvme.region_reader import FileStamp, SlabQueue, SlabSlots, records_bytes

LEAST_BYTES = 8 << 20  # of records: scanning fewer takes less time than starting a process
_PROGRAM = "kvstore_tiers.nvme.early_scan_process"
_SILENCE_S = 10.0  # between two reports; a scan that is silent for longer hangs, and is given up
_REAP_S, _REAPS = 0.01, 100
_NULL = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)]


class SlabReport(NamedTuple):
    """The result of the early scan for one slab, whose arrays are in the shared memory: counts of its records. `live`
    is the number of stored blocks, `withdrawn` lists the slots whose record must be removed, and `origins` has the
    tenants and fingerprints for the numbers in the array `origin`.
    """

    slab: int
    stamp: FileStamp
    live: int
    last_sequence: int
    damaged: int
    truncated: int
    withdrawn: list[int]
    origins: list[bytes]

    @classmethod
    def of(cls, line: bytes) -> SlabReport:
        """Return the report in `line`, which the scanning process wrote to the pipe. Raises ValueError if the line is
        incomplete.
        """
        report = cls(*json.loads(line))
        origins = [bytes.fromhex(str(raw)) for raw in report.origins]
        return report._replace(stamp=FileStamp(*report.stamp), origins=origins)

    def line(self) -> bytes:
        return json.dumps([*self[:-1], [raw.hex() for raw in self.origins]]).encode() + b"\n"


class EarlyRecordScan:
    """A child process that reads and judges the records of slab files while the daemon still loads its modules. `mark`
    is the state of the lock file when it started, `numbers` are the slabs. `has_ended` says whether the process is seen
    to write no more. Only `claim` may be called from several threads. Raises OSError if the process cannot be started.
    """

    def __init__(self, slabs: Path, mark: LockMark, numbers: list[int]) -> None:
        self._mark = mark
        self.has_ended = False
        with ExitStack() as opened:
            self._queue = SlabQueue.of(numbers)
            opened.callback(self._queue.close)
            self._memory = os.memfd_create("kvstored-judged", os.MFD_CLOEXEC)
            opened.callback(os.close, self._memory)
            self._reports, reporting = os.pipe2(os.O_CLOEXEC)
            opened.callback(os.close, self._reports)
            try:
                self._pid = _start(slabs, self._queue.fd, self._memory, reporting)
            finally:
                os.close(reporting)
            self._opened = opened.pop_all()

    @classmethod
    def begin(cls, directory: str | os.PathLike[str]) -> EarlyRecordScan | None:
        """Start a child process that scans the records in the NVMe tier's `directory`, and return it. Return None if
        there are few records, the directory is locked, or this machine has only one core.
        """
        path = Path(directory).absolute()
        if len(os.sched_getaffinity(0)) < 2 or not sys.executable:
            return None
        try:
            with open(path / "lock", "rb", buffering=0) as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                mark = LockMark.of(lock.fileno())
            slabs = path / "slabs"
            numbers = slab_numbers(slabs)
            if not numbers or records_bytes(slab_path(slabs, numbers[0])) * len(numbers) < LEAST_BYTES:
                return None
            return cls(slabs, mark, numbers)
        except OSError:
            return None

    def is_of(self, former: LockMark) -> bool:
        """Return True if no other process opened the directory since the scan began. `former` is the state of the lock
        file as this process found it."""
        return former == self._mark

    def claim(self) -> int | None:
        """Return the number of a slab that the scanning process has not begun, so that the caller must scan it. Return
        None if no slab is left.
        """
        return self._queue.take()

    def begun(self) -> tuple[list[SlabSlots], Iterator[SlabReport]]:
        """Return the slabs for which the process has laid out the shared memory, and an iterator that yields the report
        on each slab as it arrives. It ends when all slabs are taken, or when the process died or was silent for ten
        seconds.
        """
        lines = self._lines()
        first = json.loads(next(lines, b"[]"))
        return [SlabSlots(*each) for each in first], map(SlabReport.of, lines)

    def _lines(self) -> Iterator[bytes]:
        readable, rest = select.poll(), b""
        readable.register(self._reports, select.POLLIN)
        while readable.poll(_SILENCE_S * 1e3):
            got = os.read(self._reports, 1 << 16)
            self.has_ended = not got
            if self.has_ended:
                break
            *lines, rest = (rest + got).split(b"\n")
            yield from lines

    def memory(self, nbytes: int) -> mmap.mmap:
        """Return a mapping of the shared memory, `nbytes` bytes."""
        return mapped(self._memory, nbytes)

    def close(self) -> None:
        """End the scanning process and free its memory, except what the caller still has mapped. A second call does
        nothing.
        """
        pid, self._pid = self._pid, 0
        with self._opened:
            if pid:
                _end(pid)


def mapped(memory: int, nbytes: int) -> mmap.mmap:
    """Return a mapping of the first `nbytes` bytes of the file `memory`, which is that long from now on."""
    os.ftruncate(memory, nbytes)
    return mmap.mmap(memory, nbytes)


def _start(slabs: Path, queue: int, memory: int, reporting: int) -> int:
    from kvstore_tiers.child_processes import variables_of_children  # sockets, which the scanning process does not need

    inherited = (queue, memory, reporting)
    for fd in inherited:
        os.set_inheritable(fd, True)
    # Without -P Python would look for modules in the working directory first, where other users may be able to write.
    command = [sys.executable, "-P", "-m", _PROGRAM, str(slabs), *map(str, inherited)]
    try:
        # A process group of its own: Ctrl-C is meant for the daemon.
        actions = _NULL + _passed()
        return os.posix_spawn(sys.executable, command, variables_of_children(), file_actions=actions, setpgroup=0)
    finally:
        for fd in inherited:
            os.set_inheritable(fd, False)


def _passed() -> list[tuple[int, int]]:
    """Return the spawn actions that close the descriptors which a service manager passed to the daemon. They are
    arenas, whose memory the scanning process would keep.
    """
    count = os.environ.get("LISTEN_FDS", "")
    if os.environ.get("LISTEN_PID") != str(os.getpid()) or not count.isdecimal():
        return []
    return [(os.POSIX_SPAWN_CLOSE, 3 + number) for number in range(int(count))]


def _end(pid: int) -> None:
    """Kill a child and reap it; a child that waits for a hanging disk does not end, and is left."""
    with suppress(ProcessLookupError, ChildProcessError):  # SIGCHLD is ignored: the kernel reaps children
        os.kill(pid, signal.SIGKILL)
        for _ in range(_REAPS):
            if os.waitpid(pid, os.WNOHANG)[0]:
                return
            time.sleep(_REAP_S)
