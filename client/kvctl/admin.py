"""One call on the admin socket, which reports each way to fail as itself.

gRPC reports an absent file, a refused connection and a missing permission alike; so the socket is tried once
by hand first. Raises CommandError only.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from kvctl.exit_codes import DENIED, FAILED, UNREACHABLE, CommandError
from kvstore_client.paths import ADMIN_SOCKET, explain_unreachable
from kvstore_client.transport.over_grpc import CHANNEL_OPTIONS
from kvstore_proto.v1 import admin_pb2_grpc

Reply = TypeVar("Reply", bound=Message)

PROBE_TIMEOUT_S = 2.0
SPARE_S = 5.0  # beyond a timeout that the daemon itself was given

# For the daemon's log, which marks it as claimed: gRPC does not know its caller.
_CALLER = ("kvstored-caller", f"kvctl of uid {os.getuid()}, pid {os.getpid()}")


class AdminSocket:
    """Calls to the daemon at a socket directory. A context manager."""

    def __init__(self, directory: Path, timeout_s: float) -> None:
        self.directory = directory
        self.timeout_s = timeout_s
        path = directory / ADMIN_SOCKET
        _probe(path)
        self._channel = grpc.insecure_channel(f"unix:{path}", options=CHANNEL_OPTIONS)
        self._stub: Any = admin_pb2_grpc.AdminStub(self._channel)

    def call(self, method: str, request: Message, reply_type: type[Reply], *, longer_s: float = 0.0) -> Reply:
        """One unary call. `longer_s` is time that the daemon was given for the work itself."""
        rpc: Callable[..., object] = getattr(self._stub, method)
        try:
            timeout_s = self.timeout_s + (longer_s + SPARE_S if longer_s else 0.0)
            reply = rpc(request, timeout=timeout_s, metadata=(_CALLER,))
        except grpc.RpcError as error:
            raise self._explain(method, error) from None
        assert isinstance(reply, reply_type)
        return reply

    def __enter__(self) -> AdminSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def _explain(self, method: str, error: grpc.RpcError) -> CommandError:
        code, details = error.code(), error.details() or ""
        verb = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", method).lower()
        if code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED):
            return CommandError(DENIED, f"{verb}: permission denied: {details}")
        if code is grpc.StatusCode.UNAVAILABLE:
            return CommandError(UNREACHABLE, f"{verb}: the daemon at {self.directory} went away: {details}")
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return CommandError(
                UNREACHABLE,
                f"{verb}: the daemon at {self.directory} did not answer within {self.timeout_s:g} s; "
                "it may be stopped or overloaded: look at its log, or give more time with --timeout",
            )
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return CommandError(FAILED, f"{verb}: this daemon does not know the command; it is older than kvctl")
        return CommandError(FAILED, f"{verb}: {details or code.name.lower()}")


def _probe(path: Path) -> None:
    """Raises CommandError when no daemon listens at the socket or we may not connect."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        trial.settimeout(PROBE_TIMEOUT_S)
        try:
            trial.connect(str(path))
        except OSError as error:
            exit_code = DENIED if isinstance(error, PermissionError) else UNREACHABLE
            raise CommandError(exit_code, explain_unreachable(path, error)) from None
