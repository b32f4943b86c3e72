"""A lane: one direction between two media, as a pure scheduler.

Owns the queue of one lane: what runs next, how much at once, and how fast. It starts nothing itself: the caller runs
what `next` returns and reports each with `completed`. Never does I/O, reads a clock, or knows what a block is (`work`
belongs to the caller). Deterministic: the same calls give the same answers.

Rules
- Priority: demand > prefetch > demotion > maintenance; within demand, the earliest deadline first, and what has none
  counts as due `undated_s` after it came; else first come, first served.
- Prefetch runs only while no demand is queued or in flight, here or in a lane that shares a medium, and `quiet_s` have
  passed since the last demand, or longer where gets are small (see `DemandPauses`); few items at once, each no larger
  than `prefetch_item_bytes`. So demand waits for at most that much of prefetch, and its p99 grows by at most 10 %.
- Demotion and maintenance run while no demand is queued; but one that has waited `aged_s` runs even then, in a bounded
  share (`aged_share`) of the bytes that demand moves, so that neither starves. Prefetch never ages: it only gets stale.
- A lane may have a budget for what is not demand (`spare_share`, `spare_bytes_per_s`): where others use the medium
  unseen, they have the rest of it. Demand neither waits for it nor spends it. A full queue refuses, with the reason.

Invariants: a ticket is queued, in flight or gone; no more than `max_in_flight` items in flight in all, nor more than
each priority's own limit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from heapq import heappop, heappush
from typing import Generic, NamedTuple, TypeVar

from kvstored.store.transfer.rates import NS_PER_S, DemandPauses, RateMeter, ServiceModel, TokenBucket

_LEAST_STALE = 64  # entries of items that were taken back, before they are dropped
Work = TypeVar("Work")


class Priority(IntEnum):
    DEMAND = 0  # a client waits for it
    PREFETCH = 1  # a guess that a client soon will
    DEMOTION = 2  # makes room, writes behind
    MAINTENANCE = 3  # scrubbing, moving, tidying


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the items of one priority in a lane. `bytes_per_s` None is unlimited; `burst_bytes` may be spent at
    once after a pause."""

    queued_items: int
    in_flight: int
    bytes_per_s: float | None = None
    burst_bytes: int = 64 << 20


_PRIORITIES = tuple(Priority)  # an Enum is slower to iterate over, and this is done for each block
_LIMITS = {
    Priority.DEMAND: Limits(queued_items=8192, in_flight=8),
    Priority.PREFETCH: Limits(queued_items=2048, in_flight=1),
    Priority.DEMOTION: Limits(queued_items=8192, in_flight=4),
    Priority.MAINTENANCE: Limits(queued_items=1024, in_flight=1),
}


@dataclass(frozen=True, slots=True)
class LaneSettings:
    """The settings of one lane. The `prior_` fields describe the device until enough has been moved to measure it. All
    priorities but demand share a budget of `spare_bytes_per_s`, or of `spare_share` of the device's rate; 0 for both:
    no limit."""

    max_in_flight: int = 8
    limits: dict[Priority, Limits] = field(default_factory=_LIMITS.copy)
    quiet_s: float = 0.002
    quiet_max_s: float = 0.25
    prefetch_item_bytes: int = 4 << 20
    undated_s: float = 10.0
    aged_s: float = 1.0
    aged_share: float = 0.05
    prior_bytes_per_s: float = 1e9
    prior_latency_us: float = 200.0
    prior_bytes: int = 16 << 20  # how much the prior counts for
    spare_bytes_per_s: float = 0.0
    spare_share: float = 0.0
    spare_burst_bytes: int = 16 << 20

    @property
    def has_budget(self) -> bool:
        """True when copies of every priority but demand share a budget of bytes a second."""
        return self.spare_share > 0 or self.spare_bytes_per_s > 0


class Refused(Enum):
    """The reason why `submit` did not queue an item; it is returned instead of the item's ticket."""

    QUEUE_FULL = "the queue of this priority is full"
    ITEM_TOO_LARGE = "larger than a prefetch item may be"
    CLOSED = "the lane is closed"


@dataclass(slots=True)
class LaneItem(Generic[Work]):
    """A piece of work in a lane, known by its `ticket`. `arrival` orders items of demand that have equal deadlines."""

    ticket: int
    work: Work
    nbytes: int
    priority: Priority
    queued_ns: int
    due_ns: int
    blocks: int
    arrival: int = 0
    started_ns: int = 0
    shared_bytes: int = 0


