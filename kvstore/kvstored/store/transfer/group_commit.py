"""Group commit: one sync of NVMe makes durable what was begun before it, and answers all callers that wait for that.

Owns what is not synced yet, and when the next sync begins: with the last write that has begun, since the tier syncs
after the writes it has. Never writes a block.
Invariants: one group commit at a time; a copy is called durable only by a sync that was asked for after its write
began, and that ended after the write went well; a caller is answered by the next sync that ends, and as long as
something is not durable a next sync comes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore_tiers.base import Outcome, Tier
from kvstored.completions import CompletionQueue
from kvstored.store.blocks import Residency
from kvstored.store.transfer.gate import Write, WriteGate, WriteState
from kvstored.telemetry import Counters

log = logging.getLogger(__name__)
RETRY_S, LAST_RETRY_S = 1.0, 60.0  # after a sync that failed; longer each time, unless a caller waits


class BatchLimits(NamedTuple):
    """The bounds of a batch of writes: a write waits up to `delay_ms` for more writes, or until there are `blocks` of
    them.
    """

    delay_ms: int
    blocks: int


@dataclass(slots=True)
class _Unsynced:
    """The writes that have begun and the callers that wait for a sync."""

    writes: list[Write] = field(default_factory=list)
    waiting: list[asyncio.Future[bool]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.writes or self.waiting)

    def is_awaited(self) -> bool:
        return bool(self.waiting) or any(not write.settled.done() for write in self.writes)

    def is_worth_a_sync(self) -> bool:
        return bool(self.waiting) or any(write.state is WriteState.WRITTEN for write in self.writes)


class GroupCommit:
    """A component that syncs NVMe; each sync makes all writes begun before it durable. The writes are in the backlog of
    `gate`."""

    def __init__(
        self,
        nvme: Tier,
        residency: Residency,
        completions: CompletionQueue,
        counters: Counters,
        gate: WriteGate,
        batch: BatchLimits,
    ) -> None:
        self._nvme = nvme
        self._residency = residency
        self._completions = completions
        self._counters = counters
        self.gate = gate
        self.backlog = gate.backlog
        self.batch = batch
        self._delay_s = batch.delay_ms / 1000
        self._unsynced = _Unsynced()
        self._is_running = False
        self._timer: asyncio.TimerHandle | None = None
        self._retry_s = RETRY_S
        self.pending: dict[int, asyncio.Future[bool]] = {}  # by token: what says that its newest copy is durable

    def begun(self, writes: Sequence[Write]) -> None:
        """Note that the tier has begun `writes`. A sync follows soon, together with other writes. Call `ended` when
        each ends.
        """
        for write in writes:
            write.state = WriteState.BEGUN
            self.pending[write.token] = write.settled
        self.backlog.begun += len(writes)
        self._unsynced.writes += writes
        if not self.backlog.queued or len(self._unsynced.writes) >= self.batch.blocks:
            self.begin()
        elif self._timer is None:  # a steady stream of writes must not put the sync off for ever
            self._begin_in(self._delay_s)

    def ended(self, write: Write, *, went_well: bool) -> None:
        """Note that `write`, which had begun, has ended. If it failed, nothing of it becomes durable."""
        write.state = WriteState.WRITTEN if went_well else WriteState.FAILED
        if not went_well:
            self._forget(write)

    def when_synced(self) -> asyncio.Future[bool]:
        """Return a future that resolves to True when the copies whose writes have begun by now are durable, False if
        the sync fails.
        """
        settled: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._unsynced.waiting.append(settled)
        self.begin()
        return settled

    def begin(self) -> None:
        """Start a sync of the writes begun so far. If one is running, the next sync includes them."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_running or not self._unsynced:
            return
        self._is_running = True
        batch, self._unsynced = self._unsynced, _Unsynced()
        self.gate.commit_begins()
        number = self.gate.breaker.began()
        self._nvme.sync(self._completions.to_loop(lambda outcome: self._ended(batch, number, outcome)))

    def sync(self) -> asyncio.Future[Outcome]:
        """Start a sync of NVMe that serves this caller alone. The future resolves to its outcome; on success,
        everything written and freed before this call is durable."""
        done: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        number = self.gate.breaker.began()

        def ended(outcome: Outcome) -> None:
            self.gate.breaker.ended(number, "sync", outcome)
            if not done.done():
                done.set_result(outcome)

        self._nvme.sync(self._completions.to_loop(ended))
        return done

    def _ended(self, batch: _Unsynced, number: int, outcome: Outcome) -> None:
        self._is_running = False
        self.gate.breaker.ended(number, "sync", outcome)
        writes = [write for write in batch.writes if write.state is not WriteState.FAILED]
        if outcome.ok:  # nothing is known of a copy whose completion is late
            self._unsynced.writes += [write for write in writes if write.state is WriteState.BEGUN]
            writes = [write for write in writes if write.state is WriteState.WRITTEN]
            self._counters.add("durable_blocks", len(writes))
        else:
            log.error("NVMe sync failed, %d blocks stay volatile: %s", len(writes), outcome.message)
        for write in writes:
            if not outcome.ok and self._residency.is_current(write.token):
                self._unsynced.writes.append(write)  # it is not durable until a sync succeeds
            else:
                self._forget(write)
        for settled in (*(write.settled for write in writes), *batch.waiting):
            if not settled.done():
                settled.set_result(outcome.ok)
        self._go_on(outcome.ok)

    def _forget(self, write: Write) -> None:
        if self.pending.get(write.token) is write.settled:  # else a later copy is pending, which this says nothing of
            del self.pending[write.token]

    def _go_on(self, went_well: bool) -> None:
        """Start another sync after the one that has just ended, if something is not durable yet and no new write would
        start it.
        """
        if went_well or self._unsynced.is_awaited():
            self._retry_s = RETRY_S
        if not self._unsynced:
            return
        if not went_well:
            self._begin_in(self._retry_s)
            self._retry_s = min(LAST_RETRY_S, 2 * self._retry_s)
        elif self.backlog.queued or not self._unsynced.is_worth_a_sync():
            self._begin_in(self._delay_s)
        else:
            self.begin()

    def _begin_in(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.begin)
