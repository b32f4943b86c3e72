"""Write-back gives blocks in memory a copy in the durable tier, after the client's answer or before it.

The module owns the blocks that wait to be written. Writes of a batch run side by side, and group_commit.py makes them
durable together. Write-through (modes batch and always) and the demotion of victims use it. A block is charged to the
endurance budget before it is written, and is written together with its ancestors that are in memory alone. A block
whose write waits for the budget waits in a task of its own, and is not pinned meanwhile. Invariants: a block is written
once, and waits once, however many callers ask; a pinned copy in memory is read from, never copied first; no uncharged
byte is written.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence

from kvstore_tiers.base import Outcome, OutcomeKind, Slot
from kvstored.store.blocks import Residency
from kvstored.store.degraded.modes import DegradedModes
from kvstored.store.endurance.budget import WriteVerdict
from kvstored.store.transfer.gate import Refusal, Write, WriteState
from kvstored.store.transfer.group_commit import GroupCommit
from kvstored.store.transfer.lane import Priority
from kvstored.store.transfer.link import TierLink
from kvstored.store.transfer.moves import Moves, Unmoved
from kvstored.store.transfer.room import Room
from kvstored.telemetry import Counters, Flows
from kvstored.tier_set import TIER_SETS

log = logging.getLogger(__name__)
MAX_THROTTLED = 4096  # puts that wait for the budget at once


class _Writes(Moves[Write]):
    """Moves of the gate's backlog, which the group commit follows."""

    def __init__(self, residency: Residency, room: Room, commit: GroupCommit) -> None:
        super().__init__(residency, room.allocate)
        self.under_way = commit.backlog.writes
        self._commit = commit

    def hindrance(self, row: int) -> Refusal | None:
        """Return the reason why a block cannot be written now that it has a slot; None if there is no reason."""
        if self._residency.is_held_by_another(row, self._residency.durable):
            # Only keys that clients chose can be equal between tenants, and NVMe knows blocks by key alone: it keeps
            # the first, and the second tenant's block stays volatile.
            return Refusal.OTHER_TENANT
        return None if self._commit.gate.breaker.takes_writes else Refusal.TIER

    def _is_wanted(self, move: Write, row: int) -> bool:
        return super()._is_wanted(move, row) and self.hindrance(row) is None

    def _begun(self, moves: Sequence[Write]) -> None:
        self._commit.begun(moves)

    def _ended(self, move: Write, outcome: Outcome) -> None:
        if move.state is WriteState.BEGUN:
            self._commit.ended(move, went_well=outcome.ok)


