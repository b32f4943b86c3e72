"""Records that are judged before their tier is opened, while a daemon loads its modules.

By another process (early_scan_process.py): in this one a judge and an import would take turns, since both want the GIL.
Owns that process, the queue of slabs from which both take (so that whoever opens the tier helps it along), and the
memory in which it leaves what it found out. Knows nothing of records. Imports nothing that is not there already.
Invariant: what it found out is used only by who has the directory's lock then and found that nobody had it since
(whoever has it leaves a mark), and of slabs that are the file that was read, not written to since: who restores a
backup asks for no lock. Whatever it does not tell, because it died, or could not read, is left to the caller.
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

from kvstore_tiers.child_variables import variables_of_children
from kvstore_tiers.nvme.lock_mark import LockMark
from kvstore_tiers.nvme.region_reader import FileStamp, records_bytes
from kvstore_tiers.nvme.slab_names import slab_numbers, slab_path
from kvstore_tiers.nvme.slab_queue import SlabQueue

LEAST_BYTES = 8 << 20  # of records: fewer are judged before a process has begun
_PROGRAM = "kvstore_tiers.nvme.early_scan_process"
_SILENCE_S = 10.0  # between two lines: it hangs, and is not waited for
_REAP_S, _REAPS = 0.01, 100
_NULL = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)]


class SlabReport(NamedTuple):
    """What was found out about all records of a slab. Its columns are in shared memory (shared_columns.py).

    `live`: how many live blocks there are; `origins`: what the numbers in their column `origin` stand for.
    """

    slab: int
    look: FileStamp
    begin: int
    nbytes: int
    live: int
    last_sequence: int
    damaged: int
    truncated: int
    withdrawn: list[int]
    origins: list[bytes]

    @classmethod
    def of(cls, line: bytes) -> SlabReport:
        """As `line` says. Raises ValueError when it was cut short."""
        told = cls(*json.loads(line))
        return told._replace(look=FileStamp(*told.look), origins=[bytes.fromhex(str(raw)) for raw in told.origins])

    def line(self) -> bytes:
        return json.dumps([*self[:-1], [raw.hex() for raw in self.origins]]).encode() + b"\n"


class EarlyRecordScan:
    """The process that judges, seen from the one that will open the tier. Not for several threads at once, but for
    `claim`. Raises OSError when there can be none.
    """

    def __init__(self, slabs: Path, mark: LockMark, numbers: list[int]) -> None:
        self._mark = mark
        with ExitStack() as opened:
            self._queue = SlabQueue.of(numbers)
            opened.callback(self._queue.close)
            self._memory = os.memfd_create("kvstored-judged", os.MFD_CLOEXEC)
            opened.callback(os.close, self._memory)
            self._told, telling = os.pipe2(os.O_CLOEXEC)
            opened.callback(os.close, self._told)
            try:
                self._pid = _start(slabs, self._queue.fd, self._memory, telling)
            finally:
                os.close(telling)
            self._opened = opened.pop_all()

    @classmethod
    def begin(cls, directory: str | os.PathLike[str]) -> EarlyRecordScan | None:
        """Begin to judge what is in a directory; None where little is, where somebody has it, and on a single core."""
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
        """Whether this is what is in the directory whose lock the caller has, with that mark of who had it before."""
        return former == self._mark

    def claim(self) -> int | None:
        """A slab that nobody has begun with, and that is left to the caller; None when there is none."""
        return self._queue.take()

    def tell(self) -> Iterator[SlabReport]:
        """All that it finds out, as it comes; ends when the queue is empty, and when it died or does not go on."""
        readable, rest = select.poll(), b""
        readable.register(self._told, select.POLLIN)
        while readable.poll(_SILENCE_S * 1e3) and (got := os.read(self._told, 1 << 16)):
            *lines, rest = (rest + got).split(b"\n")
            for line in lines:
                yield SlabReport.of(line)

    def memory_of(self, told: SlabReport) -> mmap.mmap:
        """The memory in which the columns of a slab are, to be read."""
        return mmap.mmap(self._memory, told.nbytes, prot=mmap.PROT_READ, offset=told.begin)

    def close(self) -> None:
        """Nothing more is judged, nor kept but what was mapped. Idempotent."""
        pid, self._pid = self._pid, 0
        with self._opened:
            if pid:
                _end(pid)


def _start(slabs: Path, queue: int, memory: int, telling: int) -> int:
    inherited = (queue, memory, telling)
    for fd in inherited:
        os.set_inheritable(fd, True)
    # Without -P modules would be looked for in the working directory first, whoever may write there.
    command = [sys.executable, "-P", "-m", _PROGRAM, str(slabs), *map(str, inherited)]
    try:
        # A process group of its own: Ctrl-C is meant for the daemon, which says what is to be said.
        actions = _NULL + _passed()
        return os.posix_spawn(sys.executable, command, variables_of_children(), file_actions=actions, setpgroup=0)
    finally:
        for fd in inherited:
            os.set_inheritable(fd, False)


def _passed() -> list[tuple[int, int]]:
    """Closes what a service manager has passed to the daemon: arenas, whose memory would stay as long as this does."""
    count = os.environ.get("LISTEN_FDS", "")
    if os.environ.get("LISTEN_PID") != str(os.getpid()) or not count.isdecimal():
        return []
    return [(os.POSIX_SPAWN_CLOSE, 3 + number) for number in range(int(count))]


def _end(pid: int) -> None:
    """Kill a child and take its status, if it comes to that: one that waits for a hanging disk does not end."""
    with suppress(ProcessLookupError, ChildProcessError):  # where nobody wants to know of children they end alone
        os.kill(pid, signal.SIGKILL)
        for _ in range(_REAPS):
            if os.waitpid(pid, os.WNOHANG)[0]:
                return
            time.sleep(_REAP_S)
