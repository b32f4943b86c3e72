"""Many requests in flight on one stream, whatever carries it.

Owns request ids, who waits for which, who of those that wait reads for all of them, and what happens to an answer
nobody waits for any more. Waiting is bounded by the caller's deadline.

Who waits reads, if the transport lets him, until his own answer has come; those who wait meanwhile get theirs from him,
and one of them goes on when he leaves (leader and followers: Schmidt et al., 2000).

Never does: retry, reconnect, or judge an answer. Invariants: every call gets at most its answers and one end;
after the end each wait returns at once; a lease id given to `release` is sent until the daemon has confirmed
it.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from kvstore_client.transport.base import Transport
from kvstore_proto.v1 import kvstore_pb2 as wire

RELEASE_DELAY_S: Final = 0.005
_MAX_RELEASES_A_MESSAGE = 1024
_PENDING = wire.DURABILITY_PENDING

Late = Callable[[wire.Response], None]


class PendingCall:
    """A request on its way. `wait` may be called again for a request that has several answers."""

    __slots__ = ("_answers", "_stream", "_told", "late", "request_id")

    def __init__(self, request_id: int, stream: Stream) -> None:
        self.request_id = request_id
        self.late: Late | None = None
        self._stream = stream
        self._answers: deque[wire.Response] = deque()
        self._told: queue.SimpleQueue[None] = queue.SimpleQueue()

    def wait(self, timeout_s: float) -> wire.Response | None:
        """The next answer; None when none came in time. The stream's end is an `error`, UNAVAILABLE."""
        answered = self.taken()
        return self._stream.wait(self, timeout_s) if answered is None else answered

    def taken(self) -> wire.Response | None:
        """The next answer, if it has been read already."""
        return self._answers.popleft() if self._answers else None

    def is_answered(self) -> bool:
        return bool(self._answers)

    def answer(self, response: wire.Response) -> None:
        self._answers.append(response)
        self.tell()

    def tell(self) -> None:
        """Have whoever waits for this call look again."""
        self._told.put(None)

    def look_again(self, timeout_s: float) -> None:
        """Wait to be told so. It may be for nothing."""
        with contextlib.suppress(queue.Empty):
            self._told.get(timeout=max(timeout_s, 0.0))


