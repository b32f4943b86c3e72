"""A client of the unary service as any language would write it: a channel, a stub, messages. No shared memory.

Owns one channel. Never retries, never hides an error of gRPC.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc

from kvstore_proto.fingerprint import Fingerprint
from kvstore_proto.token_ids import TokenIds
from kvstore_proto.v1 import unary_pb2 as pb
from kvstore_proto.v1 import unary_pb2_grpc

TIMEOUT_S = 20.0


class UnaryClient:
    """`token` is sent as a bearer token where it is given."""

    def __init__(self, channel: grpc.Channel, token: str | None = None) -> None:
        self.stub: Any = unary_pb2_grpc.KVStoreUnaryStub(channel)  # type: ignore[no-untyped-call]
        self._metadata = () if token is None else (("authorization", f"Bearer {token}"),)

    def ask(self, method: str, request: Any) -> Any:
        return getattr(self.stub, method)(request, timeout=TIMEOUT_S, metadata=self._metadata)

    def lookup(self, chain: pb.Chain, **fields: Any) -> pb.UnaryLookupReply:
        reply: pb.UnaryLookupReply = self.ask("Lookup", pb.UnaryLookupRequest(chain=chain, **fields))
        return reply

    def put(self, chain: pb.Chain, payloads: Sequence[Any], **fields: Any) -> pb.UnaryPutReply:
        raw = [bytes(payload) for payload in payloads]
        reply: pb.UnaryPutReply = self.ask("Put", pb.UnaryPutRequest(chain=chain, payloads=raw, **fields))
        return reply

    def get(self, chain: pb.Chain, **fields: Any) -> pb.UnaryGetReply:
        reply: pb.UnaryGetReply = self.ask("Get", pb.UnaryGetRequest(chain=chain, **fields))
        return reply

    def prefetch(self, chain: pb.Chain, **fields: Any) -> pb.UnaryPrefetchReply:
        reply: pb.UnaryPrefetchReply = self.ask("Prefetch", pb.UnaryPrefetchRequest(chain=chain, **fields))
        return reply

    def touch(self, chain: pb.Chain, **fields: Any) -> pb.UnaryTouchReply:
        reply: pb.UnaryTouchReply = self.ask("Touch", pb.UnaryTouchRequest(chain=chain, **fields))
        return reply

    def delete(self, chain: pb.Chain) -> pb.UnaryDeleteReply:
        reply: pb.UnaryDeleteReply = self.ask("Delete", pb.UnaryDeleteRequest(chain=chain))
        return reply


@contextmanager
def unary_client(
    target: str, token: str | None = None, credentials: grpc.ChannelCredentials | None = None
) -> Iterator[UnaryClient]:
    """A client with a connection of its own; `target` is "unix:PATH" or "host:port"."""
    options = (
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
    )
    channel = (
        grpc.insecure_channel(target, options=options)
        if credentials is None
        else grpc.secure_channel(target, credentials, options=options)
    )
    with channel:
        yield UnaryClient(channel, token)


def by_tokens(fingerprint: Fingerprint, tokens: TokenIds, **fields: Any) -> pb.Chain:
    return pb.Chain(fingerprint=fingerprint.canonical(), token_ids=[int(token) for token in tokens], **fields)


def names(statuses: Sequence[int]) -> list[str]:
    """Statuses of keys for people: ["STORED", "MISS"]."""
    return [pb.KeyStatus.Name(pb.KeyStatus.ValueType(status)).removeprefix("KEY_STATUS_") for status in statuses]
