"""Everything that lives and dies with one handshake: its stream, its mapped memory, its keys.

Owns the opening and closing of these parts in order, and the reopening of the stream while the handshake
connection stands (the daemon anchors leases there, so they survive a broken stream). Never does: decide when
to reconnect.
Invariant: once `is_alive()` has been False it stays False; leases of a dead connection are invalid.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvstore_client.errors import ConnectError
from kvstore_client.handshake import PROTOCOL_VERSION, Handshake, open_handshake
from kvstore_client.keys import KeyChains
from kvstore_client.lookup_index import IndexSource
from kvstore_client.memory import Bytes, map_read_only, map_read_write, prefault, step_behind
from kvstore_client.paths import DATA_SOCKET, HANDSHAKE_SOCKET
from kvstore_client.stream import Stream
from kvstore_proto.fingerprint import Fingerprint
from kvstore_proto.v1 import handshake_pb2, kvstore_pb2

_DEFAULT_MAX_KEYS = 1024
PREFAULT_ARENAS_BYTES = 1 << 30  # page tables for more would be some megabytes of each engine
PREFAULT_GRANT_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Introduction:
    """What a session says about itself at every connection."""

    directory: Path
    fingerprint: Fingerprint
    client_name: str
    staging_bytes: int

    def hello(self) -> handshake_pb2.Hello:
        return handshake_pb2.Hello(
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
    ) -> None:
        welcome = handshake.welcome
        self._handshake = handshake
        self._on_end, self._on_answer = on_end, on_answer
        self._data_socket = Path(welcome.data_socket or introduction.directory / DATA_SOCKET)
        self._unreleased: deque[int] = deque()
        self._arenas: dict[int, Bytes] = {}
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
        threading.Thread(target=self._prefault, name="kvstore-prefault", daemon=True).start()
        self.stream = self._open_stream()

    def arena(self, arena_id: int, timeout_s: float) -> Bytes | None:
        """The mapped arena, mapping it the first time; None when the daemon does not hand it over in time."""
        known = self._arenas.get(arena_id)
        if known is not None:
            return known
        grant = self._handshake.request_arena(arena_id, timeout_s)
        if grant is None:
            return None
        try:
            mapped = map_read_only(grant.descriptor, grant.size_bytes)
        except (OSError, ValueError):
            return None
        with self._arena_lock:
            return self._arenas.setdefault(arena_id, mapped)

    def _prefault(self) -> None:
        """Map what will be read and written before it is needed: an engine that starts has its model to load."""
        step_behind()
        left_bytes = PREFAULT_ARENAS_BYTES
        for arena_id in self._handshake.welcome.arena_ids:
            arena = None if self._dead else self.arena(arena_id, PREFAULT_GRANT_TIMEOUT_S)
            if arena is None or left_bytes < len(arena):
                break
            left_bytes -= len(arena)
            prefault(arena, lambda: not self._dead)
        if self.staging is not None:
            prefault(self.staging, lambda: not self._dead)

    def release(self, lease_id: int) -> None:
        if lease_id and not self._dead:
            self.stream.release((lease_id,))

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

    def reopen_stream(self) -> None:
        """A fresh stream under the same session token, after the old one has ended."""
        self._carried_message_bytes += self.stream.message_bytes
        self._carried_payload_bytes += self.stream.payload_bytes
        self.stream = self._open_stream()

    def traffic_bytes(self) -> tuple[int, int]:
        """Bytes of gRPC messages, and of opaque payload inside them."""
        return (
            self._carried_message_bytes + self.stream.message_bytes,
            self._carried_payload_bytes + self.stream.payload_bytes,
        )

    def close(self) -> None:
        self._dead = True
        self.stream.close()
        self._handshake.close()

    def _open_stream(self) -> Stream:
        return Stream(
            self._data_socket,
            self._handshake.welcome.session_token,
            on_end=self._on_end,
            on_answer=self._on_answer,
            unreleased=self._unreleased,
        )


def open_connection(
    introduction: Introduction,
    timeout_s: float,
    *,
    on_end: Callable[[str], None],
    on_answer: Callable[[], None],
) -> Connection:
    """Handshake, staging, stream, and one ping through it. Raises ConnectError."""
    deadline = time.monotonic() + timeout_s
    handshake = open_handshake(introduction.directory / HANDSHAKE_SOCKET, introduction.hello(), timeout_s)
    welcome = handshake.welcome
    if welcome.protocol_version != PROTOCOL_VERSION or len(welcome.roots) != len(introduction.fingerprint.groups):
        handshake.close()
        raise ConnectError(
            f"the daemon speaks protocol {welcome.protocol_version} with {len(welcome.roots)} layer groups, "
            f"this client {PROTOCOL_VERSION} with {len(introduction.fingerprint.groups)}: "
            "upgrade the older of the two"
        )
    try:
        connection = Connection(handshake, introduction, on_end=on_end, on_answer=on_answer)
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
    return connection
