"""A fetcher without threads, on a clock that tests move: blocks of a `MemorySession` arrive when their time has come.

Owns the ways in which loading goes wrong. Implements what `Restorer` uses of `Fetcher`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from kvstore_engine.restore.fetcher import ArrivedBlocks, BlockStream, Fetch, look_up_window
from tests.reference.memory_session import MemoryLease, MemorySession
from tests.reference.twin_compute import StepClock

Fault = Literal["vanish", "stall", "lease ends"]


@dataclass(eq=False)
class _Coming:
    """The runs that a stream will still bring: (time, run of blocks)."""

    session: MemorySession
    tokens: Any
    runs: list[tuple[float, range]]
    leases: list[MemoryLease] = field(default_factory=list)


class ClockedFetcher:
    """A block that is not mapped takes `chunk_s`. `faults`, by block: it vanishes, everything stalls from it on, or its
    lease ends before it is copied. From `dies_s` on there is no daemon.
    """

    def __init__(
        self, clock: StepClock, chunk_s: float, faults: dict[int, Fault] | None = None, dies_s: float = float("inf")
    ) -> None:
        self._clock, self._chunk_s, self._faults, self._dies_s = clock, chunk_s, faults or {}, dies_s
        self.open: dict[BlockStream, _Coming] = {}
        self.fetches: list[Fetch] = []

    def request(
        self, session: MemorySession, tokens: Any, *, max_blocks: int, deadline_s: float, window_tokens: int = 0
    ) -> Fetch:
        fetch = Fetch(self._clock.now, self._clock.now + deadline_s, done=True)
        with contextlib.suppress(ConnectionResetError):
            if self._clock.now < self._dies_s:
                if window_tokens:
                    max_blocks = look_up_window(fetch, session, tokens, max_blocks, deadline_s, window_tokens)
                lease = session.get(tokens, max_blocks=max_blocks, deadline_s=deadline_s, promote=False)
                fetch.lease, fetch.tiers = lease, session.lookup(tokens, deadline_s=1.0).tiers[: lease.resident_blocks]
                fetch.estimated_load_s = self._chunk_s * (lease.resident_blocks - len(lease))
        fetch.failure = "" if fetch.lease is not None else "gone"
        self.fetches.append(fetch)
        return fetch

    def stream(self, session: MemorySession, tokens: Any, *, max_blocks: int, deadline_s: float) -> BlockStream:
        source = session.get_stream(tokens, order="back", max_blocks=max_blocks, deadline_s=deadline_s)
        now = self._clock.now
        runs, at_s = [], now
        for run in source._runs:
            fault = self._faults.get(run.start)
            is_mapped = source.tiers[run.start] == "host"
            at_s += 0.0 if is_mapped else self._chunk_s
            if fault == "stall" and not is_mapped:
                at_s = float("inf")
            if fault != "vanish" or is_mapped:
                runs.append((at_s, run))
        stream = BlockStream(now, tiers=source.tiers)
        self.open[stream] = _Coming(session, tokens, runs)
        self._pump()
        return stream

    def take(self, stream: BlockStream) -> list[ArrivedBlocks]:
        self._pump()
        arrived, stream.arrived = stream.arrived, []
        return arrived

    def drop(self, dropped: Fetch | BlockStream) -> None:
        if isinstance(dropped, Fetch):
            dropped.close()
        elif (coming := self.open.pop(dropped, None)) is not None:
            for lease in coming.leases:
                lease.released = True

    def wait(self, awaited: Iterable[Fetch | BlockStream], timeout_s: float) -> None:
        """Moves the clock to the next arrival, or by `timeout_s`."""
        self._pump()
        if any(each.has_news for each in awaited):
            return
        times = [coming.runs[0][0] for coming in self.open.values() if coming.runs]
        self._clock.now = max(self._clock.now, min([self._clock.now + timeout_s, self._dies_s, *times]))
        if self._clock.now >= self._dies_s:
            self._clock.now += timeout_s
        self._pump()

    def close(self) -> None:
        assert not self.open, "a stream was left open"

    def _pump(self) -> None:
        now = self._clock.now
        for stream, coming in self.open.items():
            while coming.runs and coming.runs[0][0] <= min(now, self._dies_s):
                at_s, run = coming.runs.pop(0)
                lease = coming.session.grant(coming.tokens, run)
                lease.valid = all(self._faults.get(block) != "lease ends" for block in run)
                coming.leases.append(lease)
                stream.arrived.append(ArrivedBlocks(run.start, lease, at_s))
            if now >= self._dies_s:
                for lease in coming.leases:
                    lease.valid = False
            stream.done = stream.done or not coming.runs or now >= self._dies_s