class WriteBack:
    """A component that writes blocks to the durable tier. `links` has one link from each tier in memory; `room`
    allocates slots in the durable tier."""

    def __init__(
        self,
        residency: Residency,
        links: Sequence[TierLink],
        room: Room,
        counters: Counters,
        flows: Flows,
        commit: GroupCommit,
        modes: DegradedModes,
    ) -> None:
        gate = commit.gate
        self._residency = residency
        self._links = {link.source: link for link in links}
        self._position = residency.durable
        self._room = room
        self._counters = counters
        self._flows = flows
        self.gate = gate
        self._backlog = gate.backlog
        self._writes = _Writes(residency, room, commit)
        self._waiting: dict[int, asyncio.Future[bool]] = {}  # for the budget, by token
        self._tier = links[0].destination_tier
        self._commit = commit
        self._timer: asyncio.TimerHandle | None = None
        self._next_end: asyncio.Future[None] | None = None  # of any write, while a caller waits for it
        modes.on_change.append(self._follow_mode)

    # Questions

    def wants(self, row: int) -> bool:
        """Return whether the block at `row`, which is being evicted, should be written: no other tier has a copy, and
        either the gate admits it or other blocks in its chain need it.
        """
        if len(TIER_SETS[self._residency.tier_mask(row)]) > 1:
            return False
        return self.gate.breaker.takes_writes and (self._residency.dependents(row) > 0 or self.gate.admits(row))

    def is_durable(self, row: int) -> bool:
        return (
            self._residency.has(row, self._position)
            and self._residency.token(row) not in self._commit.pending
            and self._tier.keeps_recovered
        )

    def are_durable(self, rows: Sequence[int]) -> list[bool]:
        """Return a list of bools, one for each of `rows`: True if its block is durable. All are False when the medium
        is gone."""
        if not self.gate.breaker.serves_reads or not self._tier.keeps_recovered:
            return [False] * len(rows)
        has, pending = self._residency.has, self._commit.pending
        if not pending:
            return [has(row, self._position) for row in rows]
        return [has(row, self._position) and self._residency.token(row) not in pending for row in rows]

    def fitting(self, rows: Sequence[int]) -> int:
        """Return how many of the leading `rows`, the last used first, the durable tier can take without giving up a
        block that was used as late."""
        last_ns, taken, leaving = self._residency.last_access_ns, list[Slot](), set[int]()
        try:
            for number, row in enumerate(rows):
                nbytes, tenant = self._residency.slot_bytes(row), self._residency.tenant_of(row)
                if (slot := self._room.allocate_now(nbytes, tenant)) is not None:
                    taken.append(slot)
                    continue
                victim = self._room.next_victim(nbytes, tenant, leaving)
                if victim >= 0 and last_ns(victim) >= last_ns(row):
                    return number
                leaving.add(victim)
            return len(rows)
        finally:
            for slot in taken:
                self._tier.free(slot)

    def settled(self, row: int) -> asyncio.Future[bool] | None:
        """Return a future that resolves to whether the block at `row` is durable, or None when no write or sync of it
        is under way. The call makes the write no more urgent."""
        token = self._residency.token(row)
        write = self._backlog.writes.get(token)
        return write.settled if write is not None else self._waiting.get(token) or self._commit.pending.get(token)

    def pending(self) -> int:
        """Return how many blocks are being written, wait for budget, or wait for a sync."""
        return len(self._backlog.writes) + len(self._commit.pending) + len(self._waiting)

    # Orders

    def write_through_run(self, rows: Sequence[int], *, at_once: bool = False) -> list[asyncio.Future[bool]]:
        """Write the blocks `rows`, in chain order, as `write_through` does for each. Return the future of each."""
        found: list[asyncio.Future[bool]] = []
        for run in self._residency.rows.chains_of(rows):
            path = None if self._waiting else self.gate.pay_run(run)
            if path is None:
                found += [self.write_through(row, at_once=at_once) for row in run]
                continue
            priority = Priority.DEMAND if at_once else Priority.DEMOTION
            found += [self._enqueue(row, priority).settled for row in path][-len(run) :]
            self._begin_soon(at_once)
        return found

    def write_through(self, row: int, *, at_once: bool = False) -> asyncio.Future[bool]:
        """Write the block at `row` if the budget of writes allows it. Return a future that resolves to True when the
        block is durable, False when it will not be. With `at_once` a client waits, so the write has the highest
        priority."""
        if self._residency.has(row, self._position):
            if self._tier.keeps_recovered and not self.is_durable(row):
                return self._commit.when_synced()
            return _resolved(self.are_durable([row])[0])  # nothing is promised anew of a medium that is gone
        token = self._residency.token(row)
        if token in self._waiting:
            return self._waiting[token]
        paid = [] if self.gate.is_coming(row) else self.gate.pay(row)
        if not isinstance(paid, WriteVerdict):
            settled = self._enqueue_paid(paid, row, Priority.DEMAND if at_once else Priority.DEMOTION)
        elif (at_once or paid is WriteVerdict.SAVING) and len(self._waiting) < MAX_THROTTLED:
            settled = self._wait_for_budget(token, paid, insists=at_once)
        else:
            self.gate.refuse(token, self.gate.breaker_or(paid))
            settled = _resolved(False)
        self._begin_soon(at_once)
        return settled

    def _begin_soon(self, at_once: bool) -> None:
        if at_once or len(self._backlog.gathering) >= self._commit.batch.blocks:
            self._start_batch()
        elif self._timer is None and self._backlog.gathering:
            delay_s = self._commit.batch.delay_ms / 1000 / 2
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._start_batch)

    async def write_back(self, row: int) -> bool:
        """Write the block at `row`, which is being evicted, with the priority of demand. Return whether it has a copy
        on NVMe; the copy becomes durable a little later. It does not wait for a spent budget.
        """
        if self._residency.has(row, self._position):
            return True
        token = self._residency.token(row)
        if not self.gate.is_coming(row):
            paid = await self.gate.pay_in_time(token, insists=False)
            row = self._residency.current(token)
            if paid is None or row < 0:
                return False
            self._enqueue_paid(paid, row, Priority.DEMAND)
            if not self.gate.is_coming(row):
                return self._residency.has(row, self._position)
        write = self._enqueue(row, Priority.DEMAND)
        self._start_batch()
        assert write.ended is not None
        return await asyncio.shield(write.ended)

    def write_again(self, tokens: Iterable[int]) -> None:
        """Write the blocks that `tokens` name, if they still exist. Their durable copies were damaged."""
        for row in map(self._residency.current, tokens):
            if row >= 0:
                self.write_through(row)

    async def progress(self) -> bool:
        """Start the writes that are gathered for a batch, and wait until any write has ended. Return False when none is
        under way.
        """
        self._start_batch()
        if not self._backlog.writes:
            return False
        if self._next_end is None:  # one for all callers: hundreds of promotions may, for as many writes
            self._next_end = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._next_end)
        return True

    async def flush(self, timeout_s: float) -> int:
        """Write and sync every block that waits now. Return how many of them are still not durable after `timeout_s`
        seconds.
        """
        self._start_batch()
        self._commit.begin()
        settling = {token: write.settled for token, write in self._backlog.writes.items()}
        settling |= self._commit.pending | self._waiting
        if settling:
            await asyncio.wait(settling.values(), timeout=timeout_s)
        late = (self._backlog, self._commit.pending, self._waiting)
        return sum(any(token in pending for pending in late) for token in settling)

    async def sync(self) -> bool:
        """Sync NVMe, so that no crash brings back a block that was freed before this call. Return False if the sync
        failed."""
        return (await self._commit.sync()).ok

    def _follow_mode(self, _part: str) -> None:
        """Cancel the writes that have not begun when NVMe is shed: their copies in memory may be evicted again."""
        if self.gate.breaker.serves_reads:
            return
        for write in list(self._backlog.writes.values()):
            write.cancel()

    # Waiting for the budget

    def _wait_for_budget(self, token: int, verdict: WriteVerdict, *, insists: bool) -> asyncio.Future[bool]:
        """Write a block once it is paid for. `insists`: wait until the budget has earned enough; otherwise wait only
        for an allotment that is under way."""
        if verdict is not WriteVerdict.SAVING:
            self._counters.add("budget_throttled_blocks")
        self._waiting[token] = task = asyncio.get_running_loop().create_task(self._when_paid(token, insists))
        return task

    async def _when_paid(self, token: int, insists: bool) -> bool:
        settled = None
        try:
            paid = await self.gate.pay_in_time(token, insists=insists)
            row = self._residency.current(token)
            if paid is not None and row >= 0:
                if self._residency.has(row, self._position):
                    settled = self._commit.when_synced()
                else:
                    settled = self._enqueue_paid(paid, row, Priority.DEMAND if insists else Priority.DEMOTION)
                    self._start_batch()
        except Exception:  # a mistake of ours is no client's
            log.exception("waiting for the endurance budget failed")
        finally:
            del self._waiting[token]
        return await asyncio.shield(settled) if settled is not None else False

    # Writing

    def _enqueue_paid(self, path: list[int], row: int, priority: Priority) -> asyncio.Future[bool]:
        """Queue the rows of `path`, which were paid for. Return a future that resolves to whether `row`, which is at
        the end of the path or on its way already, is durable.
        """
        for member in path:
            self._enqueue(member, priority)
        if self.gate.is_coming(row):
            return self._enqueue(row, priority).settled
        return _resolved(False)  # its prefix was too long for one write: that was queued first

    def _enqueue(self, row: int, priority: Priority) -> Write:
        residency, token = self._residency, self._residency.token(row)
        write = self._writes.find(token)
        if write is None:
            link = self._links[residency.fastest_in_memory(row)]
            write = Write(token, residency.slot_bytes(row), residency.tenant_of(row), link, priority)
            self._writes.add(write)
            self._backlog.gathering.append(write)
            self._backlog.nbytes += write.nbytes
            self.gate.begins(token)
            return write
        write.is_asked_again |= write.has_ended
        if priority < write.priority:
            write.raise_priority(priority)
        return write

    def _start_batch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch, self._backlog.gathering = self._backlog.gathering, []
        ready: list[Write] = []  # neighbours of one size
        for write in batch:
            row = self._residency.current(write.token)
            source = self._residency.fastest_in_memory(row) if row >= 0 else -1
            if source >= 0:
                write.link = self._links[source]  # where it gathered, the copy that it had then may have been lost
            if row < 0 or write.link.staging is not None:
                self._writes.begin([write], self._write)
                continue
            if ready and (write.nbytes, write.tenant) != (ready[0].nbytes, ready[0].tenant):
                self._begin_run(ready)
                ready = []
            ready.append(write)
        if ready:
            self._begin_run(ready)

    def _begin_run(self, run: list[Write]) -> None:
        is_first = self.gate.breaker.takes_writes and not self._writes.without_slot
        slots = self._room.allocate_run(len(run), run[0].nbytes, run[0].tenant, evicting=is_first)
        self._writes.begin(run, self._write, slots)

    async def _write(self, write: Write) -> bool:
        is_written = False
        try:
            outcome = await self._writes.copied(write)
            if write.is_asked_again and write.state is WriteState.QUEUED:  # with more urgency, perhaps
                outcome = await self._writes.copied(write)
            is_written = isinstance(outcome, Outcome) and outcome.ok
            if is_written:
                self._counters.add("written_back_blocks")
                self._counters.add("written_back_bytes", write.slot_bytes)
                if write.slot_bytes < write.nbytes:
                    self.gate.refund(write.tenant, write.nbytes, write.slot_bytes)
                self._flows.tiers[write.link.source].demoted_blocks += 1
            else:
                self._refuse(write, outcome)
        finally:
            self._backlog.nbytes -= write.nbytes
            self._backlog.begun -= write.state is not WriteState.QUEUED
            self._writes.end(write)
            if not is_written and not write.settled.done():
                write.settled.set_result(False)
            if self._next_end is not None:
                self._next_end.set_result(None)
                self._next_end = None
        return is_written

    def _refuse(self, write: Write, outcome: Outcome | Unmoved) -> None:
        """Note why a block was not written, if the block still exists. The charge for a block that was not written is
        refunded."""
        row = self._residency.current(write.token)
        why: Refusal | None
        is_cancelled = isinstance(outcome, Outcome) and outcome.kind is OutcomeKind.CANCELLED
        if is_cancelled or write.state is WriteState.QUEUED:
            self.gate.refund(write.tenant, write.nbytes)
        if isinstance(outcome, Outcome) and not is_cancelled:
            self._counters.add("write_failures")
            key = self._residency.key(row).hex() if row >= 0 else "that is gone"
            log.warning("block %s cannot be written: %s", key, outcome.message)
            why = Refusal.WRITE_FAILED
        elif outcome is Unmoved.IN_VAIN:
            why = self._writes.hindrance(row) if row >= 0 else None
        else:
            why = _UNMOVED.get(outcome, Refusal.TIER) if isinstance(outcome, Unmoved) else Refusal.TIER
        if row >= 0 and why is not None:
            self.gate.refuse(write.token, why)


_UNMOVED = {Unmoved.NO_ROOM: Refusal.ROOM, Unmoved.LANE_FULL: Refusal.BEHIND}


def _resolved(answer: bool) -> asyncio.Future[bool]:
    future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    future.set_result(answer)
    return future
