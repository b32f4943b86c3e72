"""Records that are judged before their tier is opened, while a daemon loads its modules.

By another process (judging_process.py): in this one a judge and an import would take turns, since both want the GIL.
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
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvstore_tiers.nvme.lock_mark import LockMark
from kvstore_tiers.nvme.reading_ahead import Look, records_bytes, slab_path
from kvstore_tiers.nvme.slab_queue import SlabQueue

LEAST_BYTES = 8 << 20  # of records: fewer are judged before a process has begun
_PROGRAM = "kvstore_tiers.nvme.judging_process"


class Told(NamedTuple):
    """What was found out about all records of a slab. Its columns are in shared memory (shared_columns.py).

    `live`: how many live blocks there are; `origins`: what the numbers in their column `origin` stand for.
    """

    slab: int
    look: Look
    begin: int
    nbytes: int
    live: int
    last_sequence: int
    damaged: int
    truncated: int
    withdrawn: list[int]
    origins: list[bytes]

    @classmethod
    def of(cls, line: bytes) -> Told:
        """As `line` says. Raises ValueError when it was cut short."""
        told = cls(*json.loads(line))
        return told._replace(look=Look(*told.look), origins=[bytes.fromhex(str(raw)) for raw in told.origins])

    def line(self) -> bytes:
        return json.dumps([*self[:-1], [raw.hex() for raw in self.origins]]).encode() + b"\n"


class JudgingAhead:
    """The process that judges, seen from the one that will open the tier. Not for several threads at once, but for
    `claim`.
    """

    def __init__(self, directory: Path, mark: LockMark, slabs: list[int]) -> None:
        self._directory = directory
        self._mark = mark
        self._queue = SlabQueue.of(slabs)
        self._memory = os.memfd_create("kvstored-judged", os.MFD_CLOEXEC)
        told, telling = os.pipe2(os.O_CLOEXEC)
        self._told = os.fdopen(told, "rb")
        self._pid = _start(directory, self._queue.fd, self._memory, telling)
        os.close(telling)

    @classmethod
    def begin(cls, directory: str | os.PathLike[str]) -> JudgingAhead | None:
        """Begin to judge what is in a directory; None where little is, where somebody has it, and on a single core."""
        path = Path(directory).absolute()
        if len(os.sched_getaffinity(0)) < 2:
            return None
        try:
            with open(path / "lock", "rb", buffering=0) as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                mark = LockMark.of(lock.fileno())
            slabs = sorted(int(slab.stem) for slab in (path / "slabs").glob("*.slab") if slab.stem.isdigit())
            if not slabs or records_bytes(slab_path(path, slabs[0])) * len(slabs) < LEAST_BYTES:
                return None
            return cls(path, mark, slabs)
        except OSError:
            return None

    def is_of(self, directory: Path, former: LockMark) -> bool:
        """Whether this is what is in `directory`, whose lock the caller has, with that mark of who had it before."""
        return directory.absolute() == self._directory and former == self._mark

    def claim(self) -> int | None:
        """A slab that nobody has begun with, and that is left to the caller; None when there is none."""
        return self._queue.take()

    def tell(self) -> Iterator[Told]:
        """All that it finds out, as it comes; ends when the queue is empty, or when it died."""
        with suppress(ValueError, TypeError):  # a last line that was cut short
            for line in self._told:
                yield Told.of(line)

    def memory_of(self, told: Told) -> mmap.mmap:
        """The memory in which the columns of a slab are, to be read."""
        return mmap.mmap(self._memory, told.nbytes, prot=mmap.PROT_READ, offset=told.begin)

    def close(self) -> None:
        """Nothing more is judged, nor kept but what was mapped. Idempotent."""
        if self._pid:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = 0
            self._told.close()
            self._queue.close()
            os.close(self._memory)


def _start(directory: Path, queue: int, memory: int, telling: int) -> int:
    inherited = (queue, memory, telling)
    for fd in inherited:
        os.set_inheritable(fd, True)
    command = [sys.executable, "-m", _PROGRAM, str(directory), *map(str, inherited)]
    try:
        return os.posix_spawn(sys.executable, command, os.environ)
    finally:
        for fd in inherited:
            os.set_inheritable(fd, False)
