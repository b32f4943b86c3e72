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
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from google.protobuf.message import DecodeError, Message

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.v1 import handshake_pb2 as hs
from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstored.clients.reception import Reception
from kvstored.clients.sessions import FULL_RETRY_MS, ClientSession
from kvstored.clients.tenants import Peer, read_peer
from kvstored.config.schema import LimitsSection
from kvstored.process import ticks_now
from kvstored.sockets import refuse_descriptors

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
    """A server on the Unix socket `path`, and on tenants' own ones, to which each client keeps one connection for its
    whole life. `close` ends all connections and their sessions. At most `limits.handshakes_per_user` connections of one
    user, or to one tenant's own socket, may wait without having sent a hello message; a further one ends the oldest of
    them."""

    def __init__(self, path: Path, reception: Reception, limits: LimitsSection) -> None:
        self.path = path
        self._reception = reception
        self.shut_out = reception.shut_out
        self._limits = limits
        self._listeners: dict[str, _Listener] = {}  # by the tenant whose own it is; "": everybody's
        self._connections: dict[_Connection, None] = {}  # oldest first
        self._rejected: dict[_Connection, None] = {}  # each gets its refusal after its hello
        self.accepting = True

    def start(self, listener: socket.socket, socket_of: str = "") -> None:
        """Accept clients on the socket `listener` from now on, and no longer on an earlier listener for the same
        callers: clients of the tenant `socket_of`, or all if it is "". Connected clients stay."""
        self.stop(socket_of)
        listener.setblocking(False)
        refuse_descriptors(listener)
        self._listeners[socket_of] = _Listener(listener, socket_of)
        asyncio.get_running_loop().add_reader(listener.fileno(), self._accept, self._listeners[socket_of])

    def stop(self, socket_of: str) -> None:
        """Accept no more clients on the own socket of the tenant `socket_of`. Connected clients stay."""
        listener = self._listeners.pop(socket_of, None)
        if listener is not None:
            asyncio.get_running_loop().remove_reader(listener.socket.fileno())
            listener.socket.close()

    def close(self) -> None:
        for socket_of in [*self._listeners]:
            self.stop(socket_of)
        for connection in [*self._connections, *self._rejected]:
            connection.end()

    def hang_up(self, is_meant: Callable[[ClientSession], bool]) -> int:
        """End the sessions for which `is_meant` returns True, and return their number. Their clients notice, and may
        reconnect.
        """
        meant = [connection for connection in self._connections if connection.is_of(is_meant)]
        for connection in meant:
            connection.end()
        return len(meant)

    def _accept(self, listener: _Listener) -> None:
        for _ in range(ACCEPTED_A_TURN):
            before_ticks = ticks_now()
            try:
                accepted, _ = listener.socket.accept()
                _, uid, _ = _UCRED.unpack(accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
            except BlockingIOError:
                listener.empty_queue_ticks = before_ticks
                return
            except OSError as error:  # out of descriptors: look again later instead of spinning on a readable socket
                log.warning("cannot accept a client: %s", error)
                self._pause(listener)
                return
            accepted.setblocking(False)
            caller = listener.socket_of or uid
            self._end_oldest_waiting(caller)
            refusal = self._refusal(caller)
            group = self._connections if refusal is None else self._rejected
            if refusal is not None and len(group) >= MAX_REJECTED:
                accepted.close()
                continue
            arrival = _Arrival(accepted, caller, listener.socket_of, listener.empty_queue_ticks)
            connection = _Connection(arrival, self._reception, group.pop, refusal)
            group[connection] = None
            connection.start()

    def _end_oldest_waiting(self, caller: int | str) -> None:
        waiting = [each for each in self._connections if each.caller == caller and not each.has_session]
        if len(waiting) >= self._limits.handshakes_per_user:
            waiting[0].end()

    def _refusal(self, caller: int | str) -> KVStoreError | None:
        """Return why a new client cannot be taken now; None if it can."""
        if not self.accepting:
            return KVStoreError(
                ErrorKind.UNAVAILABLE,
                "the daemon is draining and takes no new clients (kvctl drain --undo ends that)",
                FULL_RETRY_MS,
            )
        most = self._limits.max_clients
        if len(self._connections) >= most:
            return KVStoreError(ErrorKind.THROTTLED, f"{most} clients are connected already", FULL_RETRY_MS)
        own = sum(each.caller == caller for each in self._connections)
        if own >= most - max(0, most - ANYBODYS_PLACES) // OTHERS_SHARE:
            return KVStoreError(
                ErrorKind.THROTTLED,
                f"{own} clients of this user are connected already; the other places are others'",
                FULL_RETRY_MS,
            )
        return None

    def _pause(self, listener: _Listener) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener.socket.fileno())

        def resume() -> None:
            if self._listeners.get(listener.socket_of) is listener:
                loop.add_reader(listener.socket.fileno(), self._accept, listener)

        loop.call_later(ACCEPT_PAUSE_S, resume)


