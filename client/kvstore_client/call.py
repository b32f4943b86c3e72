"""One request under way, and its answers.

The module owns the answers that were read and not yet taken, and the only code that makes of a response a result, a
reason for a miss, or an exception for a user's mistake. It does not build requests or read the stream.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable
from typing import Final, Protocol

from kvstore_client.errors import error_kind
from kvstore_client.results import REASON_NO_DAEMON
from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.v1 import kvstore_pb2 as wire

_MISTAKES: Final = frozenset({ErrorKind.INVALID, ErrorKind.TOO_LARGE, ErrorKind.FORBIDDEN, ErrorKind.NOT_FOUND})
Late = Callable[[wire.Response], None]
"""Called with an answer that arrives after its call was abandoned."""


class StreamHealth(Protocol):
    """A receiver of reports about the connection to the daemon, from its streams and calls. They may report from any
    thread.
    """

    def answered(self) -> None:
        """Report that the daemon answered a request, even if its answer came after the deadline."""
        ...

    def timed_out(self) -> None:
        """Report that a request got no answer within its deadline."""
        ...

    def stream_ended(self, reason: str) -> None:
        """Report that a stream of requests ended because of `reason`, without a `close` by this client."""
        ...

    def session_ended(self, stream: CallStream, reason: str) -> None:
        """Report that the daemon no longer knows the session whose requests `stream` carries. `reason` is one line for
        the user.
        """
        ...


class CallStream(Protocol):
    """A stream of requests to the daemon, with the methods by which a `Call` waits for its answers or stops waiting."""

    @property
    def health(self) -> StreamHealth: ...
    @property
    def ended(self) -> str:
        """The reason why the stream has ended, or "" while it has not ended."""
        ...

    def wait(self, call: Call, timeout_s: float) -> wire.Response | None: ...
    def abandon(self, call: Call, late: Late | None) -> None: ...
    def cancel(self, call: Call, late: Late) -> None: ...


class Call:
    """A request that was sent to the daemon, with its answers. `Stream.submit` makes it, and `stream` carries it under
    the number `request_id`. If a request has several answers, call `wait` or `result` once for each of them.
    """

    __slots__ = ("_answers", "_stream", "_wake_ups", "late", "request_id")

    def __init__(self, request_id: int, stream: CallStream) -> None:
        self.request_id = request_id
        self.late: Late | None = None
        self._stream = stream
        self._answers: list[wire.Response] = []
        self._wake_ups: queue.SimpleQueue[None] | None = None  # of a thread that sleeps

    def wait(self, timeout_s: float) -> wire.Response | None:
        """Wait up to `timeout_s` seconds, and return the daemon's next answer to this request, or None if no answer
        came in time. If the stream has ended, the answer has an `error` of kind UNAVAILABLE.
        """
        return self._answers.pop(0) if self._answers else self._stream.wait(self, timeout_s)

    def result(self, timeout_s: float) -> wire.Response | str | None:
        """Wait up to `timeout_s` seconds for the next answer to this request. Return the answer, or the reason for a
        miss if the daemon reports an error. Return None, and record a timeout, if no answer came. Raises
        KVStoreError as `judge` does.
        """
        response = self.wait(timeout_s)
        if response is None:
            self._stream.health.timed_out()
            return None
        return self.judge(response)

    def judge(self, response: wire.Response) -> wire.Response | str:
        """Return `response` itself if it carries no error, or else a word that gives the reason for a miss.

        Raises KVStoreError if the daemon says that the request itself is wrong.
        """
        if not response.HasField("error"):
            return response
        error = response.error
        kind = error_kind(error.kind)
        if kind in _MISTAKES:
            raise KVStoreError(kind, error.message, error.retry_after_ms)
        if kind is ErrorKind.UNAUTHENTICATED:
            self._stream.health.session_ended(self._stream, f"the daemon ended this session: {error.message}")
            return REASON_NO_DAEMON
        return REASON_NO_DAEMON if self._stream.ended else kind.name.lower()

    def abandon(self, late: Late | None = None) -> None:
        """Stop waiting for answers to this request. If `late` is given, it is called with each answer that has just
        arrived or still arrives.
        """
        self._stream.abandon(self, late)

    def expire(self, late: Late | None = None) -> None:
        """Stop waiting for answers, as `abandon` does, and record that the daemon did not answer in time. `late` is
        called with each answer that still arrives.
        """
        self._stream.abandon(self, late)
        self._stream.health.timed_out()

    def cancel(self, late: Late) -> None:
        """Stop waiting for this request, and ask the daemon to end its work on it. `late` is called with each answer
        that still arrives. It is meant for an acquire, the request of a get.
        """
        self._stream.cancel(self, late)

    # For the stream

    def taken(self) -> wire.Response | None:
        """Remove and return the earliest answer to this request that has arrived and was not returned yet. Return None
        if there is no such answer.
        """
        return self._answers.pop(0) if self._answers else None

    def is_answered(self) -> bool:
        return bool(self._answers)

    def answer(self, response: wire.Response) -> None:
        self._answers.append(response)
        self.wake()

    def wake(self) -> None:
        """Wake the thread that is in `sleep` for this call, or is about to be."""
        if self._wake_ups is not None:
            self._wake_ups.put(None)

    def may_sleep(self) -> None:
        """Let each `wake` from now on end the next `sleep`. Call it before `sleep`, and look for answers in between."""
        self._wake_ups = self._wake_ups or queue.SimpleQueue()

    def sleep(self, timeout_s: float) -> None:
        """Wait for `wake`, at most `timeout_s` seconds. The caller must check for itself why it was woken, since `wake`
        may come without an answer.
        """
        assert self._wake_ups is not None
        with contextlib.suppress(queue.Empty):
            self._wake_ups.get(timeout=max(timeout_s, 0.0))
