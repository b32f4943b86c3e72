"""A device in virtual time: the requests in flight share one bandwidth equally, after a fixed latency each."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from kvstored.store.transfer.lane import Lane, Priority

NS = 1_000_000_000


class Device:
    """Processor sharing, event by event. `finish_at` and `run_to` are all a simulation needs."""

    def __init__(self, bytes_per_s: float, latency_ns: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._latency_ns = latency_ns
        self._now_ns = 0
        self._left: dict[int, float] = {}  # ticket → bytes left
        self._at_most: list[tuple[int, int, float]] = []  # (begins moving at, ticket, bytes)

    def start(self, ticket: int, nbytes: int, now_ns: int) -> None:
        heapq.heappush(self._at_most, (now_ns + self._latency_ns, ticket, float(nbytes)))

    def next_event_ns(self) -> int | None:
        times = [self._at_most[0][0]] if self._at_most else []
        if self._left:
            share = self._bytes_per_s / len(self._left)
            times.append(self._now_ns + int(min(self._left.values()) / share * NS) + 1)
        return min(times, default=None)

    def run_to(self, now_ns: int) -> list[int]:
        """Move on; tickets that finished by then. Call with no more than `next_event_ns`."""
        if self._left:
            moved = (now_ns - self._now_ns) / NS * self._bytes_per_s / len(self._left)
            self._left = {ticket: left - moved for ticket, left in self._left.items()}
        self._now_ns = now_ns
        while self._at_most and self._at_most[0][0] <= now_ns:
            _, ticket, nbytes = heapq.heappop(self._at_most)
            self._left[ticket] = nbytes
        done = [ticket for ticket, left in self._left.items() if left <= 0.5]
        for ticket in done:
            del self._left[ticket]
        return done


def drive(
    lane: Lane[int],
    device: Device,
    gets: Iterable[tuple[int, int]],
    *,
    block_bytes: int,
    background: dict[Priority, int],
    until_ns: int,
) -> dict[int, int]:
    """Run a lane over a device. `gets`: (arrival, blocks) of demand; `background`: how many items of each
    priority are kept queued. Returns the latency of each finished get by its number.
    """
    arrivals = sorted((at, number, blocks) for number, (at, blocks) in enumerate(gets))
    waiting: dict[int, int] = {}
    arrived: dict[int, int] = {}
    latency: dict[int, int] = {}
    priorities: dict[int, tuple[Priority, int]] = {}
    now_ns = 0
    while now_ns < until_ns:
        while arrivals and arrivals[0][0] <= now_ns:
            at, number, blocks = arrivals.pop(0)
            waiting[number], arrived[number] = blocks, at
            for _ in range(blocks):
                assert isinstance(lane.submit(Priority.DEMAND, block_bytes, number, now_ns), int)
        for priority, depth in background.items():
            while lane.statistics(now_ns).queued[priority] < depth:
                lane.submit(priority, block_bytes, -1, now_ns)
        for item in lane.next(now_ns):
            priorities[item.ticket] = (item.priority, item.work)
            device.start(item.ticket, item.nbytes, now_ns)
        times = [arrivals[0][0]] if arrivals else []
        times += [at for at in (device.next_event_ns(), lane.wake_at(now_ns)) if at is not None]
        if not times:
            break
        assert min(times) > now_ns, "the lane asks to be woken in the past: the simulation stands still"
        now_ns = min(times)
        for ticket in device.run_to(now_ns):
            lane.completed(ticket, now_ns)
            priority, number = priorities.pop(ticket)
            if priority is Priority.DEMAND:
                waiting[number] -= 1
                if not waiting[number]:
                    latency[number] = now_ns - arrived[number]
    return latency