class Stream:
    """See the module. `on_end(reason)` is called once, from whichever thread reads, unless `close` was
    called.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        on_end: Callable[[str], None],
        on_answer: Callable[[], None],
        unreleased: deque[int],
    ) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, PendingCall] = {}
        self._followers: dict[PendingCall, None] = {}  # calls whose waiters do not read
        self._late_answers = 0  # of abandoned calls, still to come
        self._releases: dict[int, list[int]] = {}  # sent, not yet confirmed
        self._unreleased = unreleased  # survives this stream
        self._release_waits = False
        self._releasing = threading.Lock()  # so that a delete cannot pass what was given back before it
        self._ids = itertools.count(1)
        self._on_end, self._on_answer = on_end, on_answer
        self._last_words = ""
        self.ended = ""  # why, once it has
        self._transport = transport
        transport.start(self)
        if unreleased:
            self._nudge_releases()

    @property
    def message_bytes(self) -> int:
        return self._transport.codec.message_bytes

    @property
    def payload_bytes(self) -> int:
        """Of opaque payload inside the messages."""
        return self._transport.codec.payload_bytes

    def submit(self, request: wire.Request) -> PendingCall:
        """Send a request; its id is set here. Never blocks."""
        if request.HasField("delete"):
            self._send_releases()  # a lease that was given back must not keep its blocks
        call = PendingCall(next(self._ids), self)
        request.request_id = call.request_id
        with self._lock:
            ended = self.ended
            if not ended:
                self._waiting[call.request_id] = call
        if ended:
            call.answer(_ended(call.request_id, ended))
        else:
            self._transport.send(request)
        return call

    def abandon(self, call: PendingCall, late: Late | None = None) -> None:
        """The caller has stopped waiting. `late`, if given, sees answers that still come (or have just come). A thread
        that waits all the same is answered with the last one.
        """
        answered = []
        with self._lock:
            while (answer := call.taken()) is not None:
                answered.append(answer)
            if call.late is None and call.request_id in self._waiting:
                self._late_answers += 1
            call.late = late or _ignore
        if self._late_answers:
            self._transport.attend()
        for answer in answered:
            if late is not None and not answer.HasField("error"):
                late(answer)

    def give_up(self, call: PendingCall, late: Late) -> None:
        """`abandon` an acquire, and have the daemon end it."""
        self.abandon(call, late)
        with self._lock:
            is_under_way = call.request_id in self._waiting
        if is_under_way:
            release = wire.Release(request_ids=[call.request_id])
            self._transport.send(wire.Request(request_id=next(self._ids), release=release))

    def wait(self, call: PendingCall, timeout_s: float) -> wire.Response | None:
        """As `PendingCall.wait`, which is what to call."""
        deadline = time.monotonic() + timeout_s
        if self._transport.read_until(call.is_answered, deadline):
            return call.taken()
        with self._lock:
            self._followers[call] = None
        try:
            while not self._transport.read_until(call.is_answered, deadline):  # again: the reader may just have stopped
                call.look_again(deadline - time.monotonic())
                if call.is_answered() or time.monotonic() >= deadline:
                    break
        finally:
            with self._lock:
                del self._followers[call]
            if not self._transport.is_read():  # we may have been told to go on
                self.reading_ended()
        return call.taken()

    def release(self, lease_ids: Sequence[int]) -> None:
        """Give leases back, some time soon, together with others given back meanwhile."""
        self._unreleased.extend(lease_ids)
        self._nudge_releases()

    def close(self) -> None:
        """End the stream; calls in flight end as unavailable."""
        self._finish("the session was closed")
        self._transport.close()

    # What the transport calls

    @property
    def awaits_late_answers(self) -> bool:
        return self._late_answers > 0

    def reading_ended(self) -> None:
        if self._followers:
            with self._lock:
                for call in self._followers:
                    call.tell()
                    break

    def received(self, response: wire.Response) -> None:
        self._on_answer()
        with self._lock:
            self._releases.pop(response.request_id, None)
            call = self._waiting.get(response.request_id)
            if call is None:
                if not response.request_id:  # an answer to no request: the daemon says why it will end the stream
                    self._last_words = response.error.message
                return
            if not _has_second_answer(response):
                del self._waiting[response.request_id]
                self._late_answers -= call.late is not None
            late = call.late
            if late is None or not _has_second_answer(response):  # after the last one no thread need wait any more
                call.answer(response)
        if late is not None and not response.HasField("error"):
            late(response)

    def alarm(self) -> None:
        with self._lock:
            self._release_waits = False
        self._send_releases()

    def transport_ended(self, reason: str) -> None:
        reason = self._last_words or reason
        if self._finish(reason):
            self._on_end(reason)

    def _nudge_releases(self) -> None:
        with self._lock:
            if self._release_waits or self.ended:
                return
            self._release_waits = True
        self._transport.call_in(RELEASE_DELAY_S)

    def _send_releases(self) -> None:
        with self._releasing:
            while (request := self._next_releases()) is not None:
                self._transport.send(request)

    def _next_releases(self) -> wire.Request | None:
        with self._lock:
            count = min(len(self._unreleased), _MAX_RELEASES_A_MESSAGE)
            if not count or self.ended:
                return None
            lease_ids = [self._unreleased.popleft() for _ in range(count)]
            request_id = next(self._ids)
            self._releases[request_id] = lease_ids
        return wire.Request(request_id=request_id, release=wire.Release(lease_ids=lease_ids))

    def _finish(self, reason: str) -> bool:
        """End all that waits; False when it has ended before."""
        with self._lock:
            if self.ended:
                return False
            self.ended = reason
            for lease_ids in self._releases.values():
                self._unreleased.extend(lease_ids)
            self._releases.clear()
            waiting, self._waiting = self._waiting, {}
            self._late_answers = 0
        for call in waiting.values():
            call.answer(_ended(call.request_id, reason))
        return True


def _ignore(_: wire.Response) -> None:
    return None


def _has_second_answer(response: wire.Response) -> bool:
    """A store that left blocks pending is answered again when they have settled; an acquire in an order says so."""
    if response.HasField("acquire"):
        return response.acquire.more
    if not response.HasField("store"):
        return False
    return not response.store.final and _PENDING in response.store.durability


def _ended(request_id: int, reason: str) -> wire.Response:
    error = wire.Error(kind=wire.ERROR_KIND_UNAVAILABLE, message=reason)
    return wire.Response(request_id=request_id, error=error)
