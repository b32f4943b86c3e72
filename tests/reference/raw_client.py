"""A client without manners: the wire as it is, for requests that kvstore_client would never send.

Owns one handshake connection, its descriptors and one stream. Never retries, checks or releases by itself.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import pickle
import queue
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import grpc

from kvstore_proto.arena import HEADER_BYTES, TOKEN_COUNT_OFFSET, TOKENS_OFFSET, Bytes
from kvstore_proto.fingerprint import Fingerprint
from kvstore_proto.identity import NO_PARENT, BlockKeys, block_keys, pack_tokens
from kvstore_proto.token_ids import TokenIds
from kvstore_proto.v1 import handshake_pb2 as hs
from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstore_proto.v1 import kvstore_pb2_grpc

TIMEOUT_S = 60.0
Result = TypeVar("Result")


class RawClient:
    """`refused` is what the daemon said instead of a welcome, if it did."""

    def __init__(
        self, socket_dir: Path, model: Fingerprint, *, staging_bytes: int = 1 << 20, **hello: Any
    ) -> None:  # `hello` overrides what the hello says
        self.socket_dir = socket_dir
        self.fingerprint = model
        self.welcome = hs.Welcome()
        self.refused: pb.Error | None = None
        self.connection = connect_seqpacket(socket_dir / "handshake.sock")
        self._ids = itertools.count(1)
        self._outbox: queue.SimpleQueue[pb.Request | None] = queue.SimpleQueue()
        self._channel: grpc.Channel | None = None
        fields = {"protocol_version": 1, "client_name": "raw", "fingerprint": model.canonical()}
        packet = hs.Hello(**(fields | {"staging_bytes": staging_bytes} | hello))
        reply, self.staging_fd = self.shake(hs.ClientPacket(hello=packet))
        if reply.HasField("refused"):
            self.refused = reply.refused
        else:
            self.welcome.CopyFrom(reply.welcome)

    def shake(self, packet: hs.ClientPacket | bytes) -> tuple[hs.DaemonPacket, int]:
        """Send on the handshake socket; the answer and its descriptor (-1: none). EOFError when the daemon hangs up."""
        self.connection.send(packet if isinstance(packet, bytes) else packet.SerializeToString())
        data, descriptors, _, _ = socket.recv_fds(self.connection, 1 << 17, 4)
        if not data:
            raise EOFError
        return hs.DaemonPacket.FromString(data), descriptors[0] if descriptors else -1

    def open_stream(self, token: bytes | None = None) -> None:
        self._channel = grpc.insecure_channel(
            f"unix:{self.socket_dir}/data.sock", options=(("grpc.use_local_subchannel_pool", 1),)
        )
        stub: Any = kvstore_pb2_grpc.KVStoreStub(self._channel)  # type: ignore[no-untyped-call]
        self._outbox = queue.SimpleQueue()  # of this stream alone: the end of one before may still be in the old
        metadata = (("kvstored-session-bin", self.welcome.session_token if token is None else token),)
        self._stream = stub.Session(iter(self._outbox.get, None), metadata=metadata, timeout=TIMEOUT_S)

    def send(self, **request: Any) -> int:
        """Any Request; its id is chosen unless given. Returns the id."""
        request.setdefault("request_id", next(self._ids))
        if self._channel is None:
            self.open_stream()
        self._outbox.put(pb.Request(**request))
        return int(request["request_id"])

    def ask(self, **request: Any) -> pb.Response:
        """Send, and the next response. Raises grpc.RpcError when the stream ends instead."""
        request_id = self.send(**request)
        response: pb.Response = next(self._stream)
        assert response.request_id == request_id
        return response

    def next_response(self) -> pb.Response:
        response: pb.Response = next(self._stream)
        return response

    def keys(self, tokens: TokenIds) -> BlockKeys:
        fp = self.fingerprint
        return block_keys(
            self.welcome.roots[0], tokens, block_tokens=fp.block_tokens, engine_block_tokens=fp.engine_block_tokens
        )

    def lend(self) -> int:
        """The number of the loan."""
        response = self.ask(lend=pb.Lend())
        assert response.HasField("lend"), response
        return response.lend.loan

    def stage(self, page: int, tokens: TokenIds, payload: Bytes) -> None:
        """A block into the slot that `page` names."""
        offset, packed = (page - 1) * 4096, pack_tokens(tokens)
        with mmap.mmap(self.staging_fd, self.welcome.staging_bytes) as staging:
            staging[offset + TOKEN_COUNT_OFFSET : offset + TOKEN_COUNT_OFFSET + 4] = (len(packed) // 4).to_bytes(
                4, "little"
            )
            staging[offset + TOKENS_OFFSET : offset + TOKENS_OFFSET + len(packed)] = packed
            staging[offset + HEADER_BYTES : offset + HEADER_BYTES + len(payload)] = payload.tobytes()

    def store_of(self, keys: BlockKeys, pages: Sequence[int], **fields: Any) -> pb.Store:
        """A chain of blocks under the first number of the loan, unless `fields` say otherwise."""
        request: dict[str, Any] = {
            "loan": 1, "keys": keys.packed, "parents": keys.parents(NO_PARENT), "pages": pages,
            "payload_bytes": self.fingerprint.payload_bytes(),
        }  # fmt: skip
        return pb.Store(**(request | fields))

    def store(self, keys: BlockKeys, pages: Sequence[int], **fields: Any) -> list[int]:
        """The statuses of blocks whose durability is known at once."""
        response = self.ask(store=self.store_of(keys, pages, **fields))
        assert response.HasField("store") and response.store.final, response
        return list(response.store.statuses)

    def end_stream(self) -> None:
        if self._channel is not None:
            self._outbox.put(None)
            self._channel.close()
            self._channel = None

    def close(self) -> None:
        self.end_stream()
        self.connection.close()
        if self.staging_fd >= 0:
            os.close(self.staging_fd)
            self.staging_fd = -1

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect_seqpacket(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(TIMEOUT_S)
    connection.connect(str(path))
    return connection


def as_user(uid: int, action: Callable[[], Result]) -> Result:
    """Run `action` in a forked child under another uid and gid; it must use no gRPC. Needs root."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            try:
                result: Any = action()
            except BaseException as error:
                result = error
            os.write(writing, pickle.dumps(result))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    os.waitpid(pid, 0)
    answer = pickle.loads(data)
    if isinstance(answer, BaseException):
        raise answer
    return answer  # type: ignore[no-any-return]
