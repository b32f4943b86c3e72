"""A gRPC server on a Unix socket that no other user can reach before its mode is set."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import grpc

from kvstored.rpc.grpc_log_filter import expect_departures
from kvstored.sockets import SocketError


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
