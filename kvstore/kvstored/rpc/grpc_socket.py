"""A gRPC server on a Unix socket that no other user can reach before its mode is set."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import grpc

from kvstored.sockets import SocketError

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


def bind_grpc(path: Path, *, max_message_bytes: int) -> grpc.aio.Server:
    """A server bound to `path`, not started. Replies may be twice as long as requests. Raises SocketError."""
    expect_departures()
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", 2 * max_message_bytes),
        ]
    )
    with private_umask():
        try:
            server.add_insecure_port(f"unix:{path}")
        except RuntimeError as error:
            raise SocketError(f"cannot listen on {path}: {error}") from None
    return server


@contextlib.contextmanager
def private_umask() -> Iterator[None]:
    """Sockets made meanwhile are the owner's alone: no other user connects between bind and chmod."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)
