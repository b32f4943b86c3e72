"""What the numbers mean that Mooncake's library (0.3.13) answers with: what is no failure, which error another is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

NO_ROOM = -200
NOT_FOUND, NOT_READY, TAKEN, LEASE_EXPIRED, GONE = -704, -703, -705, -707, -712
ABSENT: Final = frozenset({NOT_FOUND, NOT_READY, LEASE_EXPIRED, GONE})
BUSY: Final = frozenset({-706, -708, -714})  # a lease, a copy or a read in progress holds the value
TOO_SHORT = -600  # and other wrong arguments
TRANSFER_FAILED = -800
RPC_TIMEOUT = -901


def need(where: str, answers: Sequence[int], allowed: frozenset[int] | set[int] = frozenset()) -> None:
    """Raise what an answer of the library means, unless it is one of `allowed`; `where` names the store.

    Raises TimeoutError, ConnectionError where the store cannot be reached, and OSError for all else.
    """
    for answer in answers:
        if answer >= 0 or answer in allowed:
            continue
        if answer == RPC_TIMEOUT:
            raise TimeoutError("no answer in time")
        if answer <= -900:
            raise ConnectionError(f"{where} is not reached: the library's code {answer}")
        raise OSError(f"{where} or a node of its store failed: the library's code {answer}")
