"""The mover: drives the lanes. What a lane says may start is started here, and its end is reported back.

A transfer's `start` hands bytes to a tier and returns at once; its outcome arrives on the control loop. Owns the timers
that wake a lane. Invariants: each accepted transfer ends in `done` exactly once; nothing here blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from kvstore_tiers.base import Completion, Outcome, OutcomeKind
from kvstored.clock import NS_PER_S, Clock
from kvstored.completions import CompletionQueue
from kvstored.store.transfer.lane import Accepted, Dispatch, Lane, Priority, Refused


@dataclass(slots=True)
class Transfer:
    """One block's way over a lane."""

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

    def submit(self, lane_name: str, priority: Priority, nbytes: int, transfer: Transfer) -> int | Refused:
        """A ticket, or why not. The transfer starts on the next turn of the loop, so that a batch is seen whole."""
        lane = self.lanes[lane_name]
        answer = lane.submit(priority, nbytes, transfer, self._clock.monotonic_ns())
        if not isinstance(answer, Accepted):
            return answer
        self._schedule(lane)
        return answer.ticket

    def raise_priority(self, lane_name: str, ticket: int, priority: Priority) -> None:
        lane = self.lanes[lane_name]
        if lane.promote(ticket, priority, self._clock.monotonic_ns()):
            self._schedule(lane)

    def cancel(self, lane_name: str, ticket: int) -> None:
        """End a transfer as cancelled if it is still queued."""
        transfer = self.lanes[lane_name].cancel(ticket, self._clock.monotonic_ns())
        if transfer is not None:
            transfer.done(Outcome(OutcomeKind.CANCELLED, message="nobody waits for it any more"))

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
        for dispatch in lane.next(now_ns):
            dispatch.work.start(self._completions.to_loop(partial(self._ended, lane, dispatch)))
        self._set_timer(lane, now_ns)

    def _ended(self, lane: Lane[Transfer], dispatch: Dispatch[Transfer], outcome: Outcome) -> None:
        lane.completed(dispatch.ticket, self._clock.monotonic_ns(), ok=outcome.ok)
        dispatch.work.done(outcome)
        # Prefetch waits for silence on every lane that shares its medium, so all of them look again.
        for other in self.lanes.values():
            if len(other):
                self._schedule(other)

    def _set_timer(self, lane: Lane[Transfer], now_ns: int) -> None:
        timer = self._timers.pop(lane.name, None)
        if timer is not None:
            timer.cancel()
        wake_ns = lane.wake_at(now_ns)
        if wake_ns is not None:
            delay_s = max(0.0, (wake_ns - now_ns) / NS_PER_S)
            self._timers[lane.name] = asyncio.get_running_loop().call_later(delay_s, self._pump, lane)
