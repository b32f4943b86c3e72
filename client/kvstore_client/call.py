"""One request under way, and its answers.

The module owns the answers that were read and not yet taken, and the only code that makes of a response a result, a
reason for a miss, or an exception for a user's mistake. It does not build requests or read the stream.
"""

from __future__ import annotations

import contextlib
import queue
from collections import deque
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
    """The reports of streams and calls to a connection. Called from any thread."""

    def answered(self) -> None:
        """Report that the daemon answered something, however late."""
        ...

    def timed_out(self) -> None:
        """Report that a request got no answer within its deadline."""
        ...

    def stream_ended(self, reason: str) -> None:
        """Report that a stream ended, other than by `close`."""
        ...

    def session_ended(self, stream: CallStream, reason: str) -> None:
        """Report that the daemon no longer knows the session of this stream."""
        ...


class CallStream(Protocol):
    """The interface of a stream for the calls that it carries."""

    @property
    def health(self) -> StreamHealth: ...
    @property
    def ended(self) -> str:
        """The reason why it has ended; "" while it has not."""
        ...

    def wait(self, call: Call, timeout_s: float) -> wire.Response | None: ...
    def abandon(self, call: Call, late: Late | None) -> None: ...
    def cancel(self, call: Call, late: Late) -> None: ...


class Call:
    """A call, made by `Stream.submit`. A request with several answers is waited for several times."""

    __slots__ = ("_answers", "_stream", "_wake_ups", "late", "request_id")

    def __init__(self, request_id: int, stream: CallStream) -> None:
        self.request_id = request_id
        self.late: Late | None = None
        self._stream = stream
        self._answers: deque[wire.Response] = deque()
        self._wake_ups: queue.SimpleQueue[None] = queue.SimpleQueue()

    def wait(self, timeout_s: float) -> wire.Response | None:
        """Return the next answer; None if none arrived in time. The stream's end is an `error`, UNAVAILABLE."""
        answered = self.taken()
        return self._stream.wait(self, timeout_s) if answered is None else answered

    def result(self, timeout_s: float) -> wire.Response | str | None:
        """Wait as `wait` does, and judge the answer. If there is none, record the timeout and return None."""
        response = self.wait(timeout_s)
        if response is None:
            self._stream.health.timed_out()
            return None
        return self.judge(response)

    def judge(self, response: wire.Response) -> wire.Response | str:
        """Return the response itself, or the reason for a miss that it carries.

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
        """Stop waiting. `late`, if given, gets answers that still arrive, or have just arrived."""
        self._stream.abandon(self, late)

    def expire(self, late: Late | None = None) -> None:
        """Abandon a call that got no answer in time, and record that."""
        self._stream.abandon(self, late)
        self._stream.health.timed_out()

    def cancel(self, late: Late) -> None:
        """Abandon an acquire, and end it in the daemon."""
        self._stream.cancel(self, late)

    # For the stream

    def taken(self) -> wire.Response | None:
        """Return the next answer, if it has been read already."""
        return self._answers.popleft() if self._answers else None

    def is_answered(self) -> bool:
        return bool(self._answers)

    def answer(self, response: wire.Response) -> None:
        self._answers.append(response)
        self.wake()

    def wake(self) -> None:
        """Wake the thread that waits for this call."""
        self._wake_ups.put(None)

    def sleep(self, timeout_s: float) -> None:
        """Wait for `wake`, which may come for nothing."""
        with contextlib.suppress(queue.Empty):
            self._wake_ups.get(timeout=max(timeout_s, 0.0))
