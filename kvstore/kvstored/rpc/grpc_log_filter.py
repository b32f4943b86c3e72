"""A client that is gone before its call's status reaches it is no error of the daemon's.

gRPC logs every send to a client that has left as an error with a traceback (grpc/grpc#32551), from a logger of its own.
Clients leave at any time; what an operator must read of that is the line of the client that left.
"""

from __future__ import annotations

import logging

import grpc

_GRPC_LOGGER = "grpc._cython.cygrpc"
log = logging.getLogger(__name__)


class _Departures(logging.Filter):
    """Lets every record pass but those of failed sends, which become one line at debug level."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, grpc.aio.InternalError):  # what gRPC's core refuses; errors of ours are others
            return True
        log.debug("a client left before an answer reached it: %s", error)
        return False


_DEPARTURES = _Departures()


def expect_departures() -> None:
    """From now on, in this process. To call it again does nothing."""
    logging.getLogger(_GRPC_LOGGER).addFilter(_DEPARTURES)
