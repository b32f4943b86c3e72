"""A link of a given bandwidth before a session's DRAM: what a slower tier or a network would bring, block by block.

Owns the time that blocks take, in real time. What is looked up, leased and read is the daemon's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Literal

from kvstore_client import Session
from kvstore_client.lease import Lease
from kvstore_client.lease_stream import LeaseStream
from kvstore_engine.restore.session import Bytes, Tokens

TIER = "link"


class Link:
    """One device's link: loads follow one another, each takes `latency_s` and its bytes at `bytes_s`."""

    def __init__(self, bytes_s: float, latency_s: float = 0.0) -> None:
        self._bytes_s, self._latency_s = bytes_s, latency_s
        self._lock = threading.Lock()
        self._free_s = 0.0

    def done_s(self, nbytes: int) -> float:
        """Begin a load behind those under way. Returns when it will be done, by `time.perf_counter`."""
        with self._lock:
            self._free_s = max(self._free_s, time.perf_counter()) + self._latency_s + nbytes / self._bytes_s
            return self._free_s


class ThrottledSession:
    """`session`, all of whose blocks are in DRAM, behind `link`. Has what `StagedRestorer` needs of a session."""

    def __init__(self, session: Session, link: Link) -> None:
        self._session, self._link = session, link

    @property
    def state(self) -> str:
        return self._session.state

    def lookup(self, tokens: Tokens, *, deadline_s: float) -> _Lookup:
        found = self._session.lookup(tokens, deadline_s=deadline_s).tiers
        return _Lookup(tuple(TIER if tier == "host" else tier for tier in found))

    def get_stream(
        self, tokens: Tokens, *, order: Literal["front", "back"], max_blocks: int, deadline_s: float
    ) -> _ThrottledStream:
        return _ThrottledStream(
            self._session.get_stream(tokens, order=order, max_blocks=max_blocks, deadline_s=deadline_s),
            self._link,
            is_backward=order == "back",
        )


class _Lookup:
    load_s: tuple[float, ...] = ()  # the daemon knows nothing of the link

    def __init__(self, tiers: tuple[str, ...]) -> None:
        self.tiers = tiers


class _BlockLease:
    """One block of a lease, which ends with the stream."""

    def __init__(self, lease: Lease, at: int) -> None:
        self._lease, self._at = lease, at

    @property
    def valid(self) -> bool:
        return self._lease.valid

    def __len__(self) -> int:
        return 1

    def payload(self, index: int) -> Bytes:
        return self._lease.payload(self._at + index)

    def __exit__(self, *error: object) -> None:
        return None


class _ThrottledStream:
    def __init__(self, source: LeaseStream, link: Link, *, is_backward: bool) -> None:
        self._source, self._link, self._is_backward = source, link, is_backward
        self._closed = threading.Event()
        self.reason = ""

    @property
    def tiers(self) -> tuple[str, ...]:
        return tuple(TIER if tier == "host" else tier for tier in self._source.tiers)

    def __iter__(self) -> Iterator[tuple[int, _BlockLease]]:
        for first, lease in self._source:
            blocks = range(len(lease))
            for at in reversed(blocks) if self._is_backward else blocks:
                done_s = self._link.done_s(lease.payload(at).nbytes)
                if self._closed.wait(max(0.0, done_s - time.perf_counter())):
                    return
                yield first + at, _BlockLease(lease, at)

    def close(self) -> None:
        self._closed.set()
        self._source.close()
