"""The backlog: blocks on their way to the durable tier, those that gather for the next batch and those being written.

Pure bookkeeping: write-back enters and ends writes, the gate asks how far behind the disk is.
Invariant: a block has one write at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from kvstored.store.transfer.items import Priority
from kvstored.store.transfer.link import Link

_QUEUE_FROM_BYTES = 8 << 20  # less is no queue


class WriteState(Enum):
    BEGUN = "begun"
    WRITTEN = "written"
    FAILED = "failed"


@dataclass(slots=True)
class UnsyncedCopy:
    """`settled` says whether the copy is durable."""

    token: int
    settled: asyncio.Future[bool]
    state: WriteState = WriteState.BEGUN


@dataclass(slots=True)
class Write:
    """`written` resolves when a durable tier has a copy, `settled` when it is durable, or both to False."""

    token: int
    tenant: int
    priority: Priority
    nbytes: int  # of its slot
    written: asyncio.Future[bool]
    settled: asyncio.Future[bool]
    link: Link | None = None
    ticket: int = 0
    copy: UnsyncedCopy | None = None  # once the tier has the write


class Backlog:
    """Writes by the token of their row. `bytes_per_s()` is what the disk has shown that it writes."""

    def __init__(self, bytes_per_s: Callable[[], float]) -> None:
        self._bytes_per_s = bytes_per_s
        self.gathering: dict[int, Write] = {}
        self.running: dict[int, Write] = {}
        self._begun = 0  # of those
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self.gathering) + len(self.running)

    def __contains__(self, token: int) -> bool:
        return token in self.gathering or token in self.running

    def find(self, token: int) -> Write | None:
        return self.gathering.get(token) or self.running.get(token)

    def add(self, write: Write) -> None:
        self.gathering[write.token] = write
        self.nbytes += write.nbytes

    def start(self) -> list[Write]:
        """What gathered is running from now on."""
        batch, self.gathering = self.gathering, {}
        self.running |= batch
        return [*batch.values()]

    @property
    def queued(self) -> int:
        """Writes that are started and that the tier does not have yet."""
        return len(self.running) - self._begun

    @property
    def has_more(self) -> bool:
        """Whether the tier will get more writes: queued ones, or those that gather for the next batch."""
        return self.queued > 0 or bool(self.gathering)

    def begin(self) -> None:
        """The tier has one more of the writes that are running; the caller sets its `copy`."""
        self._begun += 1

    def end(self, write: Write) -> None:
        del self.running[write.token]
        self._begun -= write.copy is not None
        self.nbytes -= write.nbytes

    @property
    def seconds(self) -> float:
        """How long the disk needs for it."""
        return self.nbytes / self._bytes_per_s() if self.nbytes > _QUEUE_FROM_BYTES else 0.0
