"""Write-back: give blocks of the host tier a copy on NVMe, behind the client's back or before its answer.

Owns the blocks that wait to be written and the group commit: writes of a batch run side by side, one sync makes them
all durable, and then everybody who waits is told. Used for write-through (modes batch and always) and for demotion of
victims. What is written is charged to the endurance budget first, and goes with those of its ancestors that NVMe lacks.
Invariants: "durable" is said only after the tier's sync; a block is written once however many ask; a pinned host copy
is read from, never copied first; nothing is written that was not charged.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from kvstore_tiers.base import Completion, Outcome, OutcomeKind, Slot, Tier
from kvstore_tiers.host import HostTier
from kvstored.clock import Clock
from kvstored.endurance import Verdict
from kvstored.movement.completions import CompletionQueue
from kvstored.movement.gate import WriteGate
from kvstored.movement.lane import Priority, Refused
from kvstored.movement.mover import Mover, Transfer
from kvstored.movement.refusals import Refusal
from kvstored.movement.room import Room
from kvstored.residency import Residency
from kvstored.telemetry import Counters, Flows
from kvstored.tiering import HOST, NVME

log = logging.getLogger(__name__)
LANE = "host→nvme"
MAX_THROTTLED = 4096  # puts that wait for the endurance budget at once


@dataclass(slots=True)
class _Write:
    """`written` resolves when a copy exists on NVMe, `settled` when it is durable, or both to False."""

    token: int
    priority: Priority
    written: asyncio.Future[bool]
    settled: asyncio.Future[bool]
    nbytes: int = 0  # of its slot
    ticket: int = 0
    number: int = 0  # of the transfer, for the breaker


@dataclass(slots=True)
class _Unsynced:
    """Blocks whose copies are written but not yet synced, with those who wait to hear of it."""

    tokens: list[int] = field(default_factory=list)
    settled: list[asyncio.Future[bool]] = field(default_factory=list)


class WriteBack:
    """See the module. `delay_ms` and `batch_blocks` bound how long and how many blocks a background batch gathers."""

    def __init__(
        self,
        residency: Residency,
        host: HostTier,
        nvme: Tier,
        room: Room,
        mover: Mover,
        completions: CompletionQueue,
        clock: Clock,
        counters: Counters,
        flows: Flows,
        gate: WriteGate,
        *,
        delay_ms: int,
        batch_blocks: int,
    ) -> None:
        self._residency = residency
        self._host = host
        self._nvme = nvme
        self._room = room
        self._mover = mover
        self._completions = completions
        self._clock = clock
        self._counters = counters
        self._flows = flows
        self.gate = gate
        gate.is_coming = self._is_coming
        gate.breaker.on_open.append(self._cancel_queued)
        self._delay_ms = delay_ms
        self._batch_blocks = batch_blocks
        self._throttled: dict[int, asyncio.Future[bool]] = {}  # by token: what waits for the budget
        self._waiting: dict[int, _Write] = {}  # not started: the next batch
        self._running: dict[int, _Write] = {}
        self._unsynced = _Unsynced()
        self._unsynced_rows: dict[int, asyncio.Future[bool]] = {}  # by token: what says that it is durable
        self._sync_running = False
        self._timer: asyncio.TimerHandle | None = None
        self._sync_timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # What others ask

    def admits(self, row: int) -> bool:
        """Whether a block that nobody insists on is worth a write."""
        return self.gate.admits(row)

    def wants(self, row: int) -> bool:
        """Demotion: worth a write, or the chain would get a hole without it."""
        return self.gate.breaker.takes_writes and (self._residency.children(row) > 0 or self.gate.admits(row))

    def why_volatile(self, row: int) -> Refusal | None:
        """Why a block was not written; None when nobody asked for it, or it is on its way."""
        return self.gate.refusals.of(self._residency.token(row))

    def is_durable(self, row: int) -> bool:
        return self._residency.has(row, NVME) and self._residency.token(row) not in self._unsynced_rows

    def is_on_its_way(self, row: int) -> bool:
        """Whether the block will be durable if nothing goes wrong."""
        token = self._residency.token(row)
        return self._is_coming(row) or token in self._unsynced_rows or token in self._throttled

    def pending(self) -> int:
        """Blocks on their way to being durable."""
        return len(self._waiting) + len(self._running) + len(self._unsynced_rows) + len(self._throttled)

    def write_through(self, row: int, *, at_once: bool = False) -> asyncio.Future[bool]:
        """Resolves to whether the block is durable. `at_once`: a client waits, at the priority of demand."""
        loop = asyncio.get_running_loop()
        if self._residency.has(row, NVME):
            if not self.is_durable(row):
                return self._when_synced()
            durable: asyncio.Future[bool] = loop.create_future()
            durable.set_result(self.gate.breaker.serves_reads)  # of a medium that is gone nothing is promised anew
            return durable
        token = self._residency.token(row)
        if token in self._throttled:
            return self._throttled[token]
        paid = [] if self._is_coming(row) else self.gate.pay(row)
        if not isinstance(paid, Verdict):
            settled = self._enqueue_paid(paid, row, Priority.DEMAND if at_once else Priority.DEMOTION)
        elif (at_once or paid is Verdict.LEASING) and len(self._throttled) < MAX_THROTTLED:
            settled = self._throttle(token, paid, at_once)
        else:
            self.gate.refuse(row, self.gate.breaker_or(paid))
            settled = loop.create_future()
            settled.set_result(False)
        if at_once or len(self._waiting) >= self._batch_blocks:
            self._start_batch()
        elif self._timer is None and self._waiting:
            self._timer = loop.call_later(self._delay_ms / 1000 / 2, self._start_batch)
        return settled

    async def write_back(self, row: int) -> bool:
        """Demotion for room that somebody waits for, so at the priority of demand. Resolves once the block has a copy
        on NVMe; that it is durable comes a little later. A budget that is spent is not waited for."""
        if self._residency.has(row, NVME):
            return True
        token = self._residency.token(row)
        if not self._is_coming(row):
            paid = await self.gate.pay_in_time(token, insists=False)
            row = self._residency.current(token)
            if paid is None or row < 0:
                return False
            self._enqueue_paid(paid, row, Priority.DEMAND)
            if not self._is_coming(row):
                return self._residency.has(row, NVME)
        write = self._enqueue(row, Priority.DEMAND)
        self._start_batch()
        return await asyncio.shield(write.written)

    def _throttle(self, token: int, verdict: Verdict, insists: bool) -> asyncio.Future[bool]:
        """Wait for the budget, in a task. `insists`: for what it will earn; else for a lease under way alone."""
        if verdict is not Verdict.LEASING:
            self._counters.add("budget_throttled_blocks")
        task = asyncio.get_running_loop().create_task(self._when_paid(token, insists))
        self._throttled[token] = task
        task.add_done_callback(lambda _: self._throttled.pop(token, None))
        return task

    async def _when_paid(self, token: int, insists: bool) -> bool:
        try:
            paid = await self.gate.pay_in_time(token, insists=insists)
        except Exception:  # as below: a mistake of ours is no client's
            log.exception("waiting for the endurance budget failed")
            return False
        row = self._residency.current(token)
        if paid is None or row < 0:
            return False
        if self._residency.has(row, NVME):
            return await asyncio.shield(self._when_synced())
        settled = self._enqueue_paid(paid, row, Priority.DEMAND if insists else Priority.DEMOTION)
        self._throttled.pop(token, None)
        self._start_batch()
        return await asyncio.shield(settled)

    def _enqueue_paid(self, path: list[int], row: int, priority: Priority) -> asyncio.Future[bool]:
        """Queue a path that was paid for; what says whether `row`, at its end or on its way already, is durable."""
        for member in path:
            self._enqueue(member, priority)
        if self._is_coming(row):
            return self._enqueue(row, priority).settled
        settled: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        settled.set_result(False)  # its prefix was too long to go at once: that went first
        return settled

    def _is_coming(self, row: int) -> bool:
        token = self._residency.token(row)
        return token in self._waiting or token in self._running

    def _when_synced(self) -> asyncio.Future[bool]:
        """What says that the copies which are written by now are durable."""
        settled: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._unsynced.settled.append(settled)
        self._sync_soon()
        return settled

    async def progress(self) -> bool:
        """Wait until a write has ended, starting those that still gather; False when there is nothing to wait for."""
        self._start_batch()
        writes = [write.written for write in self._running.values()]
        if not writes:
            return False
        await asyncio.wait(writes, return_when=asyncio.FIRST_COMPLETED)
        return True

    async def flush(self, timeout_s: float) -> int:
        """Write and sync everything that waits now; how much of it is still pending when the time is up."""
        self._start_batch()
        self._sync_soon()
        settling: dict[int, asyncio.Future[bool]] = {token: write.settled for token, write in self._running.items()}
        settling |= self._unsynced_rows | self._throttled
        if settling:
            await asyncio.wait(settling.values(), timeout=timeout_s)
        late = (self._running, self._unsynced_rows, self._throttled)
        return sum(any(token in pending for pending in late) for token in settling)

    async def sync(self) -> bool:
        """Make durable what was freed on NVMe before this call: no crash brings it back. False if that failed."""
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._nvme.sync(self._completions.to_loop(lambda outcome: done.set_result(outcome.ok)))
        return await asyncio.shield(done)

    # Writing

    def _enqueue(self, row: int, priority: Priority) -> _Write:
        token = self._residency.token(row)
        write = self._waiting.get(token) or self._running.get(token)
        if write is None:
            loop = asyncio.get_running_loop()
            write = _Write(
                token, priority, loop.create_future(), loop.create_future(), self._residency.slot(row, HOST).nbytes
            )
            self._waiting[token] = write
            self.gate.pending_bytes += write.nbytes
            self.gate.refusals.forget(token)
            self._residency.pin(row)
        elif priority < write.priority:
            write.priority = priority
            if write.ticket:
                self._mover.raise_priority(LANE, write.ticket, priority)
        return write

    def _start_batch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch, self._waiting = self._waiting, {}
        for token, write in batch.items():
            self._running[token] = write
            row = self._residency.current(token)
            slot = self._room.allocate_now(self._residency.slot(row, HOST).nbytes, self._residency.tenant_of(row))
            if slot is not None:
                self._begin(write, row, slot)
            else:
                task = asyncio.create_task(self._find_room(write, row))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _find_room(self, write: _Write, row: int) -> None:
        try:
            slot = await self._room.allocate(self._residency.slot(row, HOST).nbytes, self._residency.tenant_of(row))
        except Exception:  # a mistake of ours must not leave its block pinned and its waiters waiting for ever
            log.exception("making room on NVMe failed")
            slot = None
        if slot is None:
            self._give_up(write, row, Refusal.ROOM)
        else:
            self._begin(write, row, slot)

    def _give_up(self, write: _Write, row: int, refusal: Refusal) -> None:
        """Nothing of it was written, so nothing of it is charged."""
        self.gate.refund(row, write.nbytes)
        self.gate.refuse(row, refusal)
        self._finish(write, False)

    def _begin(self, write: _Write, row: int, slot: Slot) -> None:
        """Queue the write; the row is pinned, so its host copy stays until the end."""
        residency = self._residency
        if residency.is_held_by_another(row, NVME):
            # Only keys that clients chose can be equal between tenants, and NVMe knows blocks by key alone: it keeps
            # the first, and whoever comes second is told that his is volatile.
            self._nvme.free(slot)
            self._give_up(write, row, Refusal.OTHER_TENANT)
            return
        if not self.gate.breaker.takes_writes:
            self._nvme.free(slot)
            self._give_up(write, row, Refusal.TIER)
            return
        source, key = self._host.slot_segment(residency.slot(row, HOST)), residency.key(row)
        residency.attach(row, NVME, slot, self._clock.monotonic_ns(), filling=True)

        def start(done: Completion) -> None:
            write.number = self.gate.breaker.began()
            self._nvme.move_in(slot, source, key, done)

        transfer = Transfer(start, lambda outcome: self._written(write, row, slot, outcome))
        ticket = self._mover.submit(LANE, write.priority, slot.nbytes, transfer)
        if isinstance(ticket, Refused):
            self._nvme.free(residency.detach(row, NVME))
            self._give_up(write, row, Refusal.BEHIND)
            return
        write.ticket = ticket

    def _written(self, write: _Write, row: int, slot: Slot, outcome: Outcome) -> None:
        residency = self._residency
        self.gate.breaker.ended(write.number, "write", outcome)
        if outcome.ok:
            residency.publish(row, NVME, self._clock.monotonic_ns())
            self._unsynced.tokens.append(write.token)
            self._unsynced.settled.append(write.settled)
            self._unsynced_rows[write.token] = write.settled
            self._counters.add("written_back_blocks")
            self._counters.add("written_back_bytes", slot.nbytes)
            self._flows.tiers[HOST].demoted_blocks += 1
            self._finish(write, True)
        else:
            self._nvme.free(residency.detach(row, NVME))
            if outcome.kind is not OutcomeKind.CANCELLED:
                self._counters.add("write_failures")
                log.warning("block %s cannot be written: %s", residency.key(row).hex(), outcome.message)
                self.gate.refuse(row, Refusal.WRITE_FAILED)
            else:
                self.gate.refund(row, write.nbytes)
                self.gate.refuse(row, Refusal.TIER)
            self._finish(write, False)
        if not self._running or len(self._unsynced.tokens) >= self._batch_blocks:
            self._sync_soon()
        elif self._sync_timer is None:  # a steady stream of writes must not put the sync off for ever
            self._sync_timer = asyncio.get_running_loop().call_later(self._delay_ms / 1000, self._sync_soon)

    def _cancel_queued(self) -> None:
        """NVMe is shed: what has not begun is not waited for, and its DRAM copies may leave again."""
        for write in list(self._running.values()):
            self._mover.cancel(LANE, write.ticket)

    def _finish(self, write: _Write, written: bool) -> None:
        del self._running[write.token]
        self.gate.pending_bytes -= write.nbytes
        row = self._residency.current(write.token)
        if row >= 0:
            self._residency.unpin(row)
        if not write.written.done():
            write.written.set_result(written)
        if not written and not write.settled.done():
            write.settled.set_result(False)

    # Group commit

    def _sync_soon(self) -> None:
        """One sync at a time; what is written meanwhile goes with the next one."""
        if self._sync_timer is not None:
            self._sync_timer.cancel()
            self._sync_timer = None
        if self._sync_running or not (self._unsynced.tokens or self._unsynced.settled):
            return
        self._sync_running = True
        batch, self._unsynced = self._unsynced, _Unsynced()
        self.gate.commit_begins(more_to_come=bool(self._running or self._waiting))
        number = self.gate.breaker.began()
        self._nvme.sync(self._completions.to_loop(lambda outcome: self._synced(batch, number, outcome)))

    def _synced(self, batch: _Unsynced, number: int, outcome: Outcome) -> None:
        self._sync_running = False
        self.gate.breaker.ended(number, "sync", outcome)
        left: list[int] = []
        if outcome.ok:
            self._counters.add("durable_blocks", len(batch.tokens))
        else:
            log.error("NVMe sync failed, %d blocks stay volatile: %s", len(batch.tokens), outcome.message)
            left = [token for token in batch.tokens if self._residency.is_current(token)]
            self._unsynced.tokens.extend(left)  # the next sync tries again; nothing calls them durable until then
        for token in set(batch.tokens).difference(left):
            self._unsynced_rows.pop(token, None)
        for settled in batch.settled:
            if not settled.done():
                settled.set_result(outcome.ok)
        if outcome.ok and not self._running:
            self._sync_soon()
