"""Everything that lives and dies with one handshake: its stream, its mapped memory, its keys.

Owns the opening and closing of these parts in order, and the reopening of the stream while the handshake
connection stands (the daemon anchors leases there, so they survive a broken stream); and which connection came after
this one, with which of its leases: a daemon that was restarted may have kept them, bytes and all. Never does: decide
when to reconnect.
Invariants: once `is_alive()` has been False it stays False; a lease is valid while it is held and the connection, or
the one after it that the daemon gave the lease to again, is alive. A lease that not both sides know is given back.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvstore_client.errors import ConnectError
from kvstore_client.handshake import PROTOCOL_VERSION, GrantedArena, Handshake, open_handshake
from kvstore_client.keys import KeyChains
from kvstore_client.loan import Loan
from kvstore_client.lookup_index import IndexSource
from kvstore_client.memory import (
    READ_REST,
    WRITTEN_REST,
    Bytes,
    EnteredPages,
    map_present,
    map_read_only,
    map_read_write,
    prefault,
)
from kvstore_client.paths import DATA_SOCKET, HANDSHAKE_SOCKET
from kvstore_client.stream import Stream
from kvstore_client.transport.base import Transport
from kvstore_client.transport.direct import DirectTransport
from kvstore_client.writable import WritableArenas
from kvstore_proto.fingerprint import Fingerprint
from kvstore_proto.v1 import handshake_pb2, kvstore_pb2

_DEFAULT_MAX_KEYS = 1024
PREFAULT_ARENAS_BYTES = 1 << 30  # page tables for more would be some megabytes of each engine
PREFAULT_GRANT_TIMEOUT_S = 1.0
PREFAULT_THREAD = "kvstore-prefault"
PREFAULT_PAUSES_S = (0.0, 0.25, 0.5, 1.0, 2.0)


@dataclass(frozen=True, slots=True)
class Introduction:
    """What a session says about itself at every connection."""

    directory: Path
    fingerprint: Fingerprint
    client_name: str
    staging_bytes: int
    prefers_grpc: bool = False  # for the stream, also where the daemon has a direct one

    def hello(self, former_token: bytes = b"") -> handshake_pb2.Hello:
        return handshake_pb2.Hello(
            former_token=former_token,
            protocol_version=PROTOCOL_VERSION,
            client_name=self.client_name,
            fingerprint=self.fingerprint.canonical(),
            staging_bytes=self.staging_bytes,
        )


class Connection:
    """One life of the daemon, as this client sees it. Made by `open_connection`."""

    def __init__(
        self,
        handshake: Handshake,
        introduction: Introduction,
        *,
        on_end: Callable[[str], None],
        on_answer: Callable[[], None],
        timeout_s: float,
        former: Connection | None = None,
    ) -> None:
        """`timeout_s` is for the stream. Raises ConnectError; OSError and ValueError when memory cannot be mapped."""
        welcome = handshake.welcome
        self._handshake = handshake
        self._on_end, self._on_answer = on_end, on_answer
        self._data_socket = Path(welcome.data_socket or introduction.directory / DATA_SOCKET)
        self._is_direct = welcome.direct_stream and not introduction.prefers_grpc
        self._unreleased: deque[int] = deque()
        self._arenas: dict[int, Bytes] = {}
        if former is not None and welcome.arena_epoch and welcome.arena_epoch == former._handshake.welcome.arena_epoch:
            self._arenas = {
                arena_id: former._arenas[arena_id] for arena_id in welcome.arena_ids & former._arenas.keys()
            }
        self._succession = threading.Lock()
        self._held: set[int] = set()  # leases that somebody reads
        self._carried: frozenset[int] = frozenset()  # those of the connection before
        self._successor: Connection | None = None
        self._arena_lock = threading.Lock()
        self._dead = False
        self._carried_message_bytes = 0
        self._carried_payload_bytes = 0
        self.tenant = welcome.tenant
        self.max_keys = welcome.max_keys or _DEFAULT_MAX_KEYS
        self.max_block_bytes = welcome.max_block_bytes
        self.lease_ttl_s = welcome.lease_ttl_ms / 1000
        self.chains = KeyChains(introduction.fingerprint, list(welcome.roots))
        self.reads_only = introduction.staging_bytes == 0
        self.index = IndexSource(handshake.request_index if welcome.lookup_index else None)
        self.staging: Bytes | None = None  # also None when the daemon had no room to grant any
        staging_fd = handshake.take_staging()
        if staging_fd >= 0:
            self.staging = map_read_write(staging_fd, welcome.staging_bytes)
        self.loan = Loan(0 if self.staging is None else len(self.staging))
        self.writable = WritableArenas(handshake, is_offered=welcome.put_in_place, announced=welcome.writable_arena_ids)
        stream = self._open_stream(timeout_s)
        if stream is None:
            raise ConnectError("the daemon shook hands, but no stream could be opened in time")
        self.stream = stream
        threading.Thread(target=self._prefault, name=PREFAULT_THREAD, daemon=True).start()

    def arena(self, arena_id: int, timeout_s: float) -> Bytes | None:
        """The mapped arena, mapping it the first time; None when the daemon does not hand it over in time."""
        known = self._arenas.get(arena_id)
        if known is not None:
            return known
        grant = self._handshake.request_arena(arena_id, timeout_s)
        return self._map(arena_id, grant) if grant is not None else None

    def _map(self, arena_id: int, grant: GrantedArena) -> Bytes | None:
        try:
            mapped = map_read_only(grant.descriptor, grant.size_bytes)
        except (OSError, ValueError):
            return None
        with self._arena_lock:
            return self._arenas.setdefault(arena_id, mapped)

    def _prefault(self) -> None:
        """Map what will be read and written before it is needed: an engine that starts has its model to load."""
        with contextlib.ExitStack() as descriptors:
            mapped: list[tuple[Bytes, int, int, EnteredPages | None]] = []
            if self.staging is not None:
                written = self.writable.map_announced(descriptors, PREFAULT_GRANT_TIMEOUT_S, PREFAULT_ARENAS_BYTES)
                mapped += [(arena, descriptor, WRITTEN_REST, entered) for arena, descriptor, entered in written]
            mapped += [(*each, READ_REST, None) for each in self._map_arenas(descriptors)]
            if self.staging is not None:
                prefault(self.staging, lambda: not self._dead)
            left_bytes = sum(len(arena) for arena, *_ in mapped)
            for pause_s in PREFAULT_PAUSES_S:  # a daemon that has just begun is touching its arenas meanwhile
                if self._dead or not left_bytes:
                    return
                time.sleep(pause_s)
                left_bytes = 0
                for arena, descriptor, rest, entered in mapped:
                    left_bytes += len(arena) - map_present(arena, descriptor, lambda: not self._dead, rest, entered)

    def _map_arenas(self, descriptors: contextlib.ExitStack) -> Iterator[tuple[Bytes, int]]:
        """Arenas that were announced and are not mapped yet, each with a descriptor of it until the stack ends."""
        left_bytes = PREFAULT_ARENAS_BYTES
        for arena_id in self._handshake.welcome.arena_ids:
            if self._dead or arena_id in self._arenas:
                continue
            grant = self._handshake.request_arena(arena_id, PREFAULT_GRANT_TIMEOUT_S)
            if grant is None:
                return
            try:
                descriptor = os.dup(grant.descriptor)
            except OSError:
                self._map(arena_id, grant)
                return
            descriptors.callback(os.close, descriptor)
            arena = self._map(arena_id, grant)
            if arena is None or left_bytes < len(arena):
                return
            left_bytes -= len(arena)
            yield arena, descriptor

    def hold(self, lease_id: int) -> None:
        """Somebody reads under this lease from now on, until `release`."""
        self._held.add(lease_id)

    def release(self, lease_id: int) -> None:
        """Give a lease back, to whom it is held from by now."""
        with self._succession:
            self._held.discard(lease_id)  # enough, if no connection stands: the next one gives back what is not held
            successor = self._successor
            if successor is None and lease_id and not self._dead:
                self.stream.release((lease_id,))
        if successor is not None and lease_id in successor._carried:
            successor.release(lease_id)

    def heir(self, lease_id: int) -> Connection | None:
        """The connection under which a lease stands now: this one, or one after it. None when it has ended."""
        connection = self
        while not connection.is_alive():
            successor = connection._successor
            if successor is None or lease_id not in successor._carried:
                return None
            connection = successor
        return connection if lease_id in connection._held else None

    def succeed(self, former: Connection) -> None:
        """Take over the leases of the connection before that stand and are held; give the other ones back."""
        standing = set(self._handshake.welcome.lease_ids)
        with former._succession:
            self._carried = frozenset(standing & former._held)
            self._held |= self._carried
            former._successor = self
        if standing - self._carried:
            self.stream.release(sorted(standing - self._carried))

    @property
    def token(self) -> bytes:
        """What the daemon knows this connection by."""
        return self._handshake.welcome.session_token

    def is_alive(self) -> bool:
        """Whether the daemon still holds our leases."""
        if not self._dead and not self._handshake.is_alive():
            self._dead = True
        return not self._dead

    def ping(self, timeout_s: float) -> bool:
        """Whether the stream answers in time: not if that is over already. Raises ConnectError when it has ended."""
        if timeout_s <= 0:
            return False
        request = kvstore_pb2.Request(deadline_ms=max(1, int(timeout_s * 1000)), ping=kvstore_pb2.Ping())
        call = self.stream.submit(request)
        response = call.wait(timeout_s)
        if response is None:
            self.stream.abandon(call)
            return False
        if response.HasField("error"):
            raise ConnectError(response.error.message)
        return True

    def reopen_stream(self, timeout_s: float) -> bool:
        """A fresh stream of the same session, after the old one has ended. False when none could be had in time: what
        the session holds stands, so ask again."""
        stream = self._open_stream(timeout_s)
        if stream is None:
            return False
        former, self.stream = self.stream, stream
        self._carried_message_bytes += former.message_bytes
        self._carried_payload_bytes += former.payload_bytes
        return True

    def traffic_bytes(self) -> tuple[int, int]:
        """Bytes of the stream's messages, and of opaque payload inside them."""
        return (
            self._carried_message_bytes + self.stream.message_bytes,
            self._carried_payload_bytes + self.stream.payload_bytes,
        )

    def close(self) -> None:
        self._dead = True
        self.stream.close()
        self._handshake.close()

    def _open_stream(self, timeout_s: float) -> Stream | None:
        """None when the daemon hands none over in time, or this process has no descriptor or thread left for one."""
        try:
            transport = self._open_transport(timeout_s)
            if transport is None:
                return None
            return Stream(transport, on_end=self._on_end, on_answer=self._on_answer, unreleased=self._unreleased)
        except (OSError, RuntimeError):
            return None

    def _open_transport(self, timeout_s: float) -> Transport | None:
        if self._is_direct:
            connected = self._handshake.request_stream(timeout_s)
            return None if connected is None else DirectTransport(connected)
        from kvstore_client.transport.over_grpc import GrpcTransport

        return GrpcTransport(self._data_socket, self._handshake.welcome.session_token)


