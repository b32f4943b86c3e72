"""One question to the daemon and what its answer means for the caller.

Owns the one place where a response becomes a result, a reason for a miss, or an exception for a user's
mistake.
Never does: build requests or read replies.
"""

from __future__ import annotations

from typing import Final

from kvstore_client.connection import Connection
from kvstore_client.lease_stream import Answers
from kvstore_client.link import Link
from kvstore_client.results import REASON_DEADLINE, REASON_NO_DAEMON
from kvstore_client.stream import Late, PendingCall
from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.v1 import kvstore_pb2 as wire

_MISTAKES: Final = frozenset({ErrorKind.INVALID, ErrorKind.TOO_LARGE, ErrorKind.FORBIDDEN, ErrorKind.NOT_FOUND})


class Asker:
    """Asks within a deadline and keeps the link's health."""

    def __init__(self, link: Link, deadline_s: float) -> None:
        self.link = link
        self.deadline_s = deadline_s

    def ask(
        self, connection: Connection, request: wire.Request, deadline_s: float, late: Late | None = None
    ) -> wire.Response | str:
        """The response, or the reason why there is none. `late` sees an answer that comes after the deadline.

        Raises KVStoreError when the daemon says that the request itself is wrong.
        """
        request.deadline_ms = max(1, int(deadline_s * 1000))
        call = connection.stream.submit(request)
        response = call.wait(deadline_s)
        if response is None:
            connection.stream.abandon(call, late)
            self.link.timed_out()
            return REASON_DEADLINE
        return self.judge(connection, response)

    def ask_many(self, connection: Connection, request: wire.Request, deadline_s: float) -> Answers:
        """Send a request that has several answers, each of which may hold a lease."""
        request.deadline_ms = max(1, int(deadline_s * 1000))
        return _Answers(self, connection, connection.stream.submit(request))

    def judge(self, connection: Connection, response: wire.Response) -> wire.Response | str:
        """The response itself, or the reason it carries; raises as `ask`."""
        if not response.HasField("error"):
            return response
        error = response.error
        try:
            kind = ErrorKind(error.kind)
        except ValueError:
            kind = ErrorKind.UNSPECIFIED
        if kind in _MISTAKES:
            raise KVStoreError(kind, error.message, error.retry_after_ms)
        if kind is ErrorKind.UNAUTHENTICATED:
            self.link.lost(connection, f"the daemon ended this session: {error.message}")
            return REASON_NO_DAEMON
        if connection.stream.ended:
            return REASON_NO_DAEMON
        return kind.name.lower()


class _Answers:
    """Those of one call."""

    def __init__(self, asker: Asker, connection: Connection, call: PendingCall) -> None:
        self._asker = asker
        self._connection = connection
        self._call = call

    def next(self, timeout_s: float) -> wire.Response | str | None:
        response = self._call.wait(timeout_s)
        if response is None:
            self._asker.link.timed_out()
            return None
        return self._asker.judge(self._connection, response)

    def abandon(self) -> None:
        def give_back(late: wire.Response) -> None:
            if late.acquire.lease_id:
                self._connection.release(late.acquire.lease_id)

        self._connection.stream.give_up(self._call, give_back)
