"""The handshake connection: the client's identity, the staging memory, the arenas, the stream, and the anchor of the
client's leases.

The module owns one SOCK_SEQPACKET connection that stays open for the session's life; when it ends, the daemon takes
every lease back. Descriptors arrive only here. It does not map memory, or speak gRPC. Invariants: a descriptor that
arrives is either handed out once or closed; one request is on the wire at a time.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from kvstore_client.errors import ConnectError, error_kind
from kvstore_client.paths import explain_unreachable
from kvstore_proto.v1 import handshake_pb2 as wire

PROTOCOL_VERSION = 1
CROWDED_S = 0.01  # from one try to connect to the next
MAX_PACKET_BYTES = 128 * 1024
NO_WAIT_S = 0.001  # for a system call that is not expected to wait
_HANGUP = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL


@dataclass(frozen=True, slots=True)
class GrantedArena:
    """The daemon's grant of an arena: its number, its size in bytes, and a descriptor that the receiver must map or
    close.
    """

    arena_id: int
    size_bytes: int
    descriptor: int


@dataclass(frozen=True, slots=True)
class GrantedIndex:
    """The daemon's answer to a request for the lookup index: its size in bytes, and a descriptor to map or close.
    Without an index the descriptor is -1 and `reason` says why.
    """

    size_bytes: int
    descriptor: int
    reason: str = ""


class Handshake:
    """The client's connection on the daemon's handshake socket, which stands as long as the session and brings all file
    descriptors. `welcome` is the daemon's answer to the hello. `staging_fd` is the descriptor of the staging memory,
    or -1. A grant that arrives too late is kept for the next request of its kind.
    """

    def __init__(self, connection: socket.socket, welcome: wire.Welcome, staging_fd: int) -> None:
        self._socket = connection
        self._lock = threading.Lock()
        self._strays: dict[tuple[int, bool], GrantedArena] = {}  # grants that arrived after their caller had given up
        self._index: GrantedIndex | None = None  # likewise
        self._stream_fd = -1  # likewise
        self._asked: set[str] = set()  # requested, and not taken yet
        self._closed = False
        self._staging_fd = staging_fd
        self.welcome = welcome

    def take_staging(self) -> int:
        """Return the descriptor of the staging memory, which the caller now maps or closes. Return -1 if none was
        granted.
        """
        descriptor, self._staging_fd = self._staging_fd, -1
        return descriptor

    def request_arena(self, arena_id: int, timeout_s: float, *, writable: bool = False) -> GrantedArena | None:
        """Ask the daemon for the arena with the number `arena_id`, to read or with `writable` to write, and return the
        grant. Return None if the daemon refuses, is gone, or does not answer within `timeout_s` seconds.
        """
        deadline, wanted = time.monotonic() + timeout_s, (arena_id, writable)
        with contextlib.suppress(OSError, ConnectError), self._turn(timeout_s):
            if wanted not in self._strays:
                request = wire.ArenaRequest(arena_id=arena_id, writable=writable)
                self._send(wire.ClientPacket(arena=request), deadline)
            while wanted not in self._strays:
                if not self._take_grant(deadline):
                    return None
            return self._strays.pop(wanted)
        return None

    def request_index(self, timeout_s: float) -> GrantedIndex | None:
        """Ask the daemon for the lookup index, and return its answer. Return None if there is no answer within
        `timeout_s` seconds; then call again, which waits for the answer to the same request. A timeout of 0 only looks
        whether an answer has arrived.
        """
        deadline = time.monotonic() + max(timeout_s, NO_WAIT_S)
        with contextlib.suppress(OSError, ConnectError), self._turn(timeout_s):
            if self._index is None:
                self._ask_once("lookup_index", wire.ClientPacket(lookup_index=wire.LookupIndexRequest()), deadline)
            while self._index is None:
                if timeout_s <= 0 and not self._has_packet():
                    return None
                if not self._take_grant(deadline):
                    return None
            grant, self._index = self._index, None
            self._asked.discard("lookup_index")
            return grant
        return None

    def request_stream(self, timeout_s: float) -> socket.socket | None:
        """Ask the daemon for a direct stream, and return its socket. Return None if the daemon refuses, is gone, or
        does not answer within `timeout_s` seconds.

        Then ask again: a stream granted meanwhile is kept, and is the only one that the daemon has not ended.
        """
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(OSError, ConnectError), self._turn(timeout_s):
            if self._stream_fd < 0:
                self._ask_once("direct_stream", wire.ClientPacket(direct_stream=wire.DirectStreamRequest()), deadline)
            while self._stream_fd < 0:
                if not self._take_grant(deadline):
                    self._asked.discard("direct_stream")
                    return None
            descriptor, self._stream_fd = self._stream_fd, -1
            self._asked.discard("direct_stream")
            try:
                return socket.socket(fileno=descriptor)
            except OSError:  # it is none
                os.close(descriptor)
        return None

    @contextlib.contextmanager
    def _turn(self, timeout_s: float) -> Iterator[None]:
        """Hold this thread's turn to send a request. Raises TimeoutError if it does not come in time."""
        if not self._lock.acquire(timeout=max(timeout_s, 0.0)):
            raise TimeoutError
        try:
            yield
        finally:
            self._lock.release()

    def _ask_once(self, kind: str, packet: wire.ClientPacket, deadline: float) -> None:
        if kind not in self._asked:
            self._send(packet, deadline)
            self._asked.add(kind)  # not before: the deadline may have passed before anything was sent

    def is_alive(self) -> bool:
        """Return whether the daemon still holds its end of the connection. It takes one system call that does not
        wait.
        """
        if self._closed:
            return False
        poll = select.poll()  # one object a call: it is not to be shared by threads
        try:
            poll.register(self._socket, _HANGUP)
            return not poll.poll(0)
        except (OSError, ValueError):  # another thread closed it under us
            return False

    def close(self) -> None:
        """End the connection. The daemon then ends the session, with its leases and its staging memory."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for an arena
        with self._lock:
            self._socket.close()
            for grant in self._strays.values():
                _close_descriptor(grant.descriptor)
            self._strays.clear()
            if self._index is not None:
                _close_descriptor(self._index.descriptor)
                self._index = None
            _close_descriptor(self._stream_fd)
            self._stream_fd = -1
        _close_descriptor(self.take_staging())

    def _take_grant(self, deadline: float) -> bool:
        """Receive one answer and keep it until it is taken; return False for a refusal. Raises the errors of
        `_receive`.
        """
        packet, descriptor = _receive(self._socket, deadline)
        kind = packet.WhichOneof("packet")
        if kind == "arena" and descriptor >= 0:
            arena = packet.arena
            granted = (arena.arena_id, arena.writable)
            known = self._strays.pop(granted, None)
            if known is not None:
                _close_descriptor(known.descriptor)
            self._strays[granted] = GrantedArena(arena.arena_id, arena.size_bytes, descriptor)
            return True
        if kind == "lookup_index" and self._index is None:
            index = packet.lookup_index
            self._index = GrantedIndex(index.size_bytes, descriptor, index.reason)
            return True
        if kind == "direct_stream" and descriptor >= 0:
            _close_descriptor(self._stream_fd)  # the daemon has ended the one before
            self._stream_fd = descriptor
            return True
        _close_descriptor(descriptor)
        return False

    def _has_packet(self) -> bool:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def _send(self, packet: wire.ClientPacket, deadline: float) -> None:
        self._socket.settimeout(_remaining(deadline))
        self._socket.send(packet.SerializeToString())


def _connect(connection: socket.socket, path: Path, deadline: float) -> None:
    """Connect. If many others wait to be accepted the kernel refuses at once, and this function tries again."""
    while True:
        try:
            return connection.connect(os.fspath(path))
        except BlockingIOError:
            if time.monotonic() + CROWDED_S >= deadline:
                raise
            time.sleep(CROWDED_S)


def open_handshake(path: Path, hello: wire.Hello, timeout_s: float) -> Handshake:
    """Connect to the handshake socket at `path`, send `hello`, and return the connection with the daemon's welcome.
    Raises ConnectError with a message for people if it is refused or takes more than `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    try:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    except OSError as error:
        raise ConnectError(f"no socket can be made: {error.strerror}") from None
    try:
        connection.settimeout(_remaining(deadline))
        _connect(connection, path, deadline)
        connection.send(wire.ClientPacket(hello=hello).SerializeToString())
        packet, descriptor = _receive(connection, deadline)
    except OSError as error:
        connection.close()
        raise ConnectError(explain_unreachable(path, error), is_denied=isinstance(error, PermissionError)) from None
    except ConnectError:
        connection.close()
        raise
    kind = packet.WhichOneof("packet")
    if kind == "welcome":
        return Handshake(connection, packet.welcome, descriptor)
    _close_descriptor(descriptor)
    connection.close()
    if kind == "refused":
        refusal = packet.refused
        raise ConnectError(
            f"the daemon refused this client: {refusal.message}",
            error_kind(refusal.kind),
            retry_after_s=refusal.retry_after_ms / 1000,
        )
    raise ConnectError("the daemon answered the handshake with something unknown: is it newer than this client?")


def _receive(connection: socket.socket, deadline: float) -> tuple[wire.DaemonPacket, int]:
    """Return one packet and its descriptor (-1 for none). Raises OSError, and ConnectError at the end."""
    connection.settimeout(_remaining(deadline))
    data, descriptors, flags, _ = socket.recv_fds(connection, MAX_PACKET_BYTES, 4)
    for received in descriptors:  # recv_fds drops a MSG_CMSG_CLOEXEC that it is given
        os.set_inheritable(received, False)
    for spare in descriptors[1:]:
        _close_descriptor(spare)
    descriptor = descriptors[0] if descriptors else -1
    try:
        if not data:
            raise ConnectError("the daemon closed the connection")
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ConnectError("the daemon sent a packet that is too large, or we are out of file descriptors")
        return wire.DaemonPacket.FromString(data), descriptor
    except (ConnectError, DecodeError) as error:
        _close_descriptor(descriptor)
        if isinstance(error, ConnectError):
            raise
        raise ConnectError("the daemon sent something that is no handshake packet") from None


def _remaining(deadline: float) -> float:
    """Return the seconds left. Raises TimeoutError if there are none (a timeout of 0 would mean non-blocking)."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _close_descriptor(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)
