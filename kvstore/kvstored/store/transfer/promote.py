"""Promotion: give a block of a slower tier a copy in the mapped tier, once, however many callers ask.

Owns promotions under way. The block is read by the link of the fastest tier that has it and can be read, verified on
the way; one that turns out damaged there is forgotten, its descendants become unreachable (placeholder), and the miss
says why. Invariants: the copy is pinned while it is read; a slot is readable only after its bytes were verified;
prefetches that wait hold at most `prefetch_room_bytes` of the mapped tier, since a queued promotion has its slot and
demand must find room beside any number of hints.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore_proto.arena import slot_bytes
from kvstore_tiers.base import Outcome, OutcomeKind, Slot
from kvstored.lifecycle import Cause
from kvstored.store.blocks import Residency
from kvstored.store.degraded import TierBreaker
from kvstored.store.transfer.damage import Damage
from kvstored.store.transfer.items import Priority
from kvstored.store.transfer.link import Link
from kvstored.store.transfer.room import Room
from kvstored.telemetry import Counters, Flows

log = logging.getLogger(__name__)
MAPPED_US = 1  # what a block that is mapped already costs to have
PATIENCE, LEAST_PATIENCE_MS = 8, 1000  # no request waits for a read that takes so many times its estimate, and so long
OVERDUE_US = 250_000
MAX_SUSPECTS = 4096


@dataclass(slots=True)
class _Promotion:
    token: int
    priority: Priority
    nbytes: int
    future: asyncio.Future[bool]
    link: Link
    due_ns: int | None = None  # when the last of those that wait first stops waiting
    ticket: int = 0
    waiters: int = 1  # a hint is one, and never gives up
    ended: Callable[[bool, bool], None] | None = None


class Promoter:
    """`links` lead to the mapped tier from every other one, fastest first."""

    def __init__(
        self,
        residency: Residency,
        links: Sequence[Link],
        room: Room,
        counters: Counters,
        flows: Flows,
        damage: Damage,
        *,
        prefetch_room_bytes: int,
    ) -> None:
        self._residency = residency
        self._links = {link.source: link for link in links}
        self._gated = [link for link in links if link.breaker is not None]
        self._room = room
        self._counters = counters
        self._flows = flows
        self._prefetch_room_bytes = prefetch_room_bytes
        self._damage = damage
        self._suspects: OrderedDict[int, None] = OrderedDict()  # tokens whose last read failed
        self._under_way: dict[int, _Promotion] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._demanded: Counter[int] = Counter()  # by tenant
        self._seeking: set[int] = set()  # tokens of prefetches for which room is being made

    @property
    def reaches_all(self) -> bool:
        """Whether every tier below can be read now. If not, lookups and gets leave out what only the others have."""
        return all(link.is_open for link in self._gated)

    @property
    def _reach(self) -> int:
        """The tiers that can be read now, as a mask."""
        return 1 << self._residency.mapped | sum(1 << link.source for link in self._links.values() if link.is_open)

    def is_out_of_reach(self, row: int) -> bool:
        """Whether the block is stored, but cannot be read now."""
        return not self.reaches_all and not self._residency.tier_mask(row) & self._reach

    def needs_new_copy(self, row: int) -> bool:
        """Whether a put of a block that is stored should give it a new copy: the tier that has it is shed."""
        return self.is_out_of_reach(row) and not self._residency.being_filled(row)

    def reachable(self, rows: list[int]) -> list[int]:
        """-1 in the place of every row that is out of reach."""
        if self.reaches_all:
            return rows
        mask, reach = self._residency.rows.mask, self._reach
        return [row if row >= 0 and mask[row] & reach else -1 for row in rows]

    def reachable_run(self, rows: list[int]) -> list[int]:
        """The leading rows that are not out of reach."""
        if self.reaches_all:
            return rows
        mask, reach = self._residency.rows.mask, self._reach
        return rows[: next((at for at, row in enumerate(rows) if not mask[row] & reach), len(rows))]

    def patience_ms(self, rows: Sequence[int]) -> int:
        """How long to wait for `rows` at most: a read that takes many times the estimate is not worth waiting for."""
        return max(LEAST_PATIENCE_MS, PATIENCE * sum(self.estimate_us(rows)) // 1000)

    def promote(self, row: int, priority: Priority, due_ns: int | None = None) -> asyncio.Future[bool]:
        """Resolves to whether the block has a mapped copy. Joins a promotion under way, raising its priority. `due_ns`:
        when the caller stops waiting."""
        token = self._residency.token(row)
        known = self._under_way.get(token)
        if known is not None:
            known.waiters += 1
            if priority < known.priority:
                self._hold_room(known, -1)
                known.priority, known.due_ns = priority, due_ns
                self._hold_room(known, +1)
            elif due_ns is not None:
                known.due_ns = due_ns if known.due_ns is None else min(known.due_ns, due_ns)
            if known.ticket and priority == known.priority:
                known.link.raise_priority(known.ticket, priority, known.due_ns)
            return known.future
        link = self._link_of(row)
        residency = self._residency
        if link is None or residency.state(row, residency.mapped):  # a put is filling it: its tier was out of reach
            future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            future.set_result(self._residency.has(row, self._residency.mapped))
            return future
        slot = self._room.allocate_now(self._residency.slot_bytes(row), self._residency.tenant_of(row))
        return self._new(row, priority, link, slot, due_ns).future

    def _new(
        self, row: int, priority: Priority, link: Link, slot: Slot | None, due_ns: int | None = None
    ) -> _Promotion:
        """Begin to read into `slot`, or into one for which room is made first."""
        nbytes, future = self._residency.slot_bytes(row), asyncio.get_running_loop().create_future()
        promotion = _Promotion(self._residency.token(row), priority, nbytes, future, link, due_ns)
        self._under_way[promotion.token] = promotion
        self._hold_room(promotion, +1)
        self._residency.pin(row)
        if slot is not None:
            self._begin(promotion, slot)
        else:
            self._seek_room(promotion, row)
        return promotion

    def _seek_room(self, promotion: _Promotion, row: int) -> None:
        if promotion.priority is Priority.PREFETCH:
            self._seeking.add(promotion.token)
        task = asyncio.create_task(self._find_room(promotion, row))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def give_up(self, token: int) -> None:
        """A caller no longer waits for a promotion that has not ended. When no caller is left and the read has not
        begun, the promotion is cancelled."""
        promotion = self._under_way.get(token)
        if promotion is None:
            return
        promotion.waiters -= 1
        if not promotion.waiters and promotion.ticket:
            promotion.link.cancel(promotion.ticket)

    def prefetch(self, row: int) -> bool:
        """Queue a promotion that no client waits for; False when waiting promotions hold all the room they may, or
        fill the lane's queue."""
        link = self._link_of(row)
        if link is None or self._prefetch_room_bytes < self._residency.slot_bytes(row):
            return False
        self.promote(row, Priority.PREFETCH)
        return self.is_coming(row)

    def prefetch_if(self, row: int, pays: Callable[[int], bool], ended: Callable[[bool, bool], None]) -> bool:
        """As `prefetch`, of a block that is not coming yet: into a free slot, or one that the policy's next victim
        leaves, if `pays(victim)`. `ended(is_mapped, is_late)` is called at the end, late: a request has come for
        it meanwhile. False, and no call of `ended`, where it did not begin."""
        residency, link, nbytes = self._residency, self._link_of(row), self._residency.slot_bytes(row)
        if link is None or self.is_coming(row) or self._prefetch_room_bytes < nbytes:
            return False
        slot = self._room.allocate_now(nbytes, residency.tenant_of(row))
        if slot is None:
            victim = self._room.next_victim(nbytes, residency.tenant_of(row))
            if victim < 0 or not pays(victim):
                return False
        promotion = self._new(row, Priority.PREFETCH, link, slot)
        promotion.ended = ended
        return not promotion.future.done()  # the lane may have refused it

    @property
    def prefetch_seeks_room(self) -> bool:
        """Whether a block is being evicted for one that no request waits for."""
        return bool(self._seeking)

    def is_coming(self, row: int) -> bool:
        """Whether the block is mapped, or is being promoted or put."""
        return bool(self._residency.state(row, self._residency.mapped)) or self._residency.token(row) in self._under_way

    def seconds_of(self, row: int) -> tuple[int, float]:
        """The tier that the block would be read from, and how long its bytes take on the way; -1: from none."""
        link = self._link_of(row)
        if link is None:
            return -1, 0.0
        return link.source, link.lane.estimate_us(self._residency.slot_bytes(row), queued=False) / 1e6

    def reads_from(self, position: int) -> bool:
        """Whether blocks may be read from the tier at `position` now."""
        return self._links[position].is_open

    def breaker_of(self, position: int) -> TierBreaker | None:
        return self._links[position].breaker

    def answered(self, position: int, seconds: float) -> None:
        """The tier at `position` answered a question after so long: no read there can be expected to be faster."""
        self._links[position].lane.answered(seconds)

    def load_us(self, position: int, payload_bytes: int) -> float:
        """What loading a block of that size from there takes, once those before it are loaded."""
        return self._links[position].lane.estimate_us(slot_bytes(payload_bytes), queued=False)

    def demanded_blocks(self, tenant: int | None) -> int:
        """Blocks of the tenant (None: of all) that were promoted because a request waited for them."""
        return self._demanded.total() if tenant is None else self._demanded[tenant]

    def estimate_us(self, rows: Sequence[int], readable: int = 0) -> list[int]:
        """Microseconds that each row adds until all are mapped, were they asked for now in this order: the sum over a
        run is its load time. 0 for what is absent (-1). `readable`: tiers that the caller reads in place, as a mask."""
        mask, readable = self._residency.rows.mask, readable | 1 << self._residency.mapped
        ahead_bytes: dict[int, int] = {}  # by tier: their links move side by side
        ahead_us: dict[int, int] = {}
        load_us = 0  # of the rows so far
        estimates = []
        for row in rows:
            if row < 0:
                estimates.append(0)
                continue
            if mask[row] & readable:
                estimates.append(MAPPED_US)
                continue
            source = self._residency.fastest(row)
            link = self._links.get(source)
            if link is None:  # it is being filled: it will be mapped
                estimates.append(MAPPED_US)
                continue
            nbytes = ahead_bytes.get(source, 0) + self._residency.slot(row, source).nbytes
            ahead_bytes[source] = nbytes
            if source not in ahead_us:  # the first block that has to be read waits for what hangs
                ahead_us[source] = _stall_us(link)
            until_us = round(link.lane.estimate_us(nbytes)) + ahead_us[source]
            estimates.append(max(0, until_us - load_us))
            load_us = max(load_us, until_us)
        return estimates

    def _link_of(self, row: int) -> Link | None:
        """The link of the fastest tier that has the block and can be read."""
        mask = self._residency.tier_mask(row)
        return next((link for source, link in self._links.items() if mask >> source & 1 and link.is_open), None)

    async def _find_room(self, promotion: _Promotion, row: int) -> None:
        residency, link = self._residency, promotion.link
        try:
            slot = await self._room.allocate(promotion.nbytes, residency.tenant_of(row))
        except Exception:  # as in write-back: log it, and answer the callers
            log.exception("making room in the mapped tier failed")
            slot = None
        self._seeking.discard(promotion.token)
        current = residency.current(promotion.token)
        is_there = current >= 0 and residency.has(current, link.source)
        if slot is None or not promotion.waiters or not is_there or residency.state(current, residency.mapped):
            if slot is not None:
                link.free(slot)
            # While room was made its tier was shed, perhaps, and a put brought the block again.
            self._finish(promotion, current >= 0 and residency.has(current, residency.mapped))
            return
        self._begin(promotion, slot)

    def _begin(self, promotion: _Promotion, slot: Slot) -> None:
        """Queue the read into `slot`. The row is pinned, so its copies stay until the end."""
        row = self._residency.current(promotion.token)
        assert row >= 0
        ticket = promotion.link.begin(
            row, slot, promotion.priority, lambda outcome: self._read(promotion, outcome), due_ns=promotion.due_ns
        )
        if ticket is None:
            self._finish(promotion, False)
            return
        promotion.ticket = ticket

    def _read(self, promotion: _Promotion, outcome: Outcome) -> None:
        row = self._residency.current(promotion.token)
        assert row >= 0, "a pinned row went away under its promotion"
        if outcome.ok:
            self._suspects.pop(promotion.token, None)
            self._counters.add("promoted_blocks")
            self._counters.add("promoted_bytes", promotion.nbytes)
            if promotion.priority is Priority.PREFETCH:
                self._counters.add("prefetched_blocks")
            else:
                self._demanded[self._residency.tenant_of(row)] += 1
            self._flows.tiers[promotion.link.source].promoted_blocks += 1
        elif outcome.kind is OutcomeKind.CORRUPT:
            self._damage.found(promotion.link.source, row, outcome.message)
        elif outcome.kind is OutcomeKind.MISSING:
            self._damage.lost(promotion.link.source, row, outcome.message)
        elif outcome.kind is OutcomeKind.FAILED and promotion.link.is_open:
            self._unreadable(promotion, row, outcome)
        if outcome.ok or outcome.kind is OutcomeKind.CANCELLED or not self._reads_elsewhere(promotion):
            self._finish(promotion, outcome.ok)

    def _reads_elsewhere(self, promotion: _Promotion) -> bool:
        """A copy in memory was of no use: begin again with that of another tier, if there is one."""
        residency, row = self._residency, self._residency.current(promotion.token)
        link = self._link_of(row) if row >= 0 else None
        if promotion.link.breaker is not None or link is None or link is promotion.link:
            return False
        promotion.link, promotion.ticket = link, 0
        slot = self._room.allocate_now(promotion.nbytes, residency.tenant_of(row))
        if slot is not None:
            self._begin(promotion, slot)
        else:
            self._seek_room(promotion, row)
        return True

    def _unreadable(self, promotion: _Promotion, row: int, outcome: Outcome) -> None:
        """The medium refused. Once may be chance; a block that fails twice while others are read is given up. A copy in
        memory is given up at once where another tier has one."""
        source, key = promotion.link.source, self._residency.key(row).hex()
        if promotion.link.breaker is None and self._residency.tier_mask(row) & ~(1 << source):
            self._damage.lost(source, row, outcome.message)
            return
        self._counters.add("read_failures")
        if promotion.token not in self._suspects:
            log.warning("block %s cannot be read: %s", key, outcome.message)
            self._suspects[promotion.token] = None
            if len(self._suspects) > MAX_SUSPECTS:
                self._suspects.popitem(last=False)
            return
        if self._residency.being_filled(row):
            return  # another read of it is under way
        del self._suspects[promotion.token]
        self._counters.add("given_up_blocks")
        log.error("block %s cannot be read (%s): given up, will be recomputed", key, outcome.message)
        self._damage.forget(row, Cause.READ_FAILED, outcome.message)

    def fail_waiters(self) -> None:
        """A tier is shed: its callers get a shorter prefix now, and queued reads give their slots back. Reads in flight
        still end by themselves."""
        for promotion in list(self._under_way.values()):
            if promotion.link.is_open:
                continue
            if not promotion.future.done():
                promotion.future.set_result(False)
            promotion.link.cancel(promotion.ticket)

    def _finish(self, promotion: _Promotion, mapped: bool) -> None:
        del self._under_way[promotion.token]
        self._hold_room(promotion, -1)
        row = self._residency.current(promotion.token)
        if row >= 0:
            self._residency.unpin(row)
        if not promotion.future.done():
            promotion.future.set_result(mapped)
        if promotion.ended is not None:
            promotion.ended(mapped, promotion.priority is not Priority.PREFETCH)

    def _hold_room(self, promotion: _Promotion, sign: int) -> None:
        if promotion.priority is Priority.PREFETCH:
            self._prefetch_room_bytes -= sign * promotion.nbytes


def _stall_us(link: Link) -> int:
    """By how much the oldest transfer is overdue: what a reader has to expect on top."""
    stalled_us = link.breaker.stalled_us() if link.breaker is not None else 0
    return stalled_us if stalled_us > OVERDUE_US else 0
