"""A gRPC server on a Unix socket that no other user can reach before its mode is set."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import grpc
from google.protobuf.message import DecodeError

from kvstored.process import connections_within
from kvstored.sockets import SocketError

_GRPC_LOGGER = "grpc._cython.cygrpc"
log = logging.getLogger(__name__)
HANDSHAKE_MS = 5_000
IDLE_MS = 300_000
BEAT_MS, ANSWER_MS = 60_000, 20_000


class _Departures(logging.Filter):
    """A log filter that passes every record except failed sends and messages that cannot be read, which become one line
    at debug level each."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, DecodeError):  # a caller's mistake, who gets an error; it may make it again and again
            log.debug("a message cannot be read: %s", error)
            return False
        if not isinstance(error, grpc.aio.InternalError):  # what gRPC's core refuses; errors of ours are others
            return True
        log.debug("a client left before an answer reached it: %s", error)
        return False


_DEPARTURES = _Departures()


def expect_departures() -> None:
    """Let gRPC's log messages about clients that have left or send nonsense appear at debug level only, from now on. A
    second call does nothing.
    """
    logging.getLogger(_GRPC_LOGGER).addFilter(_DEPARTURES)


def connection_options(connections: int) -> list[tuple[str, int]]:
    """Return the gRPC options of a server that accepts at most `connections` at once. A silent connection is closed
    after `HANDSHAKE_MS`, one without a call after `IDLE_MS`, one whose peer does not answer a ping after `BEAT_MS +
    ANSWER_MS`.
    """
    return [
        ("grpc.max_allowed_incoming_connections", connections_within(connections)),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS), ("grpc.max_connection_idle_ms", IDLE_MS),
        ("grpc.keepalive_time_ms", BEAT_MS), ("grpc.keepalive_timeout_ms", ANSWER_MS),
    ]  # fmt: skip


def bind_grpc(path: Path, *, max_message_bytes: int, connections: int) -> grpc.aio.Server:
    """Return a gRPC server on the Unix socket `path`, bound but not started. Replies may be twice as long as requests
    (`max_message_bytes`). Raises SocketError.
    """
    expect_departures()
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", 2 * max_message_bytes),
            *connection_options(connections),
        ]
    )
    add_unix_port(server, path)
    return server


def add_unix_port(server: grpc.aio.Server, path: Path) -> None:
    """Bind `server` to the Unix socket `path`. It binds under another name and renames, since a stopping server removes
    the name it was given, which may be another's by then. Raises SocketError.
    """
    made = path.with_name(f"{path.name}.new")  # no longer than the name of the longest socket
    try:
        with private_umask():
            server.add_insecure_port(f"unix:{made}")
        made.rename(path)
    except (RuntimeError, OSError) as error:
        raise SocketError(f"cannot listen on {path}: {error}") from None


@contextlib.contextmanager
def private_umask() -> Iterator[None]:
    """Make files and sockets created inside the block accessible to their owner alone."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)
