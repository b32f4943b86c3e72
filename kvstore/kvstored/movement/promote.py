"""Promotion: give a block that lies on NVMe a copy in the host tier, once, however many ask.

Owns promotions under way. A slot of the host tier is filled by one direct I/O, verified by the NVMe tier; a block that
turns out damaged is quarantined and forgotten, its descendants become unreachable (placeholder), and the miss says why.
Invariants: the NVMe copy is pinned while it is read; a host slot is readable only after its bytes were verified;
prefetches that wait hold at most `prefetch_room_bytes` of the host tier, since a queued promotion has its slot already
and demand must find room beside any number of hints.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore_tiers.base import Completion, Outcome, OutcomeKind, Slot, Tier
from kvstore_tiers.host import HostTier
from kvstored.clock import Clock
from kvstored.degraded import TierBreaker
from kvstored.lifecycle import Cause
from kvstored.movement.damage import Damage
from kvstored.movement.lane import Priority, Refused
from kvstored.movement.mover import Mover, Transfer
from kvstored.movement.room import Room
from kvstored.residency import Residency
from kvstored.telemetry import Counters, Flows
from kvstored.tiering import HOST, NVME

log = logging.getLogger(__name__)
LANE = "nvme→host"
MAPPED_US = 1  # what a block that is mapped already costs to have
PATIENCE, LEAST_PATIENCE_MS = 8, 1000  # a read that takes so many times its estimate, and so long, is not waited for
OVERDUE_US = 250_000
MAX_SUSPECTS = 4096


@dataclass(slots=True)
class _Promotion:
    token: int
    priority: Priority
    nbytes: int
    future: asyncio.Future[bool]
    ticket: int = 0
    number: int = 0  # of the transfer, for the breaker
    slot: Slot | None = None


class Promoter:
    """See the module."""

    def __init__(
        self,
        residency: Residency,
        host: HostTier,
        nvme: Tier | None,
        room: Room,
        mover: Mover,
        clock: Clock,
        counters: Counters,
        flows: Flows,
        breaker: TierBreaker | None,
        *,
        prefetch_room_bytes: int,
        damage: Damage,
    ) -> None:
        self._residency = residency
        self._host = host
        self._nvme = nvme
        self._room = room
        self._mover = mover
        self._clock = clock
        self._counters = counters
        self._flows = flows
        self._breaker = breaker
        self._prefetch_room_bytes = prefetch_room_bytes
        self._damage = damage
        self._suspects: OrderedDict[int, None] = OrderedDict()  # tokens whose last read failed
        self._under_way: dict[int, _Promotion] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def reaches_nvme(self) -> bool:
        """Whether blocks that lie on NVMe alone can be had at all. If not, lookups and gets leave them out."""
        return self._breaker is None or self._breaker.serves_reads

    def is_out_of_reach(self, row: int) -> bool:
        """Whether the block is stored, but nobody can have it now."""
        return not (self.reaches_nvme or self._residency.has(row, HOST))

    def may_come_again(self, row: int) -> bool:
        """Whether a put of a block that is stored should give it a DRAM copy: NVMe has it, and is shed."""
        return self.is_out_of_reach(row) and not self._residency.being_filled(row)

    def reachable(self, rows: list[int]) -> list[int]:
        """-1 in the place of every row that is out of reach."""
        if self.reaches_nvme:
            return rows
        mask = self._residency.rows.mask
        return [row if row >= 0 and mask[row] >> HOST & 1 else -1 for row in rows]

    def reachable_run(self, rows: list[int]) -> list[int]:
        """The leading rows that are not out of reach."""
        if self.reaches_nvme:
            return rows
        mask = self._residency.rows.mask
        return rows[: next((at for at, row in enumerate(rows) if not mask[row] >> HOST & 1), len(rows))]

    def patience_ms(self, rows: Sequence[int]) -> int:
        """How long to wait for `rows` at most: a read that takes many times the estimate is not worth waiting for."""
        return max(LEAST_PATIENCE_MS, PATIENCE * sum(self.estimate_us(rows)) // 1000)

    def promote(self, row: int, priority: Priority) -> asyncio.Future[bool]:
        """Resolves to whether the block has a host copy. Joins a promotion under way, raising its priority."""
        token = self._residency.token(row)
        known = self._under_way.get(token)
        if known is not None:
            if priority < known.priority:
                self._hold_room(known, -1)
                known.priority = priority
                self._hold_room(known, +1)
                if known.ticket:
                    self._mover.raise_priority(LANE, known.ticket, priority)
            return known.future
        if not self.reaches_nvme:
            refused: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            refused.set_result(False)
            return refused
        nbytes = self._residency.slot(row, NVME).nbytes
        promotion = _Promotion(token, priority, nbytes, asyncio.get_running_loop().create_future())
        self._under_way[token] = promotion
        self._hold_room(promotion, +1)
        self._residency.pin(row)
        slot = self._room.allocate_now(nbytes, self._residency.tenant_of(row))
        if slot is not None:
            self._begin(promotion, slot)
        else:
            task = asyncio.create_task(self._find_room(promotion, row))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return promotion.future

    def prefetch(self, row: int) -> bool:
        """Queue a promotion that nobody waits for; False when those that wait hold all the room they may."""
        if not self.reaches_nvme or self._prefetch_room_bytes < self._residency.slot(row, NVME).nbytes:
            return False
        self.promote(row, Priority.PREFETCH)
        return True

    def estimate_us(self, rows: Sequence[int]) -> list[int]:
        """Microseconds that each row adds until all are mapped, were they asked for now in this order: the sum over a
        run is its load time. 0 for what is absent (-1)."""
        mask = self._residency.rows.mask
        lane = self._mover.lanes.get(LANE)
        ahead_bytes = 0
        ahead_us = -self._stall_us()  # the first block that has to be read waits for what hangs
        estimates = []
        for row in rows:
            if row < 0:
                estimates.append(0)
            elif mask[row] >> HOST & 1 or lane is None:
                estimates.append(MAPPED_US)
            else:
                ahead_bytes += self._residency.slot(row, NVME).nbytes
                until_us = round(lane.estimate_us(ahead_bytes))
                estimates.append(until_us - ahead_us)
                ahead_us = until_us
        return estimates

    async def _find_room(self, promotion: _Promotion, row: int) -> None:
        residency = self._residency
        try:
            slot = await self._room.allocate(residency.slot(row, NVME).nbytes, residency.tenant_of(row))
        except Exception:  # as in write-back: log it, and let those who wait go on
            log.exception("making room in DRAM failed")
            slot = None
        current = residency.current(promotion.token)
        if slot is None or current < 0 or not residency.has(current, NVME):
            if slot is not None:
                self._host.free(slot)
            self._finish(promotion, False)
            return
        self._begin(promotion, slot)

    def _begin(self, promotion: _Promotion, slot: Slot) -> None:
        """Queue the read into `slot`. The row is pinned, so its copies stay until the end."""
        residency, nvme = self._residency, self._nvme
        row = residency.current(promotion.token)
        assert nvme is not None and row >= 0
        source, key = residency.slot(row, NVME), residency.key(row)
        promotion.slot = slot
        residency.attach(row, HOST, slot, self._clock.monotonic_ns(), filling=True)
        destination = self._host.slot_segment(slot)

        def start(done: Completion) -> None:
            if self._breaker is not None:
                promotion.number = self._breaker.began()
            nvme.move_out(source, destination, key, done)

        transfer = Transfer(start, lambda outcome: self._read(promotion, outcome))
        ticket = self._mover.submit(LANE, promotion.priority, source.nbytes, transfer)
        if isinstance(ticket, Refused):
            self._give_back(promotion, row)
            return
        promotion.ticket = ticket

    def _read(self, promotion: _Promotion, outcome: Outcome) -> None:
        residency = self._residency
        row = residency.current(promotion.token)
        assert row >= 0 and promotion.slot is not None, "a pinned row went away under its promotion"
        if self._breaker is not None:
            self._breaker.ended(promotion.number, "read", outcome)
        if outcome.ok:
            residency.publish(row, HOST, self._clock.monotonic_ns())
            self._suspects.pop(promotion.token, None)
            self._counters.add("promoted_blocks")
            self._counters.add("promoted_bytes", promotion.slot.nbytes)
            if promotion.priority is Priority.PREFETCH:
                self._counters.add("prefetched_blocks")
            self._flows.tiers[NVME].promoted_blocks += 1
            self._finish(promotion, True)
        elif outcome.kind is OutcomeKind.CORRUPT:
            self._damage.on_nvme(row, outcome.message)
            self._finish(promotion, False)
        else:
            self._unreadable(promotion, row, outcome)

    def _unreadable(self, promotion: _Promotion, row: int, outcome: Outcome) -> None:
        """The medium refused. Once may be chance; a block that fails twice while others are read is given up."""
        key = self._residency.key(row).hex()
        if outcome.kind is not OutcomeKind.FAILED or not self.reaches_nvme:
            self._give_back(promotion, row)
            return
        self._counters.add("read_failures")
        if promotion.token not in self._suspects:
            log.warning("block %s cannot be read: %s", key, outcome.message)
            self._suspects[promotion.token] = None
            if len(self._suspects) > MAX_SUSPECTS:
                self._suspects.popitem(last=False)
            self._give_back(promotion, row)
            return
        del self._suspects[promotion.token]
        self._counters.add("given_up_blocks")
        log.error("block %s cannot be read (%s): given up, will be recomputed", key, outcome.message)
        orphans = self._residency.children(row)
        self._put_aside(row, Cause.READ_FAILED, outcome.message)
        if orphans:
            self._counters.add("orphaned_blocks", orphans)
        self._finish(promotion, False)

    def _put_aside(self, row: int, cause: Cause, reason: str) -> None:
        """Out of the index; the slot on NVMe is kept out of use."""
        assert self._nvme is not None
        for taken in self._residency.remove(row, cause, self._clock.monotonic_ns()):
            if taken.tier == HOST:
                self._host.free(taken.slot)
            else:
                self._nvme.quarantine(taken.slot, reason)

    def fail_waiters(self) -> None:
        """NVMe is shed: who waits gets a shorter prefix now, and what is queued gives its place in DRAM back. What is
        in flight still ends by itself."""
        for promotion in list(self._under_way.values()):
            if not promotion.future.done():
                promotion.future.set_result(False)
            self._mover.cancel(LANE, promotion.ticket)

    def _stall_us(self) -> int:
        """By how much the oldest transfer is overdue: what a reader has to expect on top."""
        if self._breaker is None:
            return 0
        stalled_us = self._breaker.stalled_us()
        return stalled_us if stalled_us > OVERDUE_US else 0

    def _give_back(self, promotion: _Promotion, row: int) -> None:
        self._host.free(self._residency.detach(row, HOST))
        self._finish(promotion, False)

    def _finish(self, promotion: _Promotion, mapped: bool) -> None:
        del self._under_way[promotion.token]
        self._hold_room(promotion, -1)
        row = self._residency.current(promotion.token)
        if row >= 0:
            self._residency.unpin(row)
        if not promotion.future.done():
            promotion.future.set_result(mapped)

    def _hold_room(self, promotion: _Promotion, sign: int) -> None:
        if promotion.priority is Priority.PREFETCH:
            self._prefetch_room_bytes -= sign * promotion.nbytes
