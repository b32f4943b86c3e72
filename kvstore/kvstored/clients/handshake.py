"""The handshake socket: the kernel names the caller, descriptors are passed, and the end of a client is noticed.

Each client has one SOCK_SEQPACKET connection for its whole life. Its end (the last holder of the descriptor exits or
closes) ends the session and everything it held. gRPC cannot do this: it knows no peer and its streams break for other
reasons. The module runs on the control loop and never blocks: packets are small, and a client that does not read them
is cut off.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

from google.protobuf.message import DecodeError, Message

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.v1 import handshake_pb2 as hs
from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstored.clients.reception import Reception
from kvstored.clients.sessions import ClientSession
from kvstored.clients.tenants import read_peer
from kvstored.config.schema import LimitsSection

log = logging.getLogger(__name__)
MAX_PACKET_BYTES = 128 * 1024
ACCEPT_PAUSE_S = 0.5
HELLO_TIMEOUT_S = 10.0  # a connection that says nothing must not keep a place for ever
MAX_REJECTED = 64
ACCEPTED_A_TURN = 64
ANYBODYS_PLACES = 32
OTHERS_SHARE = 8  # of the places over those this fraction is never one user's alone
_UCRED = struct.Struct("3i")


class HandshakeServer:
    """A server on the Unix socket `path`, to which each client keeps one connection for its whole life. `close` ends
    all connections and their sessions. At most `limits.handshakes_per_user` connections of one user may wait without
    having sent a hello message; a further one ends the oldest of them."""

    def __init__(self, path: Path, reception: Reception, limits: LimitsSection) -> None:
        self.path = path
        self._reception = reception
        self._limits = limits
        self._listener: socket.socket | None = None
        self._connections: dict[_Connection, None] = {}  # oldest first
        self._rejected: dict[_Connection, None] = {}  # each gets its refusal after its hello
        self.accepting = True

    def start(self, listener: socket.socket) -> None:
        """Accept clients on the socket `listener` from now on, and no longer on an earlier listener. Connected clients
        stay."""
        self._stop_listening()
        listener.setblocking(False)
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener.fileno(), self._accept)

    def close(self) -> None:
        self._stop_listening()
        for connection in [*self._connections, *self._rejected]:
            connection.end()

    def _stop_listening(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None

    def hang_up(self, is_meant: Callable[[ClientSession], bool]) -> int:
        """End the sessions for which `is_meant` returns True, and return their number. Their clients notice, and may
        reconnect.
        """
        meant = [connection for connection in self._connections if connection.is_of(is_meant)]
        for connection in meant:
            connection.end()
        return len(meant)

    def _accept(self) -> None:
        assert self._listener is not None
        for _ in range(ACCEPTED_A_TURN):
            try:
                accepted, _ = self._listener.accept()
                _, uid, _ = _UCRED.unpack(accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
            except BlockingIOError:
                return
            except OSError as error:  # out of descriptors: look again later instead of spinning on a readable socket
                log.warning("cannot accept a client: %s", error)
                self._pause()
                return
            accepted.setblocking(False)
            self._end_oldest_waiting(uid)
            refusal = self._refusal(uid)
            group = self._connections if refusal is None else self._rejected
            if refusal is not None and len(group) >= MAX_REJECTED:
                accepted.close()
                continue
            connection = _Connection(accepted, uid, self._reception, group.pop, refusal)
            group[connection] = None
            connection.start()

    def _end_oldest_waiting(self, uid: int) -> None:
        waiting = [each for each in self._connections if each.uid == uid and not each.has_session]
        if len(waiting) >= self._limits.handshakes_per_user:
            waiting[0].end()

    def _refusal(self, uid: int) -> KVStoreError | None:
        """Return why a new client cannot be taken now; None if it can."""
        if not self.accepting:
            return KVStoreError(
                ErrorKind.UNAVAILABLE, "the daemon is draining and takes no new clients (kvctl drain --undo ends that)"
            )
        most = self._limits.max_clients
        if len(self._connections) >= most:
            return KVStoreError(ErrorKind.THROTTLED, f"{most} clients are connected already")
        own = sum(each.uid == uid for each in self._connections)
        if own >= most - max(0, most - ANYBODYS_PLACES) // OTHERS_SHARE:
            return KVStoreError(
                ErrorKind.THROTTLED, f"{own} clients of this user are connected already; the other places are others'"
            )
        return None

    def _pause(self) -> None:
        loop, listener = asyncio.get_running_loop(), self._listener
        assert listener is not None
        loop.remove_reader(listener.fileno())

        def resume() -> None:
            if self._listener is not None:
                loop.add_reader(listener.fileno(), self._accept)

        loop.call_later(ACCEPT_PAUSE_S, resume)


class _Connection:
    """One client: first a hello, then requests for memory to map or a stream, then the end.

    `refusal` is the answer to the hello of a client that is not taken. It waits for the hello, because closing a socket
    with an unread packet in it would take the refusal away from the client.
    """

    def __init__(
        self,
        sock: socket.socket,
        uid: int,
        reception: Reception,
        on_end: Callable[[_Connection], object],
        refusal: KVStoreError | None,
    ) -> None:
        self.uid = uid
        self._socket = sock
        self._reception = reception
        self._on_end = on_end
        self._refusal = refusal
        self._session: ClientSession | None = None
        self._hello_timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._socket.fileno(), self._readable)
        self._hello_timer = loop.call_later(HELLO_TIMEOUT_S, self.end)

    def end(self) -> None:
        if self._socket.fileno() < 0:
            return
        self._cancel_hello_timer()
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        self._on_end(self)
        if self._session is not None:
            self._reception.farewell(self._session)

    @property
    def has_session(self) -> bool:
        return self._session is not None

    def is_of(self, is_meant: Callable[[ClientSession], bool]) -> bool:
        return self._session is not None and is_meant(self._session)

    def _cancel_hello_timer(self) -> None:
        if self._hello_timer is not None:
            self._hello_timer.cancel()
            self._hello_timer = None

    def refuse(self, kind: ErrorKind, message: str) -> None:
        self._send(_refusal(kind, message), None)
        self.end()

    def _readable(self) -> None:
        try:
            data = self._socket.recv(MAX_PACKET_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.end()
            return
        try:
            self._answer(hs.ClientPacket.FromString(data))
        except DecodeError:
            self.refuse(ErrorKind.INVALID, "not a handshake packet")
        except KVStoreError as error:
            if self._session is None:
                self.refuse(error.kind, error.message)
            else:  # a wrong question does not cost a client its session
                self._send(_refusal(error.kind, error.message), None)
        except Exception:
            log.exception("a handshake failed")
            self.refuse(ErrorKind.INTERNAL, "the handshake failed inside the daemon; its log has the details")

    def _answer(self, packet: hs.ClientPacket) -> None:
        kind = packet.WhichOneof("packet")
        reply = hs.DaemonPacket()
        if self._refusal is not None:
            raise self._refusal
        if kind == "hello":
            if self._session is not None:
                raise KVStoreError(ErrorKind.INVALID, "a connection says hello once")
            session, welcome, descriptor = self._reception.welcome(read_peer(self._socket), packet.hello)
            self._session = session
            self._cancel_hello_timer()
            reply.welcome.CopyFrom(welcome)
            self._send(reply, descriptor)
            if session.staging is not None:
                session.staging.forget_fd()
        elif kind not in ("arena", "lookup_index", "direct_stream"):
            raise KVStoreError(ErrorKind.INVALID, "a packet of a kind this daemon does not know")
        elif self._session is None:
            raise KVStoreError(ErrorKind.UNAUTHENTICATED, "say hello first")
        else:
            descriptor = self._reception.grant(self._session, kind, packet, reply)
            self._send(reply, descriptor)
            if descriptor is not None:
                os.close(descriptor)

    def _send(self, packet: Message, descriptor: int | None) -> None:
        descriptors = [] if descriptor is None else [descriptor]
        try:
            socket.send_fds(self._socket, [packet.SerializeToString()], descriptors)
        except OSError as error:  # gone, or does not read its packets: both mean the end
            level = logging.DEBUG if isinstance(error, ConnectionError) else logging.INFO  # gone is no news
            log.log(level, "client cut off: %s", error)
            self.end()


def _refusal(kind: ErrorKind, message: str) -> hs.DaemonPacket:
    packet = hs.DaemonPacket()
    packet.refused.kind = pb.ErrorKind.ValueType(kind)
    packet.refused.message = message
    return packet
