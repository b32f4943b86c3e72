"""Links, lanes and the mover: the ways of blocks from one tier to another, and what drives them.

A link owns the bytes' way: the copy is attached as FILLING, its transfer waits in the link's lane, the breaker of a
durable tier judges how it ends, and the copy is published or its slot freed. `move.py` has the block's way around it.
There is a lane for each direction between the mapped tier and another one. The mover starts what a lane says may
start, and reports its end; it owns the timers that wake a lane.
Invariants: the caller of a link pins the row from `begin` until `ended`; a slot is readable only after its bytes were
verified; each accepted transfer ends in `done` exactly once; nothing here blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from kvstore_tiers.base import Completion, Outcome, OutcomeKind, Slot, Tier
from kvstore_tiers.segments import AlignedBuffer
from kvstored.clock import NS_PER_S, Clock
from kvstored.completions import CompletionQueue
from kvstored.config import Config
from kvstored.config.tiers.gpu import LINK_SHARE, GpuSection
from kvstored.store.blocks import Residency, ResidencyView
from kvstored.store.degraded.breaker import TierBreaker
from kvstored.store.transfer.lane import Item, Lane, LaneSettings, Limits, Priority, Refused

KEYED_IN_FLIGHT = 32  # reads at once, which a driver takes together: each waits for a network
# Before the first read no engine should wait for a hope; after it, what was seen says more.
KEYED_PRIOR_BYTES_PER_S, KEYED_PRIOR_US, KEYED_PRIOR_BYTES = 200e6, 2000.0, 1 << 20


@dataclass(slots=True)
class Transfer:
    """Work of a lane: the start and the end of one block's way over it."""

    start: Callable[[Completion], None]
    done: Callable[[Outcome], None]


