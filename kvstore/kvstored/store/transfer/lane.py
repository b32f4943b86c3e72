"""A lane: one direction between two media, as a pure scheduler.

Owns the queue of one lane: what runs next, how much at once, and how fast. It starts nothing itself: the
caller runs what `next` returns and reports each with `completed`. Never does I/O, reads a clock, or knows
what a block is (`work` belongs to the caller). Deterministic: the same calls give the same answers.

Rules
- Priority: demand > prefetch > demotion > maintenance; within demand, the earliest deadline first, and what has none
  counts as due `undated_s` after it came; else first come, first served.
- Prefetch runs only while no demand is queued or in flight, here or in a lane that shares a medium, and
  `quiet_s` have passed since the last demand, or longer where gets are small (see `pauses`); few items at
  once (one by default), each no larger than `prefetch_item_bytes`. So demand waits for at most that much of
  prefetch, however long the prefetch queue is, and its p99 grows by at most 10 %.
- Demotion and maintenance run while no demand is queued; but one that has waited `aged_s` runs even then, in
  a bounded share (`aged_share`) of the bytes that demand moves, so that neither starves. Prefetch never ages:
  it only gets stale.
- A lane may have a budget for what is not demand (`spare_share`, `spare_bytes_per_s`): where others use the medium
  unseen, they have the rest of it. Demand neither waits for it nor spends it.
- Everything is bounded: a full queue refuses, with the reason.

Invariants: a ticket is queued, in flight or gone; no more than `max_in_flight` items in flight in all, nor
more than each priority's own limit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Generic

from kvstored.store.transfer.items import Dispatch, LaneSettings, LaneStatistics, Priority, Refused, Work
from kvstored.store.transfer.pauses import DemandPauses
from kvstored.store.transfer.rates import NS_PER_S, RateMeter, ServiceModel, TokenBucket

_PRIORITIES = tuple(Priority)  # an Enum is slower to iterate over, and this is done for each block
_LEAST_STALE = 64  # entries of items that were taken back, before they are dropped


@dataclass(slots=True)
class _Item(Generic[Work]):
    work: Work
    nbytes: int
    priority: Priority
    queued_ns: int
    due_ns: int
    arrival: int = 0  # among demand
    started_ns: int = 0
    shared_bytes: int = 0


class Lane(Generic[Work]):
    """See the module for the rules. Times are monotonic nanoseconds and never go back."""

    def __init__(self, name: str, settings: LaneSettings | None = None) -> None:
        self.name = name
        self.settings = settings or LaneSettings()
        limits = self.settings.limits
        self._queues: tuple[OrderedDict[int, _Item[Work]], ...] = tuple(OrderedDict() for _ in Priority)
        self._by_due: list[tuple[int, int, int]] = []  # a heap: due, arrival, ticket of demand; also of what has left
        self._running: dict[int, _Item[Work]] = {}
        self._buckets = tuple(TokenBucket(limits[p].bytes_per_s, limits[p].burst_bytes) for p in Priority)
        self._neighbours: list[Lane[Work]] = []
        self._closed = False
        self._tickets = self._arrivals = 0
        self._pauses = DemandPauses(
            round(self.settings.quiet_s * NS_PER_S), round(self.settings.quiet_max_s * NS_PER_S)
        )
        self._aged_credit_bytes = 0.0
        self._meter = RateMeter()
        self._service = ServiceModel(
            self.settings.prior_bytes_per_s, self.settings.prior_latency_us, self.settings.prior_bytes
        )
        self._spare = TokenBucket(
            self.settings.spare_share * self._service.bytes_per_s or self.settings.spare_bytes_per_s or None,
            self.settings.spare_burst_bytes,
        )
        self._queued_bytes = [0] * len(Priority)
        self._in_flight = [0] * len(Priority)
        self._in_flight_bytes = 0
        self._moved_blocks = [0] * len(Priority)
        self._moved_bytes = [0] * len(Priority)
        self._refused = [0] * len(Priority)
        self._cancelled = 0
        self._failed = 0

    def share_medium(self, others: Iterable[Lane[Work]]) -> None:
        """Demand in any of `others` (the other direction of one disk, say) counts as demand for this lane's
        prefetch.
        """
        self._neighbours = [lane for lane in others if lane is not self]

    @property
    def neighbours(self) -> Sequence[Lane[Work]]:
        """The lanes that share the medium."""
        return self._neighbours

    # What the caller does to items

    def submit(
        self, priority: Priority, nbytes: int, work: Work, now_ns: int, due_ns: int | None = None
    ) -> int | Refused:
        """Queue `work`: its ticket. `due_ns`: when it is of no use any more. Refused items leave no trace but in the
        statistics.
        """
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
        self._enqueue(self._tickets, _Item(work, nbytes, priority, now_ns, self._due_ns(now_ns, due_ns)))
        return self._tickets

    def promote(self, ticket: int, priority: Priority, now_ns: int, due_ns: int | None = None) -> bool:
        """Raise a queued item (a prefetch that a client now waits for) to the end of a higher priority's queue, or
        demand to an earlier deadline.

        False when the ticket is gone, in flight, or was of no less urgency already. Never refused: the item is held
        already.
        """
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
        self._dequeue(ticket, item)
        item.priority, item.due_ns = priority, due_ns
        self._enqueue(ticket, item)
        return True

    def cancel(self, ticket: int, now_ns: int) -> Work | None:
        """Take back a queued item. None when it is in flight or gone: then wait for its completion."""
        item = self._queued(ticket)
        if item is None:
            return None
        self._dequeue(ticket, item)
        self._cancelled += 1
        if item.priority == Priority.DEMAND and not self.demand_here():
            self._pauses.ended(now_ns)
        return item.work

    def close(self) -> list[Work]:
        """Refuse from now on, and give back everything queued. What is in flight still completes."""
        self._closed = True
        left: list[Work] = []
        for queue in self._queues:
            for ticket, item in list(queue.items()):
                self._dequeue(ticket, item)
                left.append(item.work)
        self._cancelled += len(left)
        return left

    # Scheduling

    def next(self, now_ns: int) -> list[Dispatch[Work]]:
        """Everything that should start now; it counts as in flight from here on."""
        started: list[Dispatch[Work]] = []
        while self.has_queued and len(self._running) < self.settings.max_in_flight:
            ticket = self._choose(now_ns)
            if ticket is None:
                break
            started.append(self._start(ticket, now_ns))
        return started

    def completed(self, ticket: int, now_ns: int, *, ok: bool = True) -> None:
        """An item in flight has ended. Raises RuntimeError for a ticket that is not in flight."""
        item = self._running.pop(ticket, None)
        if item is None:
            raise RuntimeError(f"lane {self.name}: ticket {ticket} completed but not in flight")
        priority = item.priority
        self._in_flight[priority] -= 1
        self._in_flight_bytes -= item.nbytes
        if priority == Priority.DEMAND and not self.demand_here():
            self._pauses.ended(now_ns)
        if not ok:
            self._failed += 1
            return
        self._moved_blocks[priority] += 1
        self._moved_bytes[priority] += item.nbytes
        self._meter.add(item.nbytes, now_ns)
        self._service.completed(item.nbytes, item.started_ns, item.shared_bytes, now_ns)
        if self.settings.spare_share:
            self._spare.follow(self.settings.spare_share * self._service.bytes_per_s, now_ns)

    def wake_at(self, now_ns: int) -> int | None:
        """When to call `next` again if nothing else happens; None when only a submit or a completion can
        change it.
        """
        if len(self._running) >= self.settings.max_in_flight or not self.has_queued:
            return None
        times = [at for priority in _PRIORITIES if (at := self._startable_at(priority, now_ns)) is not None]
        return min(times, default=None)

    def spare_at_ns(self, now_ns: int) -> int:
        """When the budget for what is not demand has something left; `now_ns` if it has."""
        return self._spare.ready_at_ns(now_ns)

    def estimate_us(self, nbytes: int, *, queued: bool = True) -> float:
        """How long a demand for `nbytes` submitted now would take, microseconds; `queued`: behind the demand
        that is here already.
        """
        ahead = self._queued_bytes[Priority.DEMAND] + self._in_flight_bytes if queued else 0
        return self._service.estimate_us(nbytes + ahead)

    def answered(self, seconds: float) -> None:
        """The medium answered a question, outside of this lane, after so long."""
        self._service.answered(seconds)

    def demand_here(self) -> bool:
        """Whether demand is queued or in flight."""
        return bool(self._queues[Priority.DEMAND]) or self._in_flight[Priority.DEMAND] > 0

    @property
    def has_queued(self) -> bool:
        """Whether anything waits to be started."""
        return any(self._queues)

    @property
    def has_prefetch_queued(self) -> bool:
        """Whether something waits for demand to end, here or in a lane that shares a medium."""
        return bool(self._queues[Priority.PREFETCH])

    def __len__(self) -> int:
        """Items queued or in flight."""
        return sum(map(len, self._queues)) + len(self._running)

    def statistics(self, now_ns: int) -> LaneStatistics:
        return LaneStatistics(
            name=self.name,
            queued=tuple(map(len, self._queues)),
            queued_bytes=tuple(self._queued_bytes),
            in_flight=tuple(self._in_flight),
            moved_blocks=tuple(self._moved_blocks),
            moved_bytes=tuple(self._moved_bytes),
            refused=tuple(self._refused),
            cancelled=self._cancelled,
            failed=self._failed,
            bytes_per_s=self._meter.read(now_ns),
            service_bytes_per_s=self._service.bytes_per_s,
        )

    # Inside

    def _choose(self, now_ns: int) -> int | None:
        """The ticket to start now, or None."""
        aged = self._aged(now_ns)
        if aged is not None:
            return aged
        for priority in _PRIORITIES:
            at_ns = self._startable_at(priority, now_ns, aged=False)
            if at_ns is not None and at_ns <= now_ns:
                return self._most_urgent() if priority == Priority.DEMAND else next(iter(self._queues[priority]))
        return None

    def _most_urgent(self) -> int:
        """The queued demand whose deadline is the earliest."""
        demand = self._queues[Priority.DEMAND]
        while True:
            due_ns, _, ticket = self._by_due[0]
            item = demand.get(ticket)
            if item is not None and item.due_ns == due_ns:
                return ticket
            heappop(self._by_due)

    def _due_ns(self, now_ns: int, due_ns: int | None) -> int:
        return now_ns + round(self.settings.undated_s * NS_PER_S) if due_ns is None else due_ns

    def _aged(self, now_ns: int) -> int | None:
        """A demotion or maintenance item that may pass waiting demand."""
        if not self._queues[Priority.DEMAND]:
            return None
        for priority in (Priority.DEMOTION, Priority.MAINTENANCE):
            at_ns = self._startable_at(priority, now_ns)
            if at_ns is not None and at_ns <= now_ns:
                return next(iter(self._queues[priority]))
        return None

    def _startable_at(self, priority: Priority, now_ns: int, *, aged: bool = True) -> int | None:
        """When the first item of a priority may start as time alone goes on; None if time alone will not do."""
        queue = self._queues[priority]
        if not queue or self._in_flight[priority] >= self.settings.limits[priority].in_flight:
            return None
        at_ns = self._buckets[priority].ready_at_ns(now_ns)
        if priority == Priority.DEMAND:
            return at_ns
        at_ns = max(at_ns, self._spare.ready_at_ns(now_ns))
        first = next(iter(queue.values()))
        if priority == Priority.PREFETCH:
            lanes = (self, *self._neighbours)
            if any(lane.demand_here() for lane in lanes):
                return None
            harm_bytes = first.nbytes * self.settings.limits[priority].in_flight
            return max(at_ns, *(lane._pauses.prefetch_from_ns(harm_bytes, now_ns) for lane in lanes))
        if not self._queues[Priority.DEMAND]:
            return at_ns
        if not aged or self._aged_credit_bytes < first.nbytes:
            return None
        return max(at_ns, first.queued_ns + round(self.settings.aged_s * NS_PER_S))

    def _demand_arrives(self, nbytes: int, now_ns: int) -> None:
        if not self.demand_here():
            self._pauses.began(now_ns)
        self._pauses.added(nbytes)

    def _start(self, ticket: int, now_ns: int) -> Dispatch[Work]:
        item = self._queued(ticket)
        if item is None:
            raise RuntimeError(f"lane {self.name}: ticket {ticket} started but not queued")
        passes_demand = item.priority > Priority.PREFETCH and bool(self._queues[Priority.DEMAND])
        self._dequeue(ticket, item)
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
            self._service.idle_ended(now_ns)
        self._running[ticket] = item
        self._in_flight[item.priority] += 1
        self._in_flight_bytes += item.nbytes
        item.started_ns = now_ns
        item.shared_bytes = self._in_flight_bytes
        return Dispatch(ticket, item.work, item.nbytes, item.priority)

    def _queued(self, ticket: int) -> _Item[Work] | None:
        for queue in self._queues:
            item = queue.get(ticket)
            if item is not None:
                return item
        return None

    def _enqueue(self, ticket: int, item: _Item[Work]) -> None:
        self._queues[item.priority][ticket] = item
        if item.priority == Priority.DEMAND:
            self._arrivals += 1
            item.arrival = self._arrivals
            heappush(self._by_due, (item.due_ns, item.arrival, ticket))
            demand = self._queues[Priority.DEMAND]
            if len(self._by_due) > 2 * len(demand) + _LEAST_STALE:
                self._by_due = sorted((queued.due_ns, queued.arrival, at) for at, queued in demand.items())
        self._queued_bytes[item.priority] += item.nbytes

    def _dequeue(self, ticket: int, item: _Item[Work]) -> None:
        del self._queues[item.priority][ticket]
        self._queued_bytes[item.priority] -= item.nbytes