def open_connection(
    introduction: Introduction,
    timeout_s: float,
    *,
    on_end: Callable[[str], None],
    on_answer: Callable[[], None],
    former: Connection | None = None,
) -> Connection:
    """Handshake, staging, stream, and one ping through it; then what is left of `former`. Raises ConnectError."""
    deadline = time.monotonic() + timeout_s
    hello = introduction.hello(former.token if former is not None else b"")
    handshake = open_handshake(introduction.directory / HANDSHAKE_SOCKET, hello, timeout_s)
    welcome = handshake.welcome
    if welcome.protocol_version != PROTOCOL_VERSION or len(welcome.roots) != len(introduction.fingerprint.groups):
        handshake.close()
        raise ConnectError(
            f"the daemon speaks protocol {welcome.protocol_version} with {len(welcome.roots)} layer groups, "
            f"this client {PROTOCOL_VERSION} with {len(introduction.fingerprint.groups)}: "
            "upgrade the older of the two"
        )
    try:
        connection = Connection(
            handshake,
            introduction,
            on_end=on_end,
            on_answer=on_answer,
            timeout_s=deadline - time.monotonic(),
            former=former,
        )
    except ConnectError:
        handshake.close()
        raise
    except (OSError, ValueError) as error:
        handshake.close()
        raise ConnectError(f"the staging memory cannot be mapped: {error}") from None
    try:
        answered = connection.ping(deadline - time.monotonic())
    except ConnectError:
        connection.close()
        raise
    if not answered:
        connection.close()
        raise ConnectError(f"the daemon at {introduction.directory} shook hands but its stream does not answer")
    if former is not None:
        connection.succeed(former)
    return connection
