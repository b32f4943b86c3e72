"""The mover starts the transfers that the lanes allow, and reports each end to its lane.

It owns the lanes, and the timers that wake a lane. It never decides which block moves, and never judges an outcome.
Invariants: each accepted transfer calls `done` exactly once; no call blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from kvstore_tiers.base import Completion, Outcome, OutcomeKind
from kvstored.clock import NS_PER_S, Clock
from kvstored.completions import CompletionQueue
from kvstored.store.transfer.lane import Lane, LaneItem, Priority, Refused


@dataclass(slots=True)
class LaneTransfer:
    """A transfer of `blocks` blocks that waits in a lane. `start` begins to copy them, and `done` is called with the
    outcome, which is DONE only if all went well."""

    start: Callable[[Completion], None]
    done: Callable[[Outcome], None]
    blocks: int = 1


Trace = Callable[[str, Priority, int, LaneTransfer], LaneTransfer]


class Mover:
    """A component that runs all lanes (queues of copies between tiers): it starts the transfers that a lane allows, and
    looks at lanes again by timers. `lanes` has them by name."""

    def __init__(self, lanes: Iterable[Lane[LaneTransfer]], completions: CompletionQueue, clock: Clock) -> None:
        self.lanes = {lane.name: lane for lane in lanes}
        self._completions = completions
        self._clock = clock
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._pump_scheduled: set[str] = set()
        self.trace: Trace | None = None  # takes the place of each transfer that comes

    def submit(
        self, lane_name: str, priority: Priority, nbytes: int, transfer: LaneTransfer, due_ns: int | None = None
    ) -> int | Refused:
        """Queue `transfer`, of `nbytes` bytes, in the lane `lane_name`. Return its ticket, or the reason for the
        refusal. It starts on the next turn of the event loop at the earliest. Its caller stops waiting at `due_ns`
        (monotonic)."""
        lane = self.lanes[lane_name]
        if self.trace is not None:
            transfer = self.trace(lane_name, priority, nbytes, transfer)
        answer = lane.submit(priority, nbytes, transfer, self._clock.monotonic_ns(), due_ns, transfer.blocks)
        if not isinstance(answer, Refused):
            self._schedule(lane)
        return answer

    def raise_priority(self, lane_name: str, ticket: int, priority: Priority, due_ns: int | None = None) -> None:
        lane = self.lanes[lane_name]
        if lane.promote(ticket, priority, self._clock.monotonic_ns(), due_ns):
            self._schedule(lane)

    def cancel(self, lane_name: str, ticket: int) -> None:
        """End the transfer with this `ticket` as cancelled if it is still queued in the lane; one in flight goes on."""
        lane = self.lanes[lane_name]
        transfer = lane.cancel(ticket, self._clock.monotonic_ns())
        if transfer is not None:
            transfer.done(Outcome(OutcomeKind.CANCELLED, message="no request waits for it any more"))
            self._look_again(lane)

    def close(self) -> None:
        """End all queued transfers of all lanes as cancelled; transfers that have begun still complete."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for lane in self.lanes.values():
            for transfer in lane.close():
                transfer.done(Outcome(OutcomeKind.CANCELLED, message="the daemon is stopping"))

    def _schedule(self, lane: Lane[LaneTransfer]) -> None:
        if lane.name not in self._pump_scheduled:
            self._pump_scheduled.add(lane.name)
            asyncio.get_running_loop().call_soon(self._pump, lane)

    def _pump(self, lane: Lane[LaneTransfer]) -> None:
        self._pump_scheduled.discard(lane.name)
        now_ns = self._clock.monotonic_ns()
        for item in lane.next(now_ns):
            item.work.start(self._completions.to_loop(partial(self._ended, lane, item)))
        self._set_timer(lane, now_ns)

    def _ended(self, lane: Lane[LaneTransfer], item: LaneItem[LaneTransfer], outcome: Outcome) -> None:
        lane.completed(item.ticket, self._clock.monotonic_ns(), ok=outcome.ok)
        item.work.done(outcome)
        self._look_again(lane)

    def _look_again(self, lane: Lane[LaneTransfer]) -> None:
        """Schedule the lanes that may start an item now that an item has left `lane`."""
        if lane.has_queued:
            self._schedule(lane)
        for other in lane.neighbours:  # prefetch waits for silence on every lane that shares its medium
            if other.has_prefetch_queued:
                self._schedule(other)

    def _set_timer(self, lane: Lane[LaneTransfer], now_ns: int) -> None:
        timer = self._timers.pop(lane.name, None)
        if timer is not None:
            timer.cancel()
        wake_ns = lane.wake_at(now_ns)
        if wake_ns is not None:
            delay_s = max(0.0, (wake_ns - now_ns) / NS_PER_S)
            self._timers[lane.name] = asyncio.get_running_loop().call_later(delay_s, self._pump, lane)
