"""The exceptions of the client, and one failure that stays inside the package.

A miss, a throttle, a slow or absent daemon are results. Only a user's mistake (`KVStoreError`) and the absence of a
required daemon (`DaemonUnavailable`) are raised.
"""

from __future__ import annotations

from kvstore_proto.errors import ErrorKind, KVStoreError


class DaemonUnavailable(KVStoreError):
    """No daemon answers at the socket directory, and `connect(required=True)` was asked for."""

    def __init__(self, message: str, *, is_denied: bool = False, is_refused: bool = False) -> None:
        super().__init__(ErrorKind.UNAVAILABLE, message)
        self.is_refused = is_refused  # a daemon answered, and accepts no client now
        self.is_denied = is_denied  # the file system denies access to the socket


class ConnectError(Exception):
    """An attempt to connect failed; never leaves the package.

    `refused_as` is the daemon's reason when it refused the client, None when there was no answer.
    """

    def __init__(self, message: str, refused_as: ErrorKind | None = None, *, is_denied: bool = False) -> None:
        super().__init__(message)
        self.refused_as = refused_as
        self.is_denied = is_denied

    @property
    def is_permanent(self) -> bool:
        """True if another try without a change would fail again."""
        return self.refused_as is not None and self.refused_as.is_permanent


def invalid(message: str) -> KVStoreError:
    """Return the exception for a caller's mistake."""
    return KVStoreError(ErrorKind.INVALID, message)


def error_kind(code: int) -> ErrorKind:
    """Return the kind that the daemon sent; UNSPECIFIED for one that this client does not know."""
    try:
        return ErrorKind(code)
    except ValueError:
        return ErrorKind.UNSPECIFIED
