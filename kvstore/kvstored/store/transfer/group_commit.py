"""Group commit: one sync of NVMe makes durable whatever was written before it, and then everybody who waits is told.

Owns what is written and not synced yet, and when the next sync begins. Never writes a block.
Invariants: one group commit at a time; a copy is called durable only by a sync that began after it was written;
whoever waits is answered by the next sync that ends, and as long as something is not durable a next sync comes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore_tiers.base import Outcome, Tier
from kvstored.completions import CompletionQueue
from kvstored.store.blocks import Residency
from kvstored.store.transfer.gate import WriteGate
from kvstored.telemetry import Counters

log = logging.getLogger(__name__)
RETRY_S, LAST_RETRY_S = 1.0, 60.0  # after a sync that failed; longer each time, unless somebody waits


class BatchLimits(NamedTuple):
    """How long a write waits for company, and how much of it."""

    delay_ms: int
    blocks: int


@dataclass(slots=True)
class _Unsynced:
    """Copies that are written, each with what says that it is durable, and others who wait for that word."""

    written: list[tuple[int, asyncio.Future[bool]]] = field(default_factory=list)
    waiting: list[asyncio.Future[bool]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.written or self.waiting)

    def is_awaited(self) -> bool:
        return bool(self.waiting) or any(not settled.done() for _, settled in self.written)


class GroupCommit:
    """`is_writing()`: writes are under way, whose end asks for a sync; `more_to_come()`: those that gather, too."""

    def __init__(
        self,
        nvme: Tier,
        residency: Residency,
        completions: CompletionQueue,
        counters: Counters,
        gate: WriteGate,
        is_writing: Callable[[], bool],
        more_to_come: Callable[[], bool],
        batch: BatchLimits,
    ) -> None:
        self._nvme = nvme
        self._residency = residency
        self._completions = completions
        self._counters = counters
        self._gate = gate
        self._is_writing = is_writing
        self._more_to_come = more_to_come
        self._delay_s = batch.delay_ms / 1000
        self._batch_blocks = batch.blocks
        self._unsynced = _Unsynced()
        self._is_running = False
        self._timer: asyncio.TimerHandle | None = None
        self._retry_s = RETRY_S
        self.pending: dict[int, asyncio.Future[bool]] = {}  # by token: what says that its newest copy is durable

    def note(self, token: int, settled: asyncio.Future[bool]) -> None:
        """A copy is written; `settled` is told whether it is durable."""
        self._unsynced.written.append((token, settled))
        self.pending[token] = settled

    def write_ended(self) -> None:
        """Whatever came of it: sync now, or when there is more to sync."""
        if not self._is_writing() or len(self._unsynced.written) >= self._batch_blocks:
            self.begin()
        elif self._timer is None:  # a steady stream of writes must not put the sync off for ever
            self._begin_in(self._delay_s)

    def when_synced(self) -> asyncio.Future[bool]:
        """What says that the copies which are written by now are durable."""
        settled: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._unsynced.waiting.append(settled)
        self.begin()
        return settled

    def begin(self) -> None:
        """Sync what is written, unless a sync runs: what is written meanwhile goes with the next one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_running or not self._unsynced:
            return
        self._is_running = True
        batch, self._unsynced = self._unsynced, _Unsynced()
        self._gate.commit_begins(more_to_come=self._more_to_come())
        number = self._gate.breaker.began()
        self._nvme.sync(self._completions.to_loop(lambda outcome: self._ended(batch, number, outcome)))

    def sync(self) -> asyncio.Future[bool]:
        """Make durable what was freed on NVMe before this call: no crash brings it back. False if that failed."""
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        number = self._gate.breaker.began()

        def ended(outcome: Outcome) -> None:
            self._gate.breaker.ended(number, "sync", outcome)
            if not done.done():
                done.set_result(outcome.ok)

        self._nvme.sync(self._completions.to_loop(ended))
        return done

    def _ended(self, batch: _Unsynced, number: int, outcome: Outcome) -> None:
        self._is_running = False
        self._gate.breaker.ended(number, "sync", outcome)
        if outcome.ok:
            self._counters.add("durable_blocks", len(batch.written))
        else:
            log.error("NVMe sync failed, %d blocks stay volatile: %s", len(batch.written), outcome.message)
        for token, settled in batch.written:
            if not outcome.ok and self._residency.is_current(token):
                self._unsynced.written.append((token, settled))  # nothing calls it durable until a sync goes well
            elif self.pending.get(token) is settled:  # else it was written again since, which this sync says nothing of
                del self.pending[token]
        for settled in (*(settled for _, settled in batch.written), *batch.waiting):
            if not settled.done():
                settled.set_result(outcome.ok)
        self._go_on(outcome.ok)

    def _go_on(self, went_well: bool) -> None:
        """After a sync: see to it that what is not durable yet is synced, though no write ends any more."""
        if went_well or self._unsynced.is_awaited():
            self._retry_s = RETRY_S
        if not self._unsynced:
            return
        if not went_well:
            self._begin_in(self._retry_s)
            self._retry_s = min(LAST_RETRY_S, 2 * self._retry_s)
        elif self._is_writing():
            self._begin_in(self._delay_s)
        else:
            self.begin()

    def _begin_in(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.begin)
