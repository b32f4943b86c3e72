"""The session that one handshake gives, with its stream, mapped memory, keys and leases, which end with it.

The module opens and closes these parts in order, and reopens the stream while the handshake connection stands (the
daemon anchors leases there, so they survive a broken stream). It knows which session followed this one, and with which
of its leases: a restarted daemon may have kept them, bytes and all. It does not decide when to reconnect. Invariants:
once `is_alive()` has been False it remains False; a lease is valid while it is held and the session, or a later session
that has the lease again, is alive. A lease that only one side knows is released.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore_client.anchors import give_back_dropped
from kvstore_client.arenas import Arenas, WritableArenas, prefault_all
from kvstore_client.call import Call, Late, StreamHealth
from kvstore_client.errors import ConnectError
from kvstore_client.handshake import PROTOCOL_VERSION, Handshake, open_handshake
from kvstore_client.keys import KeyChains
from kvstore_client.lookup_index import IndexSource
from kvstore_client.memory import Bytes, map_read_write
from kvstore_client.paths import DATA_SOCKET, HANDSHAKE_SOCKET
from kvstore_client.results import REASON_DEADLINE
from kvstore_client.slot_requests import SlotRequests
from kvstore_client.staging import ClientStaging
from kvstore_client.stream import RequestStream
from kvstore_client.transport.base import Transport
from kvstore_client.transport.direct import DirectTransport
from kvstore_proto.fingerprint import Fingerprint
from kvstore_proto.v1 import handshake_pb2
from kvstore_proto.v1 import kvstore_pb2 as wire

if TYPE_CHECKING:
    from kvstore_client.device import DeviceMemory
    from kvstore_client.device.arenas import DeviceArenas

DEFAULT_DEADLINE_S = 0.25
_DEFAULT_MAX_KEYS = 1024
_WAIT_SHARE = 0.8  # of a deadline is the daemon's, for tiers to answer; the rest is for its answer to arrive
PREFAULT_THREAD = "kvstore-prefault"


def waiting_ms(deadline_s: float) -> int:
    """Return how many milliseconds the daemon may wait for its tiers, if its answer must arrive in `deadline_s`."""
    return max(1, int(deadline_s * _WAIT_SHARE * 1000))


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """The settings of a client that hold for every session: the `directory` of the daemon's sockets, and the client's
    description of itself for a handshake. `deadline_s` holds for a call without its own deadline. `device` is the CUDA
    device on which leased blocks may be read in place, in addition to host memory.
    """

    directory: Path
    fingerprint: Fingerprint
    client_name: str
    staging_bytes: int
    deadline_s: float = DEFAULT_DEADLINE_S  # of a call that is given none
    device: DeviceMemory | None = None  # where leases may be read, beside host memory
    exact: bool = True  # lossy copies are neither read nor made of what is put
    pool: str = ""  # a shared pool whose blocks are meant; "": the caller's own
    prefers_grpc: bool = False  # for the stream, even where the daemon has a direct one

    def hello(self, former_token: bytes = b"") -> handshake_pb2.Hello:
        return handshake_pb2.Hello(
            former_token=former_token,
            protocol_version=PROTOCOL_VERSION,
            client_name=self.client_name,
            fingerprint=self.fingerprint.canonical(),
            staging_bytes=self.staging_bytes,
            device_identity=self.device.identity if self.device is not None else 0,
            accepts_lossy=not self.exact,
            pool=self.pool,
        )


class DaemonSession:
    """One session of the daemon, from its handshake on: the stream of requests, the mapped memory, the keys and the
    leases. All of them end with the handshake's connection. `open_daemon_session` makes it.
    """

    def __init__(
        self,
        handshake: Handshake,
        options: ClientOptions,
        health: StreamHealth,
        *,
        timeout_s: float,
        former: DaemonSession | None = None,
    ) -> None:
        """Open the parts. `timeout_s` is for the stream. Raises ConnectError; OSError and ValueError if memory cannot
        be mapped.
        """
        welcome = handshake.welcome
        self._handshake = handshake
        self._health = health
        self._data_socket = Path(welcome.data_socket or options.directory / DATA_SOCKET)
        self._is_direct = welcome.direct_stream and not options.prefers_grpc
        self._unreleased: deque[int] = deque()
        self._succession = threading.Lock()
        self._held: set[int] = set()  # leases that the engine reads under
        self._carried: frozenset[int] = frozenset()  # those of the session before
        self._successor: DaemonSession | None = None
        self._dead = False
        self._closed_traffic = (0, 0)
        self.deadline_s, self.exact = options.deadline_s, options.exact
        self.tenant = welcome.tenant
        self.max_keys = welcome.max_keys or _DEFAULT_MAX_KEYS
        self.max_block_bytes = welcome.max_block_bytes
        self.chains = KeyChains(options.fingerprint, list(welcome.roots))
        self.reads_only = options.staging_bytes == 0
        self.index = IndexSource(handshake.request_index if welcome.lookup_index else None)
        self.arenas = Arenas(
            handshake,
            welcome.arena_ids,
            former._arenas_in(welcome) if former is not None else None,
            options.device.mappings if options.device is not None else None,
        )
        self.device_arenas: DeviceArenas | None = None
        if options.device is not None:
            from kvstore_client.device.arenas import DeviceArenas

            self.device_arenas = DeviceArenas(handshake, options.device)
        self.writable = WritableArenas(handshake, welcome.writable_arena_ids, is_offered=welcome.put_in_place)
        self.slots = SlotRequests(self.begin, self._call_later)
        self.staging: ClientStaging | None = None  # also None when the daemon had no room to grant any
        staging_fd = handshake.take_staging()
        if staging_fd >= 0:
            self.staging = ClientStaging(map_read_write(staging_fd, welcome.staging_bytes))
        stream = self._open_stream(timeout_s)
        if stream is None:
            raise ConnectError("the daemon shook hands, but no stream could be opened in time")
        self.stream = stream
        memory = self.staging.memory if self.staging is not None else None
        work = partial(prefault_all, self.arenas, self.writable, memory, lambda: not self._dead)
        threading.Thread(target=work, name=PREFAULT_THREAD, daemon=True).start()

    # Calls

    def call(self, request: wire.Request, deadline_s: float, late: Late | None = None) -> wire.Response | str:
        """Send `request`, and return the daemon's answer, or a word that gives the reason why there is none. It waits
        at most `deadline_s` seconds; `late` is called with an answer that arrives after that.

        Raises KVStoreError if the daemon says that the request itself is wrong.
        """
        call = self.begin(request, deadline_s)
        response = call.wait(deadline_s)
        if response is None:
            call.expire(late)
            return REASON_DEADLINE
        return call.judge(response)

    def begin(self, request: wire.Request, deadline_s: float) -> Call:
        """Send `request`, which the daemon shall answer within `deadline_s` seconds, and return the call, on which to
        wait for the answer. It never blocks.
        """
        give_back_dropped()
        request.deadline_ms = max(1, int(deadline_s * 1000))
        return self.stream.submit(request)

    def ping(self, timeout_s: float) -> bool:
        """Return whether the daemon answers a ping on this session's stream within `timeout_s` seconds. Return False
        without asking if `timeout_s` is 0 or less. Raises ConnectError if the stream has ended.
        """
        if timeout_s <= 0:
            return False
        call = self.begin(wire.Request(ping=wire.Ping()), timeout_s)
        response = call.wait(timeout_s)
        if response is None:
            call.abandon()
            return False
        if response.HasField("error"):
            raise ConnectError(response.error.message)
        return True

    # Leases

    def hold(self, lease_id: int) -> None:
        """Note that the engine reads blocks under the lease `lease_id`, until `release` is called for it."""
        self._held.add(lease_id)

    def release(self, lease_id: int) -> None:
        """Give the lease `lease_id` back to the daemon. If a later session has taken the lease over, it is given back
        there. In a forked child it does nothing.
        """
        if not self.stream.is_ours:
            return
        with self._succession:
            self._held.discard(lease_id)  # enough without a session: the next one gives back what is not held
            successor = self._successor
            if successor is None and lease_id and not self._dead:
                self.stream.release((lease_id,))
        if successor is not None and lease_id in successor._carried:
            successor.release(lease_id)

    def send_releases(self) -> bool:
        """Send the releases of all leases that were given back or freed so far. Return True while the daemon has not
        confirmed all of them.
        """
        give_back_dropped()
        return self.stream.send_releases()

    def holder(self, lease_id: int) -> DaemonSession | None:
        """Return the session to which the lease `lease_id` belongs now: this session, or a later one that took the
        lease over. Return None if the lease has ended.
        """
        session = self
        while not session.is_alive():
            successor = session._successor
            if successor is None or lease_id not in successor._carried:
                return None
            session = successor
        return session if lease_id in session._held else None

    def succeed(self, former: DaemonSession) -> None:
        """Take over the leases of the session `former` that the daemon has kept and the engine still reads under. Other
        leases that the daemon has kept are given back.
        """
        standing = set(self._handshake.welcome.lease_ids)
        with former._succession:
            self._carried = frozenset(standing & former._held)
            self._held |= self._carried
            former._successor = self
        if standing - self._carried:
            self.stream.release(sorted(standing - self._carried))

    # Life

    @property
    def token(self) -> bytes:
        """The bytes by which the daemon names this session."""
        return self._handshake.welcome.session_token

    def is_alive(self) -> bool:
        """Return whether this session still exists, so that the daemon holds its leases. After False it stays False."""
        if not self._dead and not self._handshake.is_alive():
            self._dead = True
        return not self._dead

    def reopen_stream(self, timeout_s: float) -> bool:
        """Open a new stream of requests after the old one ended. Return False if the daemon handed over no stream
        within `timeout_s` seconds; try again then, since the session and its leases still exist.
        """
        stream = self._open_stream(timeout_s)
        if stream is None:
            return False
        total = self.traffic_bytes()
        self.stream, self._closed_traffic = stream, total
        self.slots.give_back_ahead()
        return True

    def traffic_bytes(self) -> tuple[int, int]:
        """Return two numbers over all streams of this session: the bytes of their messages, and the bytes of block
        payload inside those messages.
        """
        messages, payloads = self._closed_traffic
        return messages + self.stream.message_bytes, payloads + self.stream.payload_bytes

    def close(self) -> None:
        self._dead = True
        self.slots.give_back_ahead()
        self.stream.close()
        self._handshake.close()
        self.arenas.close()

    def _call_later(self, delay_s: float, function: Callable[[], None]) -> None:
        self.stream.call_later(delay_s, function)

    def _arenas_in(self, welcome: handshake_pb2.Welcome) -> dict[int, Bytes]:
        """Return this client's mappings of arenas that the daemon of `welcome` still has: the same memory, if its epoch
        is the same.
        """
        if not welcome.arena_epoch or welcome.arena_epoch != self._handshake.welcome.arena_epoch:
            return {}
        return {arena_id: self.arenas.mapped[arena_id] for arena_id in welcome.arena_ids & self.arenas.mapped.keys()}

    def _open_stream(self, timeout_s: float) -> RequestStream | None:
        """Return a new stream; None if the daemon hands none over in time, or if this process has no descriptor or
        thread left for one.
        """
        try:
            transport = self._open_transport(timeout_s)
            return None if transport is None else RequestStream(transport, self._health, self._unreleased)
        except (OSError, RuntimeError):
            return None

    def _open_transport(self, timeout_s: float) -> Transport | None:
        if self._is_direct:
            connected = self._handshake.request_stream(timeout_s)
            return None if connected is None else DirectTransport(connected)
        from kvstore_client.transport.over_grpc import GrpcTransport

        return GrpcTransport(self._data_socket, self._handshake.welcome.session_token)


def open_daemon_session(
    options: ClientOptions, timeout_s: float, health: StreamHealth, former: DaemonSession | None = None
) -> DaemonSession:
    """Open a session with the daemon within `timeout_s` seconds and return it: handshake, staging memory, stream, and
    one ping. If `former` is given, the new session takes over its leases. Failures of the stream are reported to
    `health`. Raises ConnectError.
    """
    deadline = time.monotonic() + timeout_s
    hello = options.hello(former.token if former is not None else b"")
    handshake = open_handshake(options.directory / HANDSHAKE_SOCKET, hello, timeout_s)
    welcome = handshake.welcome
    if welcome.protocol_version != PROTOCOL_VERSION or len(welcome.roots) != len(options.fingerprint.groups):
        handshake.close()
        raise ConnectError(
            f"the daemon speaks protocol {welcome.protocol_version} with {len(welcome.roots)} layer groups, "
            f"this client {PROTOCOL_VERSION} with {len(options.fingerprint.groups)}: "
            "upgrade the older of the two"
        )
    try:
        session = DaemonSession(handshake, options, health, timeout_s=deadline - time.monotonic(), former=former)
    except ConnectError:
        handshake.close()
        raise
    except (OSError, ValueError) as error:
        handshake.close()
        raise ConnectError(f"the staging memory cannot be mapped: {error}") from None
    try:
        answered = session.ping(deadline - time.monotonic())
    except ConnectError:
        session.close()
        raise
    if not answered:
        session.close()
        raise ConnectError(f"the daemon at {options.directory} shook hands but its stream does not answer")
    if former is not None:
        session.succeed(former)
    return session