@dataclass
class _Listener:
    """A listening socket. `empty_queue_ticks` is a moment at which no client waited there to be accepted, in clock
    ticks since boot: a client that is accepted later has connected later."""

    socket: socket.socket
    socket_of: str  # the tenant whose own it is, or ""
    empty_queue_ticks: int = 0


class _Arrival(NamedTuple):
    """A connection that has been accepted. `caller` is who is counted for it: a uid, or the tenant of an own socket."""

    socket: socket.socket
    caller: int | str
    socket_of: str
    empty_queue_ticks: int


class _Connection:
    """One client: first a hello, then requests for memory to map or a stream, then the end.

    `refusal` is the answer to the hello of a client that is not taken. It waits for the hello, because closing a socket
    with an unread packet in it would take the refusal away from the client.
    """

    def __init__(
        self,
        arrival: _Arrival,
        reception: Reception,
        on_end: Callable[[_Connection], object],
        refusal: KVStoreError | None,
    ) -> None:
        self.caller = arrival.caller
        self._arrival = arrival
        self._socket = arrival.socket
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

    def refuse(self, error: KVStoreError) -> None:
        self._send(_refusal(error), None)
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
            self.refuse(KVStoreError(ErrorKind.INVALID, "not a handshake packet"))
        except KVStoreError as error:
            if self._session is None:
                self.refuse(error)
            else:  # a wrong question does not cost a client its session
                self._send(_refusal(error), None)
        except Exception:
            log.exception("a handshake failed")
            message = "the handshake failed inside the daemon; its log has the details"
            self.refuse(KVStoreError(ErrorKind.INTERNAL, message))

    def _answer(self, packet: hs.ClientPacket) -> None:
        kind = packet.WhichOneof("packet")
        reply = hs.DaemonPacket()
        if self._refusal is not None:
            raise self._refusal
        if kind == "hello":
            if self._session is not None:
                raise KVStoreError(ErrorKind.INVALID, "a connection says hello once")
            session, welcome, descriptor = self._reception.welcome(self._peer(), packet.hello)
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

    def _peer(self) -> Peer:
        arrival = self._arrival
        return read_peer(self._socket, empty_queue_ticks=arrival.empty_queue_ticks, socket_of=arrival.socket_of)

    def _send(self, packet: Message, descriptor: int | None) -> None:
        descriptors = [] if descriptor is None else [descriptor]
        try:
            socket.send_fds(self._socket, [packet.SerializeToString()], descriptors)
        except OSError as error:  # gone, or does not read its packets: both mean the end
            level = logging.DEBUG if isinstance(error, ConnectionError) else logging.INFO  # gone is no news
            log.log(level, "client cut off: %s", error)
            self.end()


def _refusal(error: KVStoreError) -> hs.DaemonPacket:
    packet = hs.DaemonPacket()
    packet.refused.kind = pb.ErrorKind.ValueType(error.kind)
    packet.refused.message = error.message
    packet.refused.retry_after_ms = error.retry_after_ms
    return packet