class Mover:
    """All lanes of the daemon by name."""

    def __init__(self, lanes: Iterable[Lane[Transfer]], completions: CompletionQueue, clock: Clock) -> None:
        self.lanes = {lane.name: lane for lane in lanes}
        self._completions = completions
        self._clock = clock
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._pump_scheduled: set[str] = set()

    def submit(
        self, lane_name: str, priority: Priority, nbytes: int, transfer: Transfer, due_ns: int | None = None
    ) -> int | Refused:
        """Queue a transfer: its ticket, or the reason why not. It starts on the next turn of the loop, so that a batch
        is seen whole."""
        lane = self.lanes[lane_name]
        answer = lane.submit(priority, nbytes, transfer, self._clock.monotonic_ns(), due_ns)
        if not isinstance(answer, Refused):
            self._schedule(lane)
        return answer

    def raise_priority(self, lane_name: str, ticket: int, priority: Priority, due_ns: int | None = None) -> None:
        lane = self.lanes[lane_name]
        if lane.promote(ticket, priority, self._clock.monotonic_ns(), due_ns):
            self._schedule(lane)

    def cancel(self, lane_name: str, ticket: int) -> None:
        """End a transfer as cancelled if it is still queued."""
        lane = self.lanes[lane_name]
        transfer = lane.cancel(ticket, self._clock.monotonic_ns())
        if transfer is not None:
            transfer.done(Outcome(OutcomeKind.CANCELLED, message="no request waits for it any more"))
            self._look_again(lane)

    def close(self) -> None:
        """End what is queued as cancelled; what is in flight still completes."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for lane in self.lanes.values():
            for transfer in lane.close():
                transfer.done(Outcome(OutcomeKind.CANCELLED, message="the daemon is stopping"))

    def _schedule(self, lane: Lane[Transfer]) -> None:
        if lane.name not in self._pump_scheduled:
            self._pump_scheduled.add(lane.name)
            asyncio.get_running_loop().call_soon(self._pump, lane)

    def _pump(self, lane: Lane[Transfer]) -> None:
        self._pump_scheduled.discard(lane.name)
        now_ns = self._clock.monotonic_ns()
        for item in lane.next(now_ns):
            item.work.start(self._completions.to_loop(partial(self._ended, lane, item)))
        self._set_timer(lane, now_ns)

    def _ended(self, lane: Lane[Transfer], item: Item[Transfer], outcome: Outcome) -> None:
        lane.completed(item.ticket, self._clock.monotonic_ns(), ok=outcome.ok)
        item.work.done(outcome)
        self._look_again(lane)

    def _look_again(self, lane: Lane[Transfer]) -> None:
        """An item of `lane` has left it."""
        if lane.has_queued:
            self._schedule(lane)
        for other in lane.neighbours:  # prefetch waits for silence on every lane that shares its medium
            if other.has_prefetch_queued:
                self._schedule(other)

    def _set_timer(self, lane: Lane[Transfer], now_ns: int) -> None:
        timer = self._timers.pop(lane.name, None)
        if timer is not None:
            timer.cancel()
        wake_ns = lane.wake_at(now_ns)
        if wake_ns is not None:
            delay_s = max(0.0, (wake_ns - now_ns) / NS_PER_S)
            self._timers[lane.name] = asyncio.get_running_loop().call_later(delay_s, self._pump, lane)


def lane_name(tiers: Sequence[str], source: int, destination: int) -> str:
    """Return the name of the lane between two tiers, by position."""
    return f"{tiers[source]}→{tiers[destination]}"


def make_lanes(
    config: Config, residency: ResidencyView, keyed: Container[int], straight: Sequence[int] = ()
) -> list[Lane[Transfer]]:
    """Make the lanes of a store: one a direction, between the mapped tier and each other one. The lanes of one tier
    share its medium, so that prefetch waits for demand on any of them. `keyed` are the positions of tiers that are
    addressed by key, `straight` of those to which the durable tier has a lane of its own."""
    movement, limits = config.movement, config.limits
    settings = LaneSettings(
        max_in_flight=movement.in_flight,
        limits={
            Priority.DEMAND: Limits(movement.queue_blocks, movement.in_flight),
            Priority.PREFETCH: Limits(movement.queue_blocks, 1),
            Priority.DEMOTION: Limits(
                movement.queue_blocks,
                max(1, movement.in_flight // 2),
                movement.demotion_rate_bytes or None,
            ),
            Priority.MAINTENANCE: Limits(movement.queue_blocks, 1),
        },
        quiet_s=movement.prefetch_quiet_ms / 1000,
        prefetch_item_bytes=limits.max_block_bytes + 8192,
    )
    of_keyed = replace(
        settings, max_in_flight=max(KEYED_IN_FLIGHT, movement.in_flight),
        limits=settings.limits | {
            Priority.DEMAND: Limits(movement.queue_blocks, max(KEYED_IN_FLIGHT, movement.in_flight))
        },
        prior_bytes_per_s=KEYED_PRIOR_BYTES_PER_S, prior_latency_us=KEYED_PRIOR_US,
        prior_bytes=KEYED_PRIOR_BYTES,
    )  # fmt: skip
    lanes: list[Lane[Transfer]] = []
    mapped = residency.mapped
    for other in range(len(residency.tiers)):
        if other == mapped:
            continue
        source = mapped if other < mapped or other == residency.durable else other - 1
        of_other = of_keyed if other in keyed else settings
        section = config.tier(residency.tiers[other])
        if isinstance(section, GpuSection):
            of_other = _beside_engines(settings, section)
        names = [lane_name(residency.tiers, other, mapped), lane_name(residency.tiers, source, other)]
        if other in keyed and source != mapped:
            names.append(lane_name(residency.tiers, mapped, other))
        if other == residency.durable:
            names += [lane_name(residency.tiers, other, to) for to in straight]
        pair: list[Lane[Transfer]] = [Lane(name, of_other) for name in names]
        for lane in pair:
            lane.share_medium(pair)
        lanes += pair
    return lanes


def _beside_engines(settings: LaneSettings, section: GpuSection) -> LaneSettings:
    """Return `settings` for a link over which engines copy as well, which no lane sees."""
    if section.rate_bytes is None:
        return replace(settings, spare_share=LINK_SHARE)
    burst_bytes = min(settings.spare_burst_bytes, section.rate_bytes)  # of a second at most
    return replace(settings, spare_bytes_per_s=float(section.rate_bytes), spare_burst_bytes=burst_bytes)


class Link:
    """The way from the tier at `source` to the one at `destination`, by the lane `lane`. `breaker` belongs to the
    slower of the two; None where that is memory.

    The tier that can reach the other one's memory moves the bytes, and verifies them: the source's `move_out` fills the
    destination's slot, or the destination's `move_in` reads the source's. Where both can, the slower one does. A source
    that lends files is read by a destination that loads them; where neither can, they pass through a buffer that the
    source fills.
    """

    def __init__(
        self,
        source: int,
        destination: int,
        tiers: Sequence[Tier],
        lane: str,
        residency: Residency,
        mover: Mover,
        clock: Clock,
        breaker: TierBreaker | None = None,
    ) -> None:
        self.source, self.destination = source, destination
        self.lane = mover.lanes[lane]
        self.breaker = breaker
        self._from, self._to = tiers[source], tiers[destination]
        self._residency = residency
        self._mover = mover
        self._clock = clock
        self._is_upwards = destination < source
        self._is_by_file = self._from.info.lends_files and self._to.info.loads_files

    @property
    def destination_tier(self) -> Tier:
        return self._to

    @property
    def is_open(self) -> bool:
        """Say whether blocks may be moved now."""
        if self.breaker is None:
            return True
        return self.breaker.serves_reads if self._is_upwards else self.breaker.takes_writes

    @property
    def spare_in_s(self) -> float:
        """Seconds until a copy that no request waits for may start, as far as the lane's budget goes."""
        now_ns = self._clock.monotonic_ns()
        return (self.lane.spare_at_ns(now_ns) - now_ns) / NS_PER_S

    def begin(
        self,
        row: int,
        slot: Slot,
        priority: Priority,
        ended: Callable[[Outcome], None],
        begun: Callable[[], None] | None = None,
        due_ns: int | None = None,
    ) -> int | None:
        """Queue the copy of `row` into `slot`, which the link frees if that fails. Return a ticket, or None when the
        lane is full. `begun` is called when the destination has the transfer, `ended` after the copy was published or
        given up. The caller stops waiting at `due_ns`."""
        residency = self._residency
        source, key = residency.slot(row, self.source), residency.key(row)
        residency.attach(row, self.destination, slot, self._clock.monotonic_ns(), filling=True)
        number = 0
        was_unreadable = False  # the source failed, where a buffer is between the two

        def start(done: Completion) -> None:
            nonlocal number
            if self.breaker is not None:
                number = self.breaker.began()
            if self._is_by_file:
                self._from.lend(source, self._to.loader(slot, key), done)
            elif self._to.info.is_in_memory and (self._is_upwards or not self._from.info.is_in_memory):
                self._from.move_out(source, self._to.slot_segment(slot), key, done)
            elif self._from.info.is_in_memory:
                self._to.move_in(slot, self._from.slot_segment(source), key, done)
            else:
                self._through_buffer(source, slot, key, done, unreadable)
            if begun is not None:
                begun()

        def unreadable() -> None:
            nonlocal was_unreadable
            was_unreadable = True

        def end(outcome: Outcome) -> None:
            self._judge(number, outcome, is_of_another=was_unreadable)
            if outcome.ok:
                residency.publish(row, self.destination, self._clock.monotonic_ns())
            else:
                self._to.free(residency.detach(row, self.destination))
            ended(outcome)

        ticket = self._mover.submit(self.lane.name, priority, source.nbytes, Transfer(start, end), due_ns)
        if isinstance(ticket, Refused):
            self._to.free(residency.detach(row, self.destination))
            return None
        return ticket

    def _judge(self, number: int, outcome: Outcome, *, is_of_another: bool) -> None:
        """Report to the breaker how its transfer `number` ended. A fault of the other tier (`is_of_another`) says
        nothing of the breaker's own."""
        if self.breaker is None:
            return
        if self._is_by_file:
            is_of_another = outcome.kind is OutcomeKind.FAILED and not outcome.errno
        judged = Outcome(OutcomeKind.CANCELLED) if is_of_another else outcome
        self.breaker.ended(number, "read" if self._is_upwards else "write", judged)

    def _through_buffer(
        self, source: Slot, slot: Slot, key: bytes, done: Completion, unreadable: Callable[[], None]
    ) -> None:
        """Read `source` into a buffer of its own and store that in `slot`; `unreadable` is called if reading fails."""
        buffer = AlignedBuffer(source.nbytes).segment(source.nbytes)

        def store(outcome: Outcome) -> None:
            if outcome.ok:
                self._to.move_in(slot, buffer, key, done)
            else:
                unreadable()
                done(outcome)

        self._from.move_out(source, buffer, key, store)

    def free(self, slot: Slot) -> None:
        """Give back a slot of the destination that was not used."""
        self._to.free(slot)

    def raise_priority(self, ticket: int, priority: Priority, due_ns: int | None = None) -> None:
        self._mover.raise_priority(self.lane.name, ticket, priority, due_ns)

    def cancel(self, ticket: int) -> None:
        """End a transfer as cancelled if it is still queued."""
        self._mover.cancel(self.lane.name, ticket)
