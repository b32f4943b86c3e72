"""The streams of the daemon's test double: gRPC's, and direct ones."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING

import grpc

from kvstore_proto.framing import Frames, frame
from kvstore_proto.v1 import handshake_pb2 as hs
from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstore_proto.v1 import kvstore_pb2_grpc

if TYPE_CHECKING:
    from tests.reference.fake_daemon import Client, FakeDaemon


class GrpcStreams(kvstore_pb2_grpc.KVStoreServicer):
    def __init__(self, daemon: FakeDaemon) -> None:
        self._daemon = daemon

    def Session(self, requests, context):  # type: ignore[no-untyped-def]  # noqa: N802
        token = dict(context.invocation_metadata()).get("kvstored-session-bin")
        client = self._daemon.clients.get(token)
        if client is None:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "unknown session")
        self._daemon.opened(context.cancel)
        for request in requests:
            yield from self._daemon.answers(client, request)


def grant_direct_stream(daemon: FakeDaemon, client: Client, connection: socket.socket) -> None:
    ours, theirs = socket.socketpair()
    socket.send_fds(
        connection, [hs.DaemonPacket(direct_stream=hs.DirectStreamGrant()).SerializeToString()], [theirs.fileno()]
    )
    theirs.close()

    def end() -> None:
        with contextlib.suppress(OSError):
            ours.shutdown(socket.SHUT_RDWR)

    daemon.opened(end)
    threading.Thread(target=_serve, args=(daemon, client, ours), daemon=True).start()


def _serve(daemon: FakeDaemon, client: Client, stream: socket.socket) -> None:
    frames = Frames(1 << 22)
    with stream, contextlib.suppress(OSError):
        while data := stream.recv(1 << 18):
            frames.feed(data)
            while (message := frames.take()) is not None:
                for response in daemon.answers(client, pb.Request.FromString(message)):
                    stream.sendall(frame(response.SerializeToString()))
