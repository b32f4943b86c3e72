"""A prefix whose blocks are handed out as they become readable, in an order the caller chose.

Owns the leases that have come and the answers that are still to come. Leaving it gives everything back: leases that
nobody reads, and those of answers that are late.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Literal, NamedTuple, Protocol

from kvstore_client.lease import Lease
from kvstore_client.results import REASON_DEADLINE, REASON_NO_DAEMON, miss_reason, tier_name
from kvstore_proto.v1 import kvstore_pb2 as wire

Order = Literal["front", "back"]


class LeasedRun(NamedTuple):
    """Blocks first, first + 1, … of the prefix, readable now."""

    first: int
    lease: Lease


class Answers(Protocol):
    """The answers to one request."""

    def next(self, timeout_s: float) -> wire.Response | str | None:
        """The next one, the reason why there is none, or None: not in time. Raises KVStoreError."""
        ...

    def abandon(self) -> None:
        """Leases in answers that still come are given back."""
        ...


class LeaseStream:
    """Iterate over it once: a `LeasedRun` each time blocks have become readable. Use it as a context manager; all
    leases end with it.

    `tiers` and `ready_s` say, once the first run has come, where each resident block was and in how many seconds it
    was expected to be readable; `reason` says in the end why the prefix ends, or which part of it did not come.
    `on_close` is called once, with the blocks that were leased and their payload bytes.
    """

    def __init__(
        self,
        answers: Answers | None,
        lease_of: Callable[[wire.AcquireReply, float], Lease],
        deadline_s: float,
        *,
        on_close: Callable[[int, int], None],
        reason: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._answers = answers
        self._lease_of = lease_of
        self._clock = clock
        self._until = clock() + deadline_s
        self._on_close = on_close
        self._is_closed = False
        self._leases: list[Lease] = []
        self.tiers: tuple[str, ...] = ()
        self.ready_s: tuple[float, ...] = ()
        self.reason = reason
        self.blocks = self.payload_bytes = 0  # leased so far

    def __iter__(self) -> Iterator[LeasedRun]:
        while self._answers is not None:
            left_s = max(0.0, self._until - self._clock())
            answer = self._answers.next(left_s)
            if answer is None:
                self.reason = REASON_DEADLINE
                self._end()
                return
            if isinstance(answer, str):
                self.reason, self._answers = answer, None
                return
            reply = answer.acquire
            if reply.tiers:
                self.tiers = tuple(map(tier_name, reply.tiers))
                self.ready_s = tuple(each / 1e6 for each in reply.ready_us)
            if not reply.more:
                self.reason, self._answers = miss_reason(reply.miss_reason), None
                return
            lease = self._lease_of(reply, max(left_s, 0.001))
            self._leases.append(lease)
            if not lease.blocks:
                self.reason = lease.reason
                continue
            self.blocks += lease.blocks
            self.payload_bytes += lease.payload_bytes
            yield LeasedRun(reply.first, lease)

    def _end(self) -> None:
        if self._answers is not None:
            self._answers.abandon()
            self._answers = None

    def close(self) -> None:
        """Give everything back. Idempotent."""
        self._end()
        for lease in self._leases:
            lease.release()
        self._leases.clear()
        if not self._is_closed:
            self._is_closed = True
            self._on_close(self.blocks, self.payload_bytes)

    def __enter__(self) -> LeaseStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def nothing(on_close: Callable[[int, int], None], reason: str = REASON_NO_DAEMON) -> LeaseStream:
    """A stream without a block."""
    return LeaseStream(None, lambda reply, timeout_s: Lease(), 0.0, on_close=on_close, reason=reason)
