"""Leases on a prefix as its blocks become readable, in an order the caller chose; and streams of leases for several
layer groups.

The module owns the leases granted so far and the call whose answers grant more. Closing a stream releases everything:
the leases, also ones that were not handed out, and the leases of late answers.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Final, Generic, Literal, NamedTuple, Protocol, TypeVar

from kvstore_client.call import Call
from kvstore_client.lease import Lease
from kvstore_client.results import REASON_DEADLINE, Lookup, miss_reason, tier_names
from kvstore_proto.fingerprint import LayerGroup
from kvstore_proto.v1 import kvstore_pb2 as wire

Order = Literal["front", "back"]
ORDERS: Final = ("front", "back")
_CLOSED_S = 0.1  # a thread that waits for an answer notices after so long that its lease stream was closed


class LeasedRun(NamedTuple):
    """Consecutive blocks of a prefix that are readable now. `first` is the number of the first of them in the prefix,
    and `lease` has their bytes.
    """

    first: int
    lease: Lease


class PrefixPiece(Protocol):
    """A piece of a prefix, from block number `first` on, that one request asks for. It sends the request, and makes
    leases out of the answers.
    """

    @property
    def first(self) -> int: ...
    def begin(self) -> Call:
        """Send the request for the blocks of this piece, and return the call to wait on."""
        ...

    def lease_of(self, reply: wire.AcquireReply, timeout_s: float) -> Lease:
        """Return a lease on the usable blocks of the daemon's answer `reply`. If none is usable, the lease has no
        blocks and its `reason` says why. Mapping memory may take `timeout_s` seconds.
        """
        ...

    def give_back(self, lease_id: int) -> None:
        """Release the lease `lease_id` of an answer that arrived too late. The number 0 stands for no lease."""
        ...


class Rest(NamedTuple):
    """The later requests of a stream whose prefix takes several requests. `first` is the first block of the piece that
    is requested now, and `following` are the pieces to request afterwards, in order. `expected` says which blocks of
    the whole prefix are stored.
    """

    first: int
    following: Sequence[PrefixPiece]
    expected: Lookup


class LeaseStream:
    """An iterator over leases on a prefix: a `LeasedRun` comes each time some of its blocks have become readable.
    Iterate over it once, as a context manager; all leases end with it.

    `group` is the layer group of the blocks. After `expect` or the first run, `tiers` says in which tier each stored
    block was, and `ready_s` in how many seconds it was expected to be readable. In the end `reason` says why the prefix
    ends, or why a part of it was not leased. `rest` is for a prefix that takes several requests. Another thread may
    call `close` while this one waits for a run; the iteration then ends. `on_close` is called once, with the number of
    leased blocks and their payload bytes.
    """

    def __init__(
        self,
        source: PrefixPiece | None,
        call: Call | None,
        group: LayerGroup,
        deadline_s: float,
        *,
        on_close: Callable[[int, int], None],
        reason: str = "",
        clock: Callable[[], float] = time.monotonic,
        rest: Rest | None = None,
    ) -> None:
        self.group = group
        self._source = source
        self._call = call  # None: no further answers
        self._first = 0 if rest is None else rest.first  # of the piece that is asked for
        self._following = deque(() if rest is None else rest.following)
        self._piece_blocks = 0  # leased so far of that piece
        self._is_whole = rest is not None
        self._clock = clock
        self._until = clock() + deadline_s
        self._on_close = on_close
        self._reading = threading.Lock()  # held by the thread that waits for an answer
        self._is_expected = False
        self._ahead: LeasedRun | None = None  # leased while `expect` waited
        self._lock = threading.Lock()  # of the next two, and of what was leased so far
        self._is_closed = False
        self._leases: list[Lease] = []
        self.tiers: tuple[str, ...] = () if rest is None else rest.expected.tiers[: rest.expected.blocks]
        self.ready_s: tuple[float, ...] = () if rest is None else tuple(accumulate(rest.expected.load_s))
        self.reason = reason
        self.blocks = self.payload_bytes = 0  # leased so far

    def __iter__(self) -> LeaseStream:
        return self

    def __next__(self) -> LeasedRun:
        with self._reading:
            run, self._ahead = self._ahead, None
            while run is None:
                reply = self._next_reply()
                if reply is None:
                    raise StopIteration
                run = self._run(reply)
            return run

    def expect(self) -> int:
        """Wait for the daemon's first answer, but for no block to be loaded, and return the number of leading blocks of
        the prefix that are stored in some tier.
        """
        with self._reading:
            if not self._is_expected:
                reply = self._next_reply()
                self._ahead = None if reply is None else self._run(reply)
            return len(self.tiers)

    def close(self) -> None:
        """Release the leases of all runs and end the request. A second call does nothing."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
            leases, self._leases = self._leases, []
            self._ahead = None
        self._end()
        for lease in leases:
            lease.release()
        if not was_closed:
            self._on_close(self.blocks, self.payload_bytes)

    def __enter__(self) -> LeaseStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next_reply(self) -> wire.AcquireReply | None:
        """Return the next answer that may grant blocks; None if there are no more."""
        self._is_expected = True
        while (call := self._call) is not None:
            answer = self._answer(call)
            if answer is None:
                self.reason = REASON_DEADLINE
                self._end()
            elif isinstance(answer, str):
                self.reason, self._call = answer, None
            else:
                reply = answer.acquire
                if reply.tiers and not self._is_whole:
                    self.tiers = tier_names(reply.tiers)
                    self.ready_s = tuple(each / 1e6 for each in reply.ready_us)
                if reply.more:
                    return reply
                self.reason = miss_reason(reply.miss_reason) or self.reason
                self._next_piece()
        return None

    def _next_piece(self) -> None:
        """Ask for the next piece, unless the piece before was not leased whole."""
        with self._lock:
            self._call = None
            if self._is_closed or not self._following:
                return
            piece = self._following.popleft()
            if self._piece_blocks < piece.first - self._first:
                return
            self._source, self._first, self._piece_blocks, self._call = piece, piece.first, 0, piece.begin()

    def _answer(self, call: Call) -> wire.Response | str | None:
        """Return the next answer, judged; None if none came in time, or once `close` was called. Short waits are not
        recorded as timeouts: only the deadline is.
        """
        while not self._is_closed:
            left_s = self._left_s()
            if left_s <= _CLOSED_S:
                return call.result(left_s)
            response = call.wait(_CLOSED_S)
            if response is not None:
                return call.judge(response)
        return None

    def _run(self, reply: wire.AcquireReply) -> LeasedRun | None:
        """Return the usable blocks of an answer, leased until `close`; None if that was called meanwhile."""
        source = self._source
        if not reply.blocks or source is None:
            return None
        lease = source.lease_of(reply, max(self._left_s(), 0.001))
        with self._lock:
            if not self._is_closed:
                self._leases.append(lease)
                self.blocks += lease.blocks
                self._piece_blocks += lease.blocks
                self.payload_bytes += lease.payload_bytes
                self.reason = lease.reason or self.reason
                return LeasedRun(self._first + reply.first, lease) if lease.blocks else None
        lease.release()
        return None

    def _left_s(self) -> float:
        return max(0.0, self._until - self._clock())

    def _end(self) -> None:
        call, self._call = self._call, None
        source = self._source
        if call is not None and source is not None:
            call.cancel(lambda late: source.give_back(late.acquire.lease_id))


class Closable(Protocol):
    def close(self) -> None: ...


StreamKind = TypeVar("StreamKind", bound=Closable)


class LayerStreams(Generic[StreamKind]):
    """A sequence of lease streams, one for each requested layer group, in the order in which the groups are loaded.
    Leaving it as a context manager closes all of the streams.
    """

    def __init__(self, streams: Iterable[StreamKind]) -> None:
        self._streams = tuple(streams)

    def __iter__(self) -> Iterator[StreamKind]:
        return iter(self._streams)

    def __len__(self) -> int:
        return len(self._streams)

    def close(self) -> None:
        """Close every stream, which releases all of its leases. A second call does nothing."""
        for stream in self._streams:
            stream.close()

    def __enter__(self) -> LayerStreams[StreamKind]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def no_leases(group: LayerGroup, on_close: Callable[[int, int], None], reason: str) -> LeaseStream:
    """Return a stream for the layer group `group` that yields no blocks, because of `reason`. `on_close` is called with
    zeros when it is closed.
    """
    return LeaseStream(None, None, group, 0.0, on_close=on_close, reason=reason)
