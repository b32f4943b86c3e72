"""Inputs that no honest client sends: messages made up field by field, bytes spoilt at random, and the wire below them.

Never judges what comes of them. The generator alone decides; a seed gives the same inputs again.
"""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from kvstore_proto.framing import frame
from kvstore_proto.v1 import handshake_pb2 as hs

TIMEOUT_S = 20.0
_DEEPEST = 4
_SIZES = (0, 1, 2, 15, 16, 17, 31, 32, 4096, 65536)
_NUMBERS = (0, 1, 2, 3, 255, 4095, 4096, 65536, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, (1 << 63) - 1, (1 << 64) - 1)
_BITS = {
    FieldDescriptor.TYPE_UINT32: (0, 32), FieldDescriptor.TYPE_FIXED32: (0, 32), FieldDescriptor.TYPE_UINT64: (0, 64),
    FieldDescriptor.TYPE_FIXED64: (0, 64), FieldDescriptor.TYPE_INT32: (1, 32), FieldDescriptor.TYPE_SINT32: (1, 32),
    FieldDescriptor.TYPE_INT64: (1, 64), FieldDescriptor.TYPE_SINT64: (1, 64),
}  # fmt: skip


class Inputs:
    """A source of hostile messages and bytes. `known` are byte strings that mean something to the daemon: keys, tokens,
    fingerprints, of one's own and of others."""

    def __init__(self, rng: random.Random, known: Sequence[bytes]) -> None:
        self._rng = rng
        self.known = list(known)

    def message(self, kind: type[Message], depth: int = 0) -> Message:
        """Return a message of the class `kind` with made-up fields, of a oneof a single one."""
        made, rng = kind(), self._rng
        chosen = {oneof.name: rng.choice(oneof.fields).name for oneof in kind.DESCRIPTOR.oneofs}
        for field in kind.DESCRIPTOR.fields:
            inside = field.containing_oneof
            if chosen[inside.name] != field.name if inside is not None else rng.random() < 0.4:
                continue
            with suppress(ValueError, TypeError):
                self._fill(made, field, depth)
        return made

    def spoilt(self, data: bytes) -> bytes:
        """Return `data` with some of its bytes changed, cut, doubled or put in."""
        rng, spoilt = self._rng, bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 8))):
            at = rng.randrange(len(spoilt) + 1)
            match rng.randrange(5):
                case 0 if at < len(spoilt):
                    spoilt[at] ^= 1 << rng.randrange(8)
                case 1:
                    del spoilt[at:]
                case 2:
                    spoilt[at:at] = rng.randbytes(rng.choice(_SIZES[:7]))
                case 3:
                    spoilt[at:at] = spoilt[at : at + 64]
                case _:
                    spoilt[at : at + 1] = b"\xff"
        return bytes(spoilt)

    def frames(self, messages: Sequence[bytes]) -> bytes:
        """Return `messages` as a direct stream has them, perhaps with a false length or a cut end."""
        stream = b"".join(map(frame, messages))
        match self._rng.randrange(8):
            case 0:
                return self._rng.choice((b"\xff\xff\xff\xff", b"\0\0\0\x80", b"\0\0\0\0")) + stream
            case 1:
                return stream[: self._rng.randrange(len(stream) + 1)]
            case 2:
                return self.spoilt(stream)
        return stream

    def _fill(self, made: Message, field: FieldDescriptor, depth: int) -> None:
        if field.is_repeated:
            values = getattr(made, field.name)
            for _ in range(self._rng.choice((0, 1, 2, 3, 40))):
                if field.message_type is None:
                    values.append(self._value(field))
                elif depth < _DEEPEST:
                    values.append(self.message(type(values.add()), depth + 1))
        elif field.message_type is None:
            setattr(made, field.name, self._value(field))
        elif depth < _DEEPEST:
            kind = type(getattr(made, field.name))
            getattr(made, field.name).CopyFrom(self.message(kind, depth + 1))
            getattr(made, field.name).SetInParent()

    def _value(self, field: FieldDescriptor) -> Any:
        rng = self._rng
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self._bytes()
        if field.type == FieldDescriptor.TYPE_STRING:
            return rng.choice(("", "x", "prompts", "victim", "\0", "../" * 9, "\N{PILE OF POO}" * 40, "a" * 5000))
        if field.type == FieldDescriptor.TYPE_BOOL:
            return rng.random() < 0.5
        if field.type == FieldDescriptor.TYPE_ENUM:
            return rng.choice((0, 1, 2, 3, 99))
        if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
            return rng.choice((0.0, 1.0, -1.0, 1e300, float("inf"), float("nan")))
        signed, bits = _BITS[field.type]
        number = rng.choice((*_NUMBERS, rng.randrange(1 << 12), rng.getrandbits(bits)))
        return number % (1 << (bits - signed)) * (rng.choice((1, 1, -1)) if signed else 1)

    def _bytes(self) -> bytes:
        rng = self._rng
        if self.known and rng.random() < 0.6:
            return b"".join(rng.choice(self.known) for _ in range(rng.choice((1, 1, 1, 3, 20))))
        return rng.randbytes(rng.choice(_SIZES))


class Caller:
    """One handshake connection at the sockets in `directory`, which sends what it is given. Descriptors that arrive are
    kept until `close`."""

    def __init__(self, directory: Path, hello: hs.Hello) -> None:
        self.connection = connect(directory / "handshake.sock", socket.SOCK_SEQPACKET)
        self.descriptors: list[int] = []
        self.stream: socket.socket | None = None
        self.first = self.ask(hs.ClientPacket(hello=hello).SerializeToString())
        self.welcome = self.first.welcome

    def ask(self, packet: bytes, descriptors: Sequence[int] = ()) -> hs.DaemonPacket:
        """Send a packet with descriptors, and return the daemon's answer. Raises OSError when there is none."""
        socket.send_fds(self.connection, [packet], descriptors)
        data, arrived, _, _ = socket.recv_fds(self.connection, 1 << 17, 4)
        self.descriptors += arrived
        if not data:
            raise ConnectionError("the daemon hung up")
        return hs.DaemonPacket.FromString(data)

    def arena(self, number: int, *, writable: bool = False) -> tuple[int, int] | None:
        """Return the descriptor and the size of an arena, or None when the daemon refuses it."""
        before = len(self.descriptors)
        request = hs.ArenaRequest(arena_id=number, writable=writable)
        reply = self.ask(hs.ClientPacket(arena=request).SerializeToString())
        return (self.descriptors[-1], reply.arena.size_bytes) if len(self.descriptors) > before else None

    def open_stream(self) -> socket.socket:
        """Return a new direct stream."""
        if self.stream is not None:
            self.stream.close()
        self.ask(hs.ClientPacket(direct_stream=hs.DirectStreamRequest()).SerializeToString())
        self.stream = socket.socket(fileno=self.descriptors.pop())
        self.stream.settimeout(TIMEOUT_S)
        return self.stream

    def close(self) -> None:
        for descriptor in self.descriptors:
            with suppress(OSError):
                os.close(descriptor)
        if self.stream is not None:
            self.stream.close()
        self.connection.close()

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(path: Path, kind: socket.SocketKind) -> socket.socket:
    """Return a socket that is connected to the Unix socket `path`."""
    connection = socket.socket(socket.AF_UNIX, kind)
    connection.settimeout(TIMEOUT_S)
    connection.connect(str(path))
    return connection
