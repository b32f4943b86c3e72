"""The closed list of error kinds, and their mapping to gRPC status.

A kind is for a request that failed as a whole. A miss, a throttle and a corrupt block are results inside a reply.
"""

from __future__ import annotations

from enum import IntEnum


class ErrorKind(IntEnum):
    """The kind of an error that the daemon reports for a whole request, with the numbers of kvstore.v1.ErrorKind."""

    UNSPECIFIED = 0
    INVALID = 1
    TOO_LARGE = 2
    UNAUTHENTICATED = 3
    FORBIDDEN = 4
    THROTTLED = 5
    UNAVAILABLE = 6
    DEADLINE = 7
    NOT_FOUND = 8
    INTERNAL = 9

    @property
    def is_permanent(self) -> bool:
        """Return whether the same request would fail again, so that a client does not retry it."""
        return self in _PERMANENT

    @property
    def grpc_status(self) -> str:
        """The name of the gRPC status code of a call that ends with an error of this kind, such as "NOT_FOUND"."""
        return _GRPC_STATUS[self]


_PERMANENT = frozenset(
    {ErrorKind.INVALID, ErrorKind.TOO_LARGE, ErrorKind.UNAUTHENTICATED, ErrorKind.FORBIDDEN, ErrorKind.NOT_FOUND}
)
_GRPC_STATUS = {
    ErrorKind.UNSPECIFIED: "UNKNOWN",
    ErrorKind.INVALID: "INVALID_ARGUMENT",
    ErrorKind.TOO_LARGE: "RESOURCE_EXHAUSTED",
    ErrorKind.UNAUTHENTICATED: "UNAUTHENTICATED",
    ErrorKind.FORBIDDEN: "PERMISSION_DENIED",
    ErrorKind.THROTTLED: "RESOURCE_EXHAUSTED",
    ErrorKind.UNAVAILABLE: "UNAVAILABLE",
    ErrorKind.DEADLINE: "DEADLINE_EXCEEDED",
    ErrorKind.NOT_FOUND: "NOT_FOUND",
    ErrorKind.INTERNAL: "INTERNAL",
}


class KVStoreError(Exception):
    """The error of a request that failed as a whole. `kind` is the kind of error, for programs, and `message` says what
    was wrong. If `retry_after_ms` is not 0, the request may be tried again after that number of milliseconds.
    """

    def __init__(self, kind: ErrorKind, message: str, retry_after_ms: int = 0) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.retry_after_ms = retry_after_ms


class InvalidValue(KVStoreError, ValueError):
    """The error of a value that no request can carry; its kind is INVALID."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorKind.INVALID, message)
