"""A test double of the daemon: the real sockets, descriptors and messages, with a dictionary for a store.

Only for tests of the client. It keeps everything, evicts nothing, and has knobs for what a daemon may do
wrong or late.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import grpc
import numpy as np
import xxhash

from kvstore_client import Fingerprint, Session, connect
from kvstore_client.memory import map_read_write
from kvstore_proto.arena import HEADER_BYTES, MAGIC, TOKENS_OFFSET, BlockHeader, slot_bytes
from kvstore_proto.fingerprint import parse_fingerprint
from kvstore_proto.identity import root_key, split_keys
from kvstore_proto.v1 import handshake_pb2 as hs
from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstore_proto.v1 import kvstore_pb2_grpc
from tests.reference.fake_streams import GrpcStreams, grant_direct_stream

ARENA_ID = 7


@dataclass
class Knobs:
    """The deviations of the double from a working daemon."""

    delay_s: dict[str, float] = field(default_factory=dict)  # by operation: answer that late
    silent: set[str] = field(default_factory=set)  # operations that are never answered
    silent_after: dict[str, int] = field(default_factory=dict)  # by operation: how many are answered before that
    errors: dict[str, pb.Error] = field(default_factory=dict)
    refuse: pb.Error | None = None
    protocol_version: int = 1
    staging_limit_bytes: int = 1 << 30
    max_keys: int = 1024
    lease_ttl_ms: int = 10_000
    leases_per_client: int = 1 << 30
    no_room: bool = False
    mapped_blocks: int = 1 << 30  # what a get has of those that are stored, in time
    block_load_us: int = 100  # what a block of a slower tier is said to take
    generation_skew: int = 0
    pending_then_durable: bool = False
    present_as_pending: int = 0  # how many blocks are answered AGAIN before the truth


@dataclass
class Stored:
    offset: int
    payload_bytes: int
    generation: int


@dataclass
class Client:
    token: bytes
    staging: np.ndarray | None
    fingerprint: bytes
    leases: set[int] = field(default_factory=set)
    loan: int = 0


class FakeDaemon:
    """`with FakeDaemon(directory) as daemon:`; `daemon.log` has each request's operation in order."""

    is_direct: ClassVar[bool] = False  # whether it offers direct streams, or gRPC's alone

    def __init__(self, directory: Path, knobs: Knobs | None = None, arena_bytes: int = 96 << 20) -> None:
        self.directory = directory
        self.knobs = knobs or Knobs()
        self.log: list[str] = []
        self.released: list[int] = []
        self.hints: list[pb.Hint] = []
        self.stores: list[pb.Store] = []
        self.streams_opened = 0
        self._streams: list[Callable[[], None]] = []  # what breaks each
        self.grants_arenas = True
        self.grants_streams = True
        self.streams_refused = 0
        self.clients: dict[bytes, Client] = {}
        self.blocks: dict[bytes, Stored] = {}
        self._arena_fd = os.memfd_create("fake-arena", os.MFD_CLOEXEC)
        os.ftruncate(self._arena_fd, arena_bytes)
        self.arena = map_read_write(os.dup(self._arena_fd), arena_bytes)
        self._arena_top = 0
        self._ids = iter(range(1, 1 << 40))
        self._lock = threading.Lock()
        self._stopping = False
        self._sockets: list[socket.socket] = []
        directory.mkdir(exist_ok=True)
        for name in ("handshake.sock", "data.sock"):
            (directory / name).unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(directory / "handshake.sock"))
        self._listener.listen(16)
        self._server = grpc.server(futures.ThreadPoolExecutor(16))
        kvstore_pb2_grpc.add_KVStoreServicer_to_server(GrpcStreams(self), self._server)
        self._server.add_insecure_port(f"unix:{directory / 'data.sock'}")
        self._server.start()
        threading.Thread(target=self._accept, daemon=True).start()

    def connect(self, fingerprint: Fingerprint, **options: object) -> Session:
        """A session that is connected, with deadlines that no busy machine misses."""
        settings: dict[str, object] = {"deadline_s": 30.0, "connect_timeout_s": 30.0, "required": True} | options
        return connect(self.directory, fingerprint=fingerprint, **settings)  # type: ignore[arg-type]

    def __enter__(self) -> FakeDaemon:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._stopping = True
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._sockets:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self.break_streams()
        self._server.stop(0).wait()
        for name in ("handshake.sock", "data.sock"):
            (self.directory / name).unlink(missing_ok=True)
        os.close(self._arena_fd)

    def break_streams(self) -> None:
        """End every stream, and leave the handshake connections alone."""
        streams, self._streams = self._streams, []
        for end in streams:
            end()

    def is_silent_now(self, operation: str) -> bool:
        answered = self.knobs.silent_after.get(operation, math.inf)
        return self.log.count(operation) >= answered

    def opened(self, end: Callable[[], None]) -> None:
        self.streams_opened += 1
        self._streams.append(end)

    def answers(self, client: Client, request: pb.Request) -> list[pb.Response]:
        """Return what goes out for a request, with all the knobs; nothing for one that is not answered."""
        operation = request.WhichOneof("op")
        if operation in self.knobs.silent or self.is_silent_now(operation):
            self.log.append(operation)
            return []
        time.sleep(self.knobs.delay_s.get(operation, 0.0))
        responses = self.answer(client, request)
        for response in responses:
            response.request_id = request.request_id
        return responses

    def _accept(self) -> None:
        while not self._stopping:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.append(connection)
            threading.Thread(target=self._serve_handshake, args=(connection,), daemon=True).start()

    def _serve_handshake(self, connection: socket.socket) -> None:
        try:
            hello = hs.ClientPacket.FromString(connection.recv(1 << 17)).hello
            if self.knobs.refuse is not None:
                connection.send(hs.DaemonPacket(refused=self.knobs.refuse).SerializeToString())
                return
            client = self._welcome(connection, hello)
            while data := connection.recv(1 << 17):
                packet = hs.ClientPacket.FromString(data)
                if packet.HasField("direct_stream"):
                    if self.grants_streams:
                        grant_direct_stream(self, client, connection)
                    else:
                        self.streams_refused += 1
                        refused = pb.Error(kind=pb.ERROR_KIND_UNAVAILABLE, message="not now")
                        connection.send(hs.DaemonPacket(refused=refused).SerializeToString())
                    continue
                wanted = packet.arena.arena_id
                if wanted != ARENA_ID or not self.grants_arenas:
                    error = pb.Error(kind=pb.ERROR_KIND_NOT_FOUND, message="no such arena")
                    connection.send(hs.DaemonPacket(refused=error).SerializeToString())
                    continue
                grant = hs.DaemonPacket(arena=hs.ArenaGrant(arena_id=ARENA_ID, size_bytes=len(self.arena)))
                descriptor = os.open(f"/proc/self/fd/{self._arena_fd}", os.O_RDONLY | os.O_CLOEXEC)
                socket.send_fds(connection, [grant.SerializeToString()], [descriptor])
                os.close(descriptor)
        except OSError:
            return

    def _welcome(self, connection: socket.socket, hello: hs.Hello) -> Client:
        fingerprint = parse_fingerprint(hello.fingerprint)
        size = min(hello.staging_bytes, self.knobs.staging_limit_bytes)
        token = os.urandom(16)
        descriptors = []
        staging = None
        if size:
            fd = os.memfd_create("fake-staging", os.MFD_CLOEXEC)
            os.ftruncate(fd, size)
            staging = map_read_write(os.dup(fd), size)
            descriptors.append(fd)
        client = self.clients[token] = Client(token, staging, fingerprint.digest())
        roots = [root_key(b"fake", fingerprint.digest(), group.group_id) for group in fingerprint.groups]
        welcome = hs.Welcome(
            protocol_version=self.knobs.protocol_version,
            session_token=token,
            tenant="fake",
            roots=roots,
            staging_bytes=size,
            lease_ttl_ms=self.knobs.lease_ttl_ms,
            daemon_epoch=os.urandom(16),
            data_socket=str(self.directory / "data.sock"),
            max_keys=self.knobs.max_keys,
            max_block_bytes=8 << 20,
            direct_stream=self.is_direct,
        )
        socket.send_fds(connection, [hs.DaemonPacket(welcome=welcome).SerializeToString()], descriptors)
        for fd in descriptors:
            os.close(fd)
        return client

    def answer(self, client: Client, request: pb.Request) -> list[pb.Response]:
        operation = request.WhichOneof("op")
        self.log.append(operation)
        error = self.knobs.errors.get(operation)
        if error is not None:
            return [pb.Response(error=error)]
        if operation == "acquire" and len(client.leases) >= self.knobs.leases_per_client:
            return [pb.Response(error=pb.Error(kind=pb.ERROR_KIND_THROTTLED))]
        with self._lock:
            result = getattr(self, f"_{operation}")(client, getattr(request, operation))
        replies = result if isinstance(result, list) else [result]
        return [pb.Response(**{operation: reply}) for reply in replies]

    def _ping(self, client: Client, ping: pb.Ping) -> pb.PingReply:
        return pb.PingReply(payload=ping.payload)

    def _leading(self, blocks: pb.KeySet) -> tuple[list[bytes], int]:
        keys = split_keys(blocks.keys)
        return keys, next((i for i, key in enumerate(keys) if key not in self.blocks), len(keys))

    def _lookup(self, client: Client, lookup: pb.Lookup) -> pb.LookupReply:
        sets = []
        for wanted in lookup.sets:
            keys, usable = self._leading(wanted)
            tiers = bytes(pb.TIER_CODE_HOST if key in self.blocks else 0 for key in keys)
            reason = pb.MISS_REASON_NEVER_STORED if usable < len(keys) else 0
            load_us = [self.knobs.block_load_us] * len(keys)
            sets.append(pb.Presence(usable_blocks=usable, tiers=tiers, load_us=load_us, miss_reason=reason))
        return pb.LookupReply(sets=sets)

    def _lend(self, client: Client, lend: pb.Lend) -> pb.LendReply:
        client.loan += client.staging is not None
        return pb.LendReply(loan=client.loan)

    def _store(self, client: Client, store: pb.Store) -> list[pb.StoreReply]:
        self.stores.append(store)
        keys, parents = split_keys(store.keys), split_keys(store.parents)
        statuses: list[int] = []
        for key, parent, page in zip(keys, parents, store.pages, strict=True):
            status = pb.STORE_STATUS_STORED
            if store.loan != client.loan or self.knobs.present_as_pending > 0:
                self.knobs.present_as_pending -= store.loan == client.loan
                status = pb.STORE_STATUS_AGAIN
            elif key in self.blocks:
                status = pb.STORE_STATUS_PRESENT
            elif not page:
                status = pb.STORE_STATUS_WANTED
            elif parent != bytes(16) and parent not in self.blocks:
                status = pb.STORE_STATUS_ORPHANED
            elif self.knobs.no_room:
                status = pb.STORE_STATUS_NO_ROOM
            else:
                self._keep(client, key, parent, (page - 1) * 4096, store.payload_bytes)
            statuses.append(status)
        return self._stored(statuses)

    def _stored(self, statuses: list[int]) -> list[pb.StoreReply]:
        count = len(statuses)
        durable = bytes([pb.DURABILITY_DURABLE] * count)
        if not self.knobs.pending_then_durable:
            return [pb.StoreReply(statuses=bytes(statuses), durability=durable, final=True)]
        pending = bytes([pb.DURABILITY_PENDING] * count)
        return [
            pb.StoreReply(statuses=bytes(statuses), durability=pending),
            pb.StoreReply(statuses=bytes(statuses), durability=durable, final=True),
        ]

    def _keep(self, client: Client, key: bytes, parent: bytes, staged: int, payload_bytes: int) -> None:
        assert client.staging is not None
        head = client.staging[staged : staged + HEADER_BYTES]
        count = int(head[108:112].view("<u4")[0])
        tokens = head[TOKENS_OFFSET : TOKENS_OFFSET + 4 * count].tobytes()
        offset, self._arena_top = self._arena_top, self._arena_top + slot_bytes(payload_bytes)
        payload = client.staging[staged + HEADER_BYTES : staged + HEADER_BYTES + payload_bytes]
        generation = next(self._ids)
        header = BlockHeader(
            key=key,
            parent=parent,
            fingerprint=client.fingerprint,
            tenant=bytes(16),
            payload_bytes=payload_bytes,
            tokens=tokens,
            generation=generation,
            checksum=xxhash.xxh3_64_intdigest(payload),
        )
        np.copyto(self.arena[offset + HEADER_BYTES : offset + HEADER_BYTES + payload_bytes], payload)
        np.copyto(self.arena[offset : offset + HEADER_BYTES], np.frombuffer(header.pack(), np.uint8))
        assert self.arena[offset : offset + 4].tobytes() == MAGIC
        self.blocks[key] = Stored(offset, payload_bytes, generation)

    def _acquire(self, client: Client, acquire: pb.Acquire) -> pb.AcquireReply:
        keys, stored = self._leading(acquire.set)
        reason = pb.MISS_REASON_NEVER_STORED if stored < len(keys) else 0
        usable = min(stored, self.knobs.mapped_blocks)
        if usable < stored:
            reason = 0
        load_us = self.knobs.block_load_us * (stored - usable)
        if not usable:
            return pb.AcquireReply(miss_reason=reason, resident_blocks=stored, load_us=load_us)
        held = [self.blocks[key] for key in keys[:usable]]
        lease = next(self._ids)
        client.leases.add(lease)
        return pb.AcquireReply(
            lease_id=lease,
            blocks=usable,
            arena_ids=[ARENA_ID] * usable,
            offsets=[block.offset for block in held],
            payload_bytes=[block.payload_bytes for block in held],
            generations=[block.generation + self.knobs.generation_skew for block in held],
            expires_in_ms=self.knobs.lease_ttl_ms,
            miss_reason=reason,
            resident_blocks=stored,
            load_us=load_us,
        )

    def _release(self, client: Client, release: pb.Release) -> pb.ReleaseReply:
        client.leases.difference_update(release.lease_ids)
        self.released.extend(release.lease_ids)
        return pb.ReleaseReply(released=len(release.lease_ids))

    def _prefetch(self, client: Client, prefetch: pb.Prefetch) -> pb.PrefetchReply:
        return pb.PrefetchReply(resident_blocks=self._leading(prefetch.set)[1])

    def _hint(self, client: Client, hint: pb.Hint) -> pb.HintReply:
        self.hints.append(hint)
        return pb.HintReply(known_blocks=self._leading(hint.set)[1])

    def _touch(self, client: Client, touch: pb.Touch) -> pb.TouchReply:
        renewed = sum(lease in client.leases for lease in touch.lease_ids)
        known = sum(key in self.blocks for key in split_keys(touch.set.keys))
        return pb.TouchReply(touched=known, renewed=renewed, expires_in_ms=self.knobs.lease_ttl_ms)


def eventually(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait for what another thread will bring about; fails when it does not."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.002)
