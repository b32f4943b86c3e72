"""The exceptions of the client, and one failure that stays inside the package.

A miss, a throttle, a slow or absent daemon are results. Only a user's mistake (`KVStoreError`) and the absence of a
required daemon (`DaemonUnavailable`) are raised.
"""

from __future__ import annotations

from kvstore_client.results import REASON_DEADLINE, REASON_NO_DAEMON
from kvstore_proto.errors import ErrorKind, KVStoreError


class DaemonUnavailable(KVStoreError):
    """The error of `connect(required=True)` when no daemon accepts this client. `is_refused` is True if a daemon
    answered but accepts no client now; `is_denied` is True if the file system denies access to the socket.
    """

    def __init__(self, message: str, *, is_denied: bool = False, is_refused: bool = False) -> None:
        super().__init__(ErrorKind.UNAVAILABLE, message)
        self.is_refused = is_refused  # a daemon answered, and accepts no client now
        self.is_denied = is_denied  # the file system denies access to the socket


class ConnectError(Exception):
    """The error of one attempt to connect to the daemon. It never leaves the package.

    `refused_as` is the daemon's reason when it refused the client, or None when no daemon answered. `is_denied` is True
    if the file system denies access to the socket. `retry_after_s` is how long the daemon asks the client to wait.
    """

    def __init__(
        self,
        message: str,
        refused_as: ErrorKind | None = None,
        *,
        is_denied: bool = False,
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.refused_as = refused_as
        self.retry_after_s = retry_after_s
        self.is_denied = is_denied

    @property
    def is_permanent(self) -> bool:
        """True if another attempt to connect would fail again, unless the client or the daemon is changed."""
        return self.refused_as is not None and self.refused_as.is_permanent


def no_answer(reason: str) -> DaemonUnavailable:
    """Return the error of a request without an answer. `reason` is the client's word for the cause."""
    if reason == REASON_NO_DAEMON:
        return DaemonUnavailable("no daemon answers: it has ended, or ended the connection; start it, and try again")
    if reason == REASON_DEADLINE:
        return DaemonUnavailable("the daemon does not answer: it may be stopped or overloaded; give it more time")
    return DaemonUnavailable(f"the daemon cannot do it now ({reason}): its log says why", is_refused=True)


def invalid(message: str) -> KVStoreError:
    """Return a KVStoreError of kind INVALID, for a caller's mistake. `message` says what is wrong."""
    return KVStoreError(ErrorKind.INVALID, message)


def error_kind(code: int) -> ErrorKind:
    """Return the kind of error that the number `code` of the protocol stands for, or UNSPECIFIED for an unknown
    number.
    """
    try:
        return ErrorKind(code)
    except ValueError:
        return ErrorKind.UNSPECIFIED
