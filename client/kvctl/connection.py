"""The two ways from a command to the daemon: the admin socket, for an operator, and a session as engines have one,
under the tenant of the calling user. Each failure becomes a CommandError with its own message.

gRPC reports a missing file, a refused connection and a missing permission alike, so the admin socket is first tried
with a plain connect.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.message import Message

from kvctl.output import DENIED, FAILED, MISS, UNREACHABLE, CommandError
from kvstore_client.entry import connect
from kvstore_client.errors import DaemonUnavailable
from kvstore_client.paths import ADMIN_SOCKET, explain_unreachable
from kvstore_client.results import REASON_DEADLINE, REASON_NO_DAEMON
from kvstore_client.session import Session
from kvstore_client.transport.over_grpc import CHANNEL_OPTIONS
from kvstore_proto.errors import KVStoreError
from kvstore_proto.fingerprint import Fingerprint
from kvstore_proto.objects import OBJECTS
from kvstore_proto.v1 import admin_pb2_grpc
from kvstore_proto.v1.explain_pb2 import ExplainReply, ExplainRequest

NEVER_STORED = "never_stored"
_SENTENCES: Final[Mapping[str, str]] = {
    "never_stored": "never stored (or so long ago that the daemon has forgotten; a restart forgets too)",
    "evicted": "evicted for want of room",
    "expired": "expired: idle for longer than its tier's ttl_s, or worth less than host.keep_worth",
    "quota": "evicted because its tenant was at its own maximum",
    "other_fingerprint": "nothing is stored under this fingerprint, but under another one of the same model",
    "corrupt": "its bytes on NVMe failed verification; they are quarantined and the block is to be computed again",
    "invalidated": "an operator invalidated its fingerprint",
    "dropped": "deleted by its owner or dropped by an operator",
    "forgotten": "the tier below NVMe that had it, which may forget, has it no more",
    "read_failed": "the tier below DRAM would not give it: it could not be read, or the tier is shed (`kvctl status`)",
    "no_room": "its put, or its way to DRAM, was refused: DRAM was full, and nothing in it might be evicted (give the "
    "host tier more capacity, or hold fewer leases)",
    "over_quota": "its put, or its way to DRAM, was refused: its tenant was at its maximum, and none of its blocks "
    "might be evicted (raise the tenant's host_max, or hold fewer leases)",
    "lossy_only": "every copy of it is lossy, and the engine asked for exact ones: `connect(exact=False)` accepts them",
    "declined": "its put was declined: the policy thought it worth less than what would have had to go (nothing to do)",
    "late": "stored, but not brought to DRAM before the deadline",
    "verify_failed": "its slot has a form that this client does not read: run the daemon and kvctl of one release",
    "arena_not_mapped": "the daemon did not hand over its memory in time: try again",
    "throttled": "this client holds as many leases as it may: release some",
}
_UNREAD: Final = frozenset({"late", "verify_failed", "arena_not_mapped", "throttled", "lossy_only", "read_failed"})
Ask = Callable[[ExplainRequest], ExplainReply]
Reply = TypeVar("Reply", bound=Message)

PROBE_TIMEOUT_S = 2.0
SPARE_S = 5.0  # beyond a timeout that the daemon itself was given

# For the daemon's log, which marks it as claimed: gRPC does not know its caller.
_CALLER = ("kvstored-caller", f"kvctl of uid {os.getuid()}, pid {os.getpid()}")


@contextmanager
def open_session(
    directory: Path, fingerprint: Fingerprint, timeout_s: float, *, staging_bytes: int = 0
) -> Iterator[Session]:
    """Connect to the daemon whose sockets are in `directory`, and yield the session. It waits at most `timeout_s`
    seconds. Raises CommandError, also if the daemon refuses a request made in the `with` block.
    """
    try:
        with connect(
            directory,
            fingerprint=fingerprint,
            client_name="kvctl",
            deadline_s=timeout_s,
            connect_timeout_s=timeout_s,
            required=True,
            staging_bytes=staging_bytes,
        ) as session:
            yield session
    except DaemonUnavailable as error:
        code = DENIED if error.is_denied else FAILED if error.is_refused else UNREACHABLE
        raise CommandError(code, error.message) from None
    except KVStoreError as error:
        raise CommandError(FAILED, error.message) from None


def in_words(reason: str) -> str:
    """Return a sentence that explains `reason`, the word by which a client says why blocks were not served. Return
    `reason` itself if there is no sentence for it.
    """
    return _SENTENCES.get(reason, reason)


def not_read(name: str, reason: str) -> str:
    """Return whether the object `name` cannot be read or is not stored, by the `reason` why a client got nothing."""
    return f"{name} cannot be read" if reason in _UNREAD else f"{name} is not stored"


def not_there(what: str, reason: str, timeout_s: float, **facts: object) -> CommandError:
    """Return the error of a command that could not get the blocks described by `what`. `reason` is the client's word
    for the cause, `timeout_s` the seconds that the command waited, and `facts` are further facts for --json.
    """
    if reason == REASON_NO_DAEMON:
        return CommandError(UNREACHABLE, f"{what}: the daemon went away")
    if reason == REASON_DEADLINE:
        return CommandError(
            UNREACHABLE, f"{what}: the daemon did not answer within {timeout_s:g} s; give more time with --timeout"
        )
    reason = reason or NEVER_STORED
    return CommandError(MISS, f"{what}: {in_words(reason)}", reason=reason, **facts)


class AdminSocket:
    """A context manager for calls to the daemon over its admin socket, which is in the daemon's socket directory."""

    def __init__(self, directory: Path, timeout_s: float) -> None:
        self.directory = directory
        self.timeout_s = timeout_s
        path = directory / ADMIN_SOCKET
        _probe(path)
        self._channel = grpc.insecure_channel(f"unix:{path}", options=CHANNEL_OPTIONS)
        self._stub: Any = admin_pb2_grpc.AdminStub(self._channel)

    def call(self, method: str, request: Message, reply_type: type[Reply], *, longer_s: float = 0.0) -> Reply:
        """Call `method` of the daemon's admin service with `request`, and return its reply. `longer_s` is the
        additional time, in seconds, that the daemon may take for the work itself.
        """
        rpc: Callable[..., object] = getattr(self._stub, method)
        try:
            timeout_s = self.timeout_s + (longer_s + SPARE_S if longer_s else 0.0)
            reply = rpc(request, timeout=timeout_s, metadata=(_CALLER,))
        except grpc.RpcError as error:
            raise self._explain(error) from None
        assert isinstance(reply, reply_type)
        return reply

    def __enter__(self) -> AdminSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def _explain(self, error: grpc.RpcError) -> CommandError:
        code, details = error.code(), error.details() or ""
        if code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED):
            return CommandError(DENIED, f"permission denied: {details}")
        if code is grpc.StatusCode.UNAVAILABLE:
            return CommandError(UNREACHABLE, f"the daemon at {self.directory} went away: {details}")
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return CommandError(
                UNREACHABLE,
                f"the daemon at {self.directory} did not answer within {self.timeout_s:g} s; "
                "it may be stopped or overloaded: look at its log, or give more time with --timeout",
            )
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return CommandError(
                FAILED, "this daemon is older than kvctl, and does not know the command: restart it with this release"
            )
        return CommandError(FAILED, details or code.name.lower())


def _probe(path: Path) -> None:
    """Raise CommandError if no daemon listens at the socket or this user may not connect."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        trial.settimeout(PROBE_TIMEOUT_S)
        try:
            trial.connect(str(path))
        except OSError as error:
            exit_code = DENIED if isinstance(error, PermissionError) else UNREACHABLE
            raise CommandError(exit_code, explain_unreachable(path, error)) from None


@contextmanager
def explain_source(directory: Path, timeout_s: float) -> Iterator[Ask]:
    """Yield a function that asks the daemon for explanations of blocks, over the admin socket or, if this user may not
    use it, over a session. Raises CommandError if neither works.
    """
    try:
        admin = AdminSocket(directory, timeout_s)
    except CommandError as error:
        if error.exit_code != DENIED:
            raise
    else:
        with admin:
            yield lambda request: admin.call("Explain", request, ExplainReply)
        return
    with open_session(directory, OBJECTS, timeout_s) as session:

        def ask(request: ExplainRequest) -> ExplainReply:
            reply = session.explain(request, deadline_s=timeout_s)
            if reply is None:
                raise CommandError(UNREACHABLE, "explain: the daemon did not answer; give more time with --timeout")
            return reply

        yield ask
