"""Write-back: give blocks in memory a copy in the durable tier, after the client's answer or before it.

Owns the blocks that wait to be written: writes of a batch run side by side, and group_commit.py makes them durable
together. Used for write-through (modes batch and always) and for demotion of victims. What is written is charged to the
endurance budget first (budget_wait.py waits for it), and is written with those of its ancestors that are in memory
alone. Invariants: a block is written once however many callers ask; a pinned copy in memory is read from, never copied
first; nothing is written that was not charged. Damage removes blocks by force, pinned or not: after each wait the token
is looked up again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

from kvstore_tiers.base import Outcome, OutcomeKind, Slot
from kvstored.completions import CompletionQueue
from kvstored.store.blocks import Residency
from kvstored.store.endurance import Verdict
from kvstored.store.transfer.backlog import Write
from kvstored.store.transfer.budget_wait import BudgetWait
from kvstored.store.transfer.gate import WriteGate
from kvstored.store.transfer.group_commit import BatchLimits, GroupCommit
from kvstored.store.transfer.items import Priority
from kvstored.store.transfer.link import Link
from kvstored.store.transfer.room import Room
from kvstored.store.transfer.write_refusals import Refusal
from kvstored.telemetry import Counters, Flows

log = logging.getLogger(__name__)


class WriteBack:
    """Along `links`, one from each tier in memory to the durable one, whose room is `room`."""

    def __init__(
        self,
        residency: Residency,
        links: Sequence[Link],
        room: Room,
        completions: CompletionQueue,
        counters: Counters,
        flows: Flows,
        gate: WriteGate,
        batch: BatchLimits,
    ) -> None:
        self._residency = residency
        self._links = {link.source: link for link in links}
        self._to_durable = links[0]
        self._position = residency.durable
        self._room = room
        self._counters = counters
        self._flows = flows
        self.gate = gate
        self._batch = batch
        self._backlog = gate.backlog
        self._budget_wait = BudgetWait(gate, counters, self._write_paid)
        self._tier = links[0].destination_tier
        self._commit = GroupCommit(self._tier, residency, completions, counters, gate, batch)
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._next_end: asyncio.Future[None] | None = None  # of any write, while a caller waits for it

    # Questions

    def admits(self, row: int) -> bool:
        """Whether a block is worth a write that no client insists on."""
        return self.gate.admits(row)

    def wants(self, row: int) -> bool:
        """Demotion: the last copy, and worth a write by `gate`, or the chain would get a hole without it."""
        mask = self._residency.tier_mask(row)
        if mask & (mask - 1):
            return False
        return self.gate.breaker.takes_writes and (self._residency.children(row) > 0 or self.gate.admits(row))

    def why_volatile(self, row: int) -> Refusal | None:
        """Why a block was not written; None when it was not asked for, or is on its way."""
        return self.gate.refusals.of(self._residency.token(row))

    def is_durable(self, row: int) -> bool:
        return (
            self._residency.has(row, self._position)
            and self._residency.token(row) not in self._commit.pending
            and self._tier.keeps_recovered
        )

    def are_durable(self, rows: Sequence[int]) -> list[bool]:
        """What may be promised of each: as `is_durable`, and nothing of a medium that is gone."""
        if not self.gate.breaker.serves_reads or not self._tier.keeps_recovered:
            return [False] * len(rows)
        has, pending = self._residency.has, self._commit.pending
        if not pending:
            return [has(row, self._position) for row in rows]
        return [has(row, self._position) and self._residency.token(row) not in pending for row in rows]

    def settled(self, row: int) -> asyncio.Future[bool] | None:
        """What says whether a block that is on its way becomes durable; None when it is not. Hurries nothing."""
        token = self._residency.token(row)
        write = self._backlog.find(token)
        if write is not None:
            return write.settled
        return self._budget_wait.pending.get(token) or self._commit.pending.get(token)

    def is_on_its_way(self, row: int) -> bool:
        """Whether the block will be durable if nothing goes wrong."""
        token = self._residency.token(row)
        return self.is_coming(row) or token in self._commit.pending or token in self._budget_wait.pending

    def pending(self) -> int:
        """Blocks on their way to being durable."""
        return len(self._backlog) + len(self._commit.pending) + len(self._budget_wait.pending)

    def write_through(self, row: int, *, at_once: bool = False) -> asyncio.Future[bool]:
        """Resolves to whether the block is durable. `at_once`: a client waits, at the priority of demand."""
        loop = asyncio.get_running_loop()
        if self._residency.has(row, self._position):
            if self._tier.keeps_recovered and not self.is_durable(row):
                return self._commit.when_synced()
            durable: asyncio.Future[bool] = loop.create_future()
            durable.set_result(self.are_durable([row])[0])  # nothing is promised anew of a medium that is gone
            return durable
        token = self._residency.token(row)
        if token in self._budget_wait.pending:
            return self._budget_wait.pending[token]
        paid = [] if self.is_coming(row) else self.gate.pay(row)
        if not isinstance(paid, Verdict):
            settled = self._enqueue_paid(paid, row, Priority.DEMAND if at_once else Priority.DEMOTION)
        elif (at_once or paid is Verdict.SAVING) and self._budget_wait.has_room:
            settled = self._budget_wait.wait(token, paid, insists=at_once)
        else:
            self.gate.refuse(row, self.gate.breaker_or(paid))
            settled = loop.create_future()
            settled.set_result(False)
        if at_once or len(self._backlog.gathering) >= self._batch.blocks:
            self._start_batch()
        elif self._timer is None and self._backlog.gathering:
            self._timer = loop.call_later(self._batch.delay_ms / 1000 / 2, self._start_batch)
        return settled

    async def write_back(self, row: int) -> bool:
        """Demotion for room that a caller waits for, so at the priority of demand. Resolves once the block has a copy
        on NVMe; that it is durable comes a little later. A budget that is spent is not waited for."""
        if self._residency.has(row, self._position):
            return True
        token = self._residency.token(row)
        if not self.is_coming(row):
            paid = await self.gate.pay_in_time(token, insists=False)
            row = self._residency.current(token)
            if paid is None or row < 0:
                return False
            self._enqueue_paid(paid, row, Priority.DEMAND)
            if not self.is_coming(row):
                return self._residency.has(row, self._position)
        write = self._enqueue(row, Priority.DEMAND)
        self._start_batch()
        return await asyncio.shield(write.written)

    def _write_paid(self, token: int, path: list[int], insists: bool) -> asyncio.Future[bool] | None:
        """For `BudgetWait`: its wait is over."""
        row = self._residency.current(token)
        if row < 0:
            return None
        if self._residency.has(row, self._position):
            return self._commit.when_synced()
        settled = self._enqueue_paid(path, row, Priority.DEMAND if insists else Priority.DEMOTION)
        self._start_batch()
        return settled

    def _enqueue_paid(self, path: list[int], row: int, priority: Priority) -> asyncio.Future[bool]:
        """Queue a path that was paid for; what says whether `row`, at its end or on its way already, is durable."""
        for member in path:
            self._enqueue(member, priority)
        if self.is_coming(row):
            return self._enqueue(row, priority).settled
        settled: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        settled.set_result(False)  # its prefix was too long for one write: that was queued first
        return settled

    def is_coming(self, row: int) -> bool:
        """Whether a write of the block waits or is under way."""
        return self.gate.is_coming(row)

    async def progress(self) -> bool:
        """Wait until a write has ended, starting those that still gather; False when there is nothing to wait for."""
        self._start_batch()
        if not self._backlog.running:
            return False
        if self._next_end is None:  # one for all callers: hundreds of promotions may, for as many writes
            self._next_end = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._next_end)
        return True

    async def flush(self, timeout_s: float) -> int:
        """Write and sync everything that waits now; how much of it is still pending when the time is up."""
        self._start_batch()
        self._commit.begin()
        running = self._backlog.running
        settling: dict[int, asyncio.Future[bool]] = {token: write.settled for token, write in running.items()}
        settling |= self._commit.pending | self._budget_wait.pending
        if settling:
            await asyncio.wait(settling.values(), timeout=timeout_s)
        late = (self._backlog.running, self._commit.pending, self._budget_wait.pending)
        return sum(any(token in pending for pending in late) for token in settling)

    def sync(self) -> asyncio.Future[bool]:
        """Make durable what was freed on NVMe before this call: no crash brings it back. False if that failed."""
        return self._commit.sync()

    # Writing

    def _enqueue(self, row: int, priority: Priority) -> Write:
        token = self._residency.token(row)
        write = self._backlog.find(token)
        if write is None:
            loop = asyncio.get_running_loop()
            write = Write(
                token, self._residency.tenant_of(row), priority, self._residency.slot_bytes(row),
                loop.create_future(), loop.create_future(),
            )  # fmt: skip
            self._backlog.add(write)
            self.gate.refusals.forget(token)
            self._residency.pin(row)
        elif priority < write.priority:
            write.priority = priority
            if write.link is not None:
                write.link.raise_priority(write.ticket, priority)
        return write

    def _start_batch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for write in self._backlog.start():  # all of them, before anything that may fail
            if not self._residency.is_current(write.token):
                self._abandon(write)
                continue
            slot = self._room.allocate_now(write.nbytes, write.tenant)
            if slot is not None:
                self._begin(write, slot)
            else:
                task = asyncio.create_task(self._find_room(write))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _find_room(self, write: Write) -> None:
        try:
            slot = await self._room.allocate(write.nbytes, write.tenant)
        except Exception:  # a mistake of ours must not leave its block pinned and its waiters waiting for ever
            log.exception("making room on NVMe failed")
            slot = None
        if slot is None:
            self._give_up(write, Refusal.ROOM)
        elif not self._residency.is_current(write.token):
            self._to_durable.free(slot)
            self._abandon(write)
        else:
            self._begin(write, slot)

    def _give_up(self, write: Write, refusal: Refusal) -> None:
        """Nothing of it was written, so nothing of it is charged."""
        self.gate.refusals.note(write.token, refusal)
        self._abandon(write)

    def _abandon(self, write: Write) -> None:
        """As `_give_up`, of a block that may be gone: no reason is kept."""
        self.gate.refund(write.tenant, write.nbytes)
        self._finish(write, False)

    def _begin(self, write: Write, slot: Slot) -> None:
        """Queue the write; the row is pinned, so its host copy stays until the end."""
        residency = self._residency
        row = residency.current(write.token)
        if residency.is_held_by_another(row, self._position):
            # Only keys that clients chose can be equal between tenants, and NVMe knows blocks by key alone: it keeps
            # the first, and the second tenant's block stays volatile.
            self._to_durable.free(slot)
            self._give_up(write, Refusal.OTHER_TENANT)
            return
        if not self.gate.breaker.takes_writes:
            self._to_durable.free(slot)
            self._give_up(write, Refusal.TIER)
            return
        link = self._links[residency.fastest_in_memory(row)]
        ended = partial(self._written, write, row, slot)
        ticket = link.begin(row, slot, write.priority, ended, partial(self._begun, write))
        if ticket is None:
            self._give_up(write, Refusal.BEHIND)
            return
        write.link, write.ticket = link, ticket

    def _begun(self, write: Write) -> None:
        self._backlog.begin()
        write.copy = self._commit.begun(write.token, write.settled)

    def _written(self, write: Write, row: int, slot: Slot, outcome: Outcome) -> None:
        residency = self._residency
        if write.copy is not None:
            self._commit.ended(write.copy, went_well=outcome.ok)
        if outcome.ok:
            self._counters.add("written_back_blocks")
            self._counters.add("written_back_bytes", slot.nbytes)
            if write.link is not None:
                self._flows.tiers[write.link.source].demoted_blocks += 1
            self._finish(write, True)
        else:
            if outcome.kind is not OutcomeKind.CANCELLED:
                self._counters.add("write_failures")
                log.warning("block %s cannot be written: %s", residency.key(row).hex(), outcome.message)
                self.gate.refuse(row, Refusal.WRITE_FAILED)
            else:
                self.gate.refund(write.tenant, write.nbytes)
                self.gate.refuse(row, Refusal.TIER)
            self._finish(write, False)

    def cancel_queued(self) -> None:
        """NVMe is shed: what has not begun is cancelled, and its DRAM copies may be evicted again."""
        for write in list(self._backlog.running.values()):
            if write.link is not None:
                write.link.cancel(write.ticket)

    def _finish(self, write: Write, written: bool) -> None:
        self._backlog.end(write)
        row = self._residency.current(write.token)
        if row >= 0:
            self._residency.unpin(row)
        if not write.written.done():
            write.written.set_result(written)
        if not written and not write.settled.done():
            write.settled.set_result(False)
        if self._next_end is not None:
            self._next_end.set_result(None)
            self._next_end = None
