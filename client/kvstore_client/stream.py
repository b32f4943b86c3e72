"""Many calls in flight on one stream, over any transport.

The module owns request ids, which thread waits for which call, which thread reads for all, and the late answers of
abandoned calls. Waiting is bounded by the caller's deadline.

A thread that waits reads the stream, if the transport lets it, until its own answer has arrived. Other waiting threads
get their answers from it, and one of them takes over when it is done (leader and followers: Schmidt et al., 2000).

It never retries or reconnects. Invariants: a call gets at most its answers and one end; after the end each wait returns
at once; a lease id given to `release` is sent until the daemon has confirmed it.
"""

from __future__ import annotations

import heapq
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from kvstore_client.call import Call, Late, StreamHealth
from kvstore_client.trace import TRACE
from kvstore_client.transport.base import Transport
from kvstore_proto.v1 import kvstore_pb2 as wire

RELEASE_DELAY_S: Final = 0.005
_MAX_RELEASES_A_MESSAGE = 1024
_PENDING = wire.DURABILITY_PENDING


class RequestStream:
    """A stream of requests to the daemon, with many calls in flight at once, over `transport`. `health` gets a report
    of every answer, and of the end of the stream unless `close` was called. `unreleased` is a queue of the numbers of
    leases to give back, which a later stream of the session continues to use.
    """

    def __init__(self, transport: Transport, health: StreamHealth, unreleased: deque[int]) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, Call] = {}
        self._followers: dict[Call, None] = {}  # calls whose threads wait and do not read
        self._late_answers = 0  # of abandoned calls, still to come
        self._releases: dict[int, list[int]] = {}  # sent, not yet confirmed
        self._unreleased = unreleased
        self._release_waits = False
        self._timers: list[tuple[float, int, Callable[[], None]]] = []  # a heap
        self.confirmed_releases = 0  # requests of releases that the daemon has answered
        self._releasing = threading.Lock()  # so that a delete cannot pass what was given back before it
        self._ids = itertools.count(1)
        self.health = health
        self._last_words = ""
        self.ended = ""  # why, once it has
        self._pid = os.getpid()
        self._transport = transport
        transport.start(self)
        if unreleased:
            self._nudge_releases()

    @property
    def message_bytes(self) -> int:
        return self._transport.codec.message_bytes

    @property
    def payload_bytes(self) -> int:
        """The bytes of block payload inside the messages of this stream, in both directions."""
        return self._transport.codec.payload_bytes

    @property
    def is_ours(self) -> bool:
        """False in a forked child, where a lock that another thread held at the fork is never released."""
        return os.getpid() == self._pid

    def submit(self, request: wire.Request) -> Call:
        """Send `request`, whose number is set here, and return the call to wait on. It never blocks; if the stream has
        ended, or is a parent process's, the call has an error as its answer.
        """
        if not self.is_ours:
            (call := Call(0, self)).answer(_ended(0, "the stream is the parent process's"))
            return call
        if request.HasField("delete"):
            self.send_releases()  # a lease that was given back must not protect its blocks
        call = Call(next(self._ids), self)
        request.request_id = call.request_id
        if trace := TRACE.get():
            request.trace = trace
        with self._lock:
            ended = self.ended
            if not ended:
                self._waiting[call.request_id] = call
        if ended:
            call.answer(_ended(call.request_id, ended))
        else:
            self._transport.send(request)
        return call

    def abandon(self, call: Call, late: Late | None) -> None:
        """Stop waiting for the answers to `call`. If `late` is given, it is called with each answer that has just
        arrived or still arrives. A thread that still waits gets the last answer.
        """
        if not self.is_ours:
            return
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

    def cancel(self, call: Call, late: Late) -> None:
        """Stop waiting for the answers to `call`, and ask the daemon to end its work on it. `late` is called with each
        answer that still arrives.
        """
        if not self.is_ours:
            return
        self.abandon(call, late)
        with self._lock:
            is_under_way = call.request_id in self._waiting
        if is_under_way:
            release = wire.Release(request_ids=[call.request_id])
            self._transport.send(wire.Request(request_id=next(self._ids), release=release))

    def wait(self, call: Call, timeout_s: float) -> wire.Response | None:
        """Wait up to `timeout_s` seconds for the next answer to `call`, and return it. Return None if no answer came in
        time.
        """
        deadline = time.monotonic() + timeout_s
        if self._transport.read_until(call.is_answered, deadline):
            return call.taken()
        with self._lock:
            call.may_sleep()  # what was answered before does not wake, so the loop looks first
            self._followers[call] = None
        try:
            while not (call.is_answered() or self._transport.read_until(call.is_answered, deadline)):  # both again
                call.sleep(deadline - time.monotonic())
                if time.monotonic() >= deadline:
                    break
        finally:
            with self._lock:
                del self._followers[call]
            if not self._transport.is_read():  # this call may have been woken to take over
                self.reading_ended()
        return call.taken()

    def release(self, lease_ids: Sequence[int]) -> None:
        """Give the leases with the numbers `lease_ids` back within milliseconds, in one message together with other
        releases. It does not wait.
        """
        if not self.is_ours:
            return
        self._unreleased.extend(lease_ids)
        self._nudge_releases()

    def call_later(self, delay_s: float, function: Callable[[], None]) -> None:
        """Call `function` after `delay_s` seconds, in a thread of the transport. It is not called if the stream ends
        before.
        """
        at = time.monotonic() + delay_s
        with self._lock:
            heapq.heappush(self._timers, (at, next(self._ids), function))
            if self._timers[0][0] == at:
                self._transport.call_in(delay_s)

    def close(self) -> None:
        """End the stream. Each call in flight gets an error of kind UNAVAILABLE as its answer."""
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
                    call.wake()
                    break

    def received(self, response: wire.Response) -> None:
        self.health.answered()
        with self._lock:
            self.confirmed_releases += self._releases.pop(response.request_id, None) is not None
            call = self._waiting.get(response.request_id)
            if call is None:
                if not response.request_id:  # to no request: why the daemon will end the stream
                    self._last_words = response.error.message
                return
            if not _has_second_answer(response):
                del self._waiting[response.request_id]
                self._late_answers -= call.late is not None
            late = call.late
            if late is None or not _has_second_answer(response):  # no thread needs to wait after the last one
                call.answer(response)
        if late is not None and not response.HasField("error"):
            late(response)

    def alarm(self) -> None:
        now, due = time.monotonic(), []
        with self._lock:
            while self._timers and self._timers[0][0] <= now:
                due.append(heapq.heappop(self._timers)[2])
            if self._timers:
                self._transport.call_in(self._timers[0][0] - now)
        for function in due:
            function()

    def transport_ended(self, reason: str) -> None:
        reason = self._last_words or reason
        if self._finish(reason):
            self.health.stream_ended(reason)

    def _nudge_releases(self) -> None:
        with self._lock:
            if self._release_waits or self.ended:
                return
            self._release_waits = True
        self.call_later(RELEASE_DELAY_S, self._release_due)

    def _release_due(self) -> None:
        with self._lock:
            self._release_waits = False
        self.send_releases()

    def send_releases(self) -> bool:
        """Send the releases of all leases that were given back and not sent yet. Return True while the daemon has not
        confirmed all releases.
        """
        if not self.is_ours:
            return False
        with self._releasing:
            while (request := self._next_releases()) is not None:
                self._transport.send(request)
        return bool(self._releases)

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
        """End every call; return False if the stream had ended before."""
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
    """Return whether a second answer follows: to a store that left blocks pending, when they have settled; to an
    acquire in an order, if it has `more`.
    """
    if response.HasField("acquire"):
        return response.acquire.more
    if not response.HasField("store"):
        return False
    return not response.store.final and _PENDING in response.store.durability


def _ended(request_id: int, reason: str) -> wire.Response:
    error = wire.Error(kind=wire.ERROR_KIND_UNAVAILABLE, message=reason)
    return wire.Response(request_id=request_id, error=error)