class LaneStatistics(NamedTuple):
    """A report on a lane. Tuples are indexed by Priority. `service_bytes_per_s` is the device's rate while busy."""

    name: str
    queued: tuple[int, ...]
    queued_bytes: tuple[int, ...]
    in_flight: tuple[int, ...]
    moved_blocks: tuple[int, ...]
    moved_bytes: tuple[int, ...]
    refused: tuple[int, ...]
    cancelled: int
    failed: int
    bytes_per_s: float
    service_bytes_per_s: float


class Lane(Generic[Work]):
    """A queue of copies in one direction between two media, which says what starts next, by priority, deadline and byte
    rate. Times are in monotonic nanoseconds and never go back."""

    def __init__(self, name: str, settings: LaneSettings | None = None) -> None:
        self.name = name
        self.settings = settings or LaneSettings()
        chosen, limits = self.settings, self.settings.limits
        self._queues: tuple[OrderedDict[int, LaneItem[Work]], ...] = tuple(OrderedDict() for _ in Priority)
        self._by_due: list[tuple[int, int, int]] = []  # a heap: due, arrival, ticket of demand; also of what has left
        self._running: dict[int, LaneItem[Work]] = {}
        self._buckets = tuple(TokenBucket(limits[p].bytes_per_s, limits[p].burst_bytes) for p in Priority)
        self.neighbours: list[Lane[Work]] = []  # lanes that share the medium
        self._closed = False
        self._tickets = self._arrivals = 0
        self.pauses = DemandPauses(round(chosen.quiet_s * NS_PER_S), round(chosen.quiet_max_s * NS_PER_S))
        self._aged_credit_bytes = 0.0
        self._meter = RateMeter()
        self.service = ServiceModel(chosen.prior_bytes_per_s, chosen.prior_latency_us, chosen.prior_bytes)
        spare_bytes_per_s = chosen.spare_share * self.service.bytes_per_s or chosen.spare_bytes_per_s or None
        self._spare = TokenBucket(spare_bytes_per_s, chosen.spare_burst_bytes)
        self._queued_bytes = [0] * len(Priority)
        self._in_flight = [0] * len(Priority)
        self._in_flight_bytes = 0
        self._moved_blocks = [0] * len(Priority)
        self._moved_bytes = [0] * len(Priority)
        self._refused = [0] * len(Priority)
        self._cancelled = self._failed = 0

    def share_medium(self, others: Iterable[Lane[Work]]) -> None:
        """Let queued or running demand in any of `others`, lanes on the same medium, delay this lane's prefetches."""
        self.neighbours = [lane for lane in others if lane is not self]

    # What the caller does to items

    def submit(
        self, priority: Priority, nbytes: int, work: Work, now_ns: int, due_ns: int | None = None, blocks: int = 1
    ) -> int | Refused:
        """Queue `work`, of `blocks` with `nbytes` bytes; return its ticket, or why it was refused. Of demand, the item
        with the earliest `due_ns` (when its caller stops waiting) starts first."""
        refused: Refused | None = None
        if self._closed:
            refused = Refused.CLOSED
        elif priority == Priority.PREFETCH and nbytes > self.settings.prefetch_item_bytes:
            refused = Refused.ITEM_TOO_LARGE
        elif len(self._queues[priority]) >= self.settings.limits[priority].queued_items:
            refused = Refused.QUEUE_FULL
        if refused is not None:
            self._refused[priority] += 1
            return refused
        self._tickets += 1
        if priority == Priority.DEMAND:
            self._demand_arrives(nbytes, now_ns)
        self._enqueue(LaneItem(self._tickets, work, nbytes, priority, now_ns, self._due_ns(now_ns, due_ns), blocks))
        return self._tickets

    def promote(self, ticket: int, priority: Priority, now_ns: int, due_ns: int | None = None) -> bool:
        """Move the queued item `ticket` to the end of the queue of a higher `priority`; an item of demand gets the
        deadline `due_ns` if that is earlier. Return False if it is not queued, or was as urgent already."""
        item = self._queued(ticket)
        if item is None or item.priority < priority:
            return False
        due_ns = self._due_ns(now_ns, due_ns)
        if item.priority == priority:
            if priority != Priority.DEMAND or due_ns >= item.due_ns:
                return False
            item.due_ns = due_ns
            heappush(self._by_due, (due_ns, item.arrival, ticket))
            return True
        if priority == Priority.DEMAND:
            self._demand_arrives(item.nbytes, now_ns)
        self._dequeue(item)
        item.priority, item.due_ns = priority, due_ns
        self._enqueue(item)
        return True

    def cancel(self, ticket: int, now_ns: int) -> Work | None:
        """Remove the queued item `ticket` and return its work. Return None when it has been started, or is gone."""
        item = self._queued(ticket)
        if item is None:
            return None
        self._dequeue(item)
        self._cancelled += 1
        if item.priority == Priority.DEMAND and not self.demand_here():
            self.pauses.ended(now_ns)
        return item.work

    def close(self) -> list[Work]:
        """Refuse new items from now on, and return the work of queued ones. Items in flight still complete."""
        self._closed = True
        left = [item for queue in self._queues for item in queue.values()]
        for item in left:
            self._dequeue(item)
        self._cancelled += len(left)
        return [item.work for item in left]

    # Scheduling

    def next(self, now_ns: int) -> list[LaneItem[Work]]:
        """Return the items that should start now; they count as in flight from here on."""
        started: list[LaneItem[Work]] = []
        while self.has_queued and len(self._running) < self.settings.max_in_flight:
            item = self._choose(now_ns)
            if item is None:
                break
            self._start(item, now_ns)
            started.append(item)
        return started

    def completed(self, ticket: int, now_ns: int, *, ok: bool = True) -> None:
        """Note that the item `ticket` in flight has ended, well if `ok`. Raise RuntimeError if it is not in flight."""
        item = self._running.pop(ticket, None)
        if item is None:
            raise RuntimeError(f"lane {self.name}: ticket {ticket} completed but not in flight")
        priority = item.priority
        self._in_flight[priority] -= 1
        self._in_flight_bytes -= item.nbytes
        if priority == Priority.DEMAND and not self.demand_here():
            self.pauses.ended(now_ns)
        if not ok:
            self._failed += 1
            return
        self._moved_blocks[priority] += item.blocks
        self._moved_bytes[priority] += item.nbytes
        self._meter.add(item.nbytes, now_ns)
        self.service.completed(item.nbytes, item.started_ns, item.shared_bytes, now_ns)
        if self.settings.spare_share:
            self._spare.follow(self.settings.spare_share * self.service.bytes_per_s, now_ns)

    def wake_at(self, now_ns: int) -> int | None:
        """Return when (ns) to call `next` again if no call comes before; None when passing time starts no item."""
        if len(self._running) >= self.settings.max_in_flight or not self.has_queued:
            return None
        times = [at for priority in _PRIORITIES if (at := self._startable_at(priority, now_ns)) is not None]
        return min(times, default=None)

    def spare_at_ns(self, now_ns: int) -> int:
        """Return when (ns) the budget for all priorities but demand has bytes left, `now_ns` if it has some now."""
        return self._spare.ready_at_ns(now_ns)

    def estimate_us(self, nbytes: int, *, queued: bool = True) -> float:
        """Return how many microseconds a demand for `nbytes` submitted now takes; with `queued`, after queued
        demand."""
        ahead = self._queued_bytes[Priority.DEMAND] + self._in_flight_bytes if queued else 0
        return self.service.estimate_us(nbytes + ahead)

    def demand_here(self) -> bool:
        """Return whether any item of priority demand is queued or in flight in this lane."""
        return bool(self._queues[Priority.DEMAND]) or self._in_flight[Priority.DEMAND] > 0

    @property
    def has_queued(self) -> bool:
        """True when any item waits to be started."""
        return any(self._queues)

    @property
    def has_prefetch_queued(self) -> bool:
        """True when a prefetch waits, which may start when demand ends here or on the same medium."""
        return bool(self._queues[Priority.PREFETCH])

    def statistics(self, now_ns: int) -> LaneStatistics:
        return LaneStatistics(
            name=self.name,
            queued=tuple(sum([item.blocks for item in queue.values()]) for queue in self._queues),
            queued_bytes=tuple(self._queued_bytes),
            in_flight=tuple(self._in_flight),
            moved_blocks=tuple(self._moved_blocks),
            moved_bytes=tuple(self._moved_bytes),
            refused=tuple(self._refused),
            cancelled=self._cancelled,
            failed=self._failed,
            bytes_per_s=self._meter.read(now_ns),
            service_bytes_per_s=self.service.bytes_per_s,
        )

    # Inside

    def _choose(self, now_ns: int) -> LaneItem[Work] | None:
        """Return the item to start now, if any: one of demotion or maintenance that has aged passes waiting demand."""
        demand = self._queues[Priority.DEMAND]
        if demand:
            for priority in (Priority.DEMOTION, Priority.MAINTENANCE):
                if self._is_startable(priority, now_ns):
                    return next(iter(self._queues[priority].values()))
        first = next((p for p in _PRIORITIES if self._is_startable(p, now_ns, aged=False)), None)
        if first is None:
            return None
        return self._most_urgent() if first == Priority.DEMAND else next(iter(self._queues[first].values()))

    def _most_urgent(self) -> LaneItem[Work]:
        """Return the queued demand whose deadline is the earliest."""
        demand = self._queues[Priority.DEMAND]
        while True:
            due_ns, _, ticket = self._by_due[0]
            item = demand.get(ticket)
            if item is not None and item.due_ns == due_ns:
                return item
            heappop(self._by_due)

    def _due_ns(self, now_ns: int, due_ns: int | None) -> int:
        return now_ns + round(self.settings.undated_s * NS_PER_S) if due_ns is None else due_ns

    def _is_startable(self, priority: Priority, now_ns: int, *, aged: bool = True) -> bool:
        at_ns = self._startable_at(priority, now_ns, aged=aged)
        return at_ns is not None and at_ns <= now_ns

    def _startable_at(self, priority: Priority, now_ns: int, *, aged: bool = True) -> int | None:
        """Return when the first item of a priority may start as time alone goes on; None if time alone will not do."""
        queue = self._queues[priority]
        if not queue or self._in_flight[priority] >= self.settings.limits[priority].in_flight:
            return None
        at_ns = self._buckets[priority].ready_at_ns(now_ns)
        if priority == Priority.DEMAND:
            return at_ns
        at_ns = max(at_ns, self._spare.ready_at_ns(now_ns))
        first = next(iter(queue.values()))
        if priority == Priority.PREFETCH:
            lanes = (self, *self.neighbours)
            if any(lane.demand_here() for lane in lanes):
                return None
            harm_bytes = first.nbytes * self.settings.limits[priority].in_flight
            return max(at_ns, *(lane.pauses.prefetch_from_ns(harm_bytes, now_ns) for lane in lanes))
        if not self._queues[Priority.DEMAND]:
            return at_ns
        if not aged or self._aged_credit_bytes < first.nbytes:
            return None
        return max(at_ns, first.queued_ns + round(self.settings.aged_s * NS_PER_S))

    def _demand_arrives(self, nbytes: int, now_ns: int) -> None:
        if not self.demand_here():
            self.pauses.began(now_ns)
        self.pauses.added(nbytes)

    def _start(self, item: LaneItem[Work], now_ns: int) -> None:
        passes_demand = item.priority > Priority.PREFETCH and bool(self._queues[Priority.DEMAND])
        self._dequeue(item)
        self._buckets[item.priority].spend(item.nbytes)
        if item.priority == Priority.DEMAND:
            # Bounded, so that a long busy time does not save up for a storm.
            credit = self._aged_credit_bytes + self.settings.aged_share * item.nbytes
            self._aged_credit_bytes = min(credit, 4.0 * max(item.nbytes, self.settings.prefetch_item_bytes))
        else:
            self._spare.spend(item.nbytes)
            if passes_demand:
                self._aged_credit_bytes -= item.nbytes
        if not self._running:
            self.service.idle_ended(now_ns)
        self._running[item.ticket] = item
        self._in_flight[item.priority] += 1
        self._in_flight_bytes += item.nbytes
        item.started_ns = now_ns
        item.shared_bytes = self._in_flight_bytes

    def _queued(self, ticket: int) -> LaneItem[Work] | None:
        return next((queue[ticket] for queue in self._queues if ticket in queue), None)

    def _enqueue(self, item: LaneItem[Work]) -> None:
        self._queues[item.priority][item.ticket] = item
        if item.priority == Priority.DEMAND:
            self._arrivals += 1
            item.arrival = self._arrivals
            heappush(self._by_due, (item.due_ns, item.arrival, item.ticket))
            demand = self._queues[Priority.DEMAND]
            if len(self._by_due) > 2 * len(demand) + _LEAST_STALE:
                self._by_due = sorted((queued.due_ns, queued.arrival, at) for at, queued in demand.items())
        self._queued_bytes[item.priority] += item.nbytes

    def _dequeue(self, item: LaneItem[Work]) -> None:
        del self._queues[item.priority][item.ticket]
        self._queued_bytes[item.priority] -= item.nbytes
