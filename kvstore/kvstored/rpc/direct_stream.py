"""Direct streams: the messages of the gRPC stream on a connected socket, without gRPC.

A session asks for one on its handshake connection and gets one end of a socket pair: no other process can reach it, so
it needs no name and no token. A call costs a quarter of a gRPC call. The streams run on the control loop and never
block it: requests are handled for half a millisecond at a time, and none of a client that does not read its answers.
Invariants: a session has one direct stream at a time, which ends with it; requests begin in the order in which they
came.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import cast

from google.protobuf.message import DecodeError

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.framing import Frames, FrameTooLarge, frame
from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstored.clients.sessions import ClientSession
from kvstored.rpc.requests import LAST_REPLY_S, Requests, StreamOver, StreamServices, error_reply
from kvstored.sockets import refuse_descriptors

log = logging.getLogger(__name__)
TURN_NS = 500_000  # for the requests of one client, while others wait
READ_AHEAD_BYTES = 64 * 1024  # while it is not its turn; beyond, nothing more is read
CLOSING_POLL_S = 0.005


class DirectStreams:
    """The direct streams of all clients: requests and answers over a Unix socket pair, without gRPC. `message_bytes`
    bounds one request.
    """

    def __init__(self, answering: StreamServices, message_bytes: int) -> None:
        self._answering = answering
        self._message_bytes = message_bytes
        self._of_session: dict[int, _DirectStream] = {}
        self._connecting: set[asyncio.Task[object]] = set()

    def open(self, session: ClientSession) -> int:
        """Return the client's end of a new stream for `session`, a descriptor to be sent and then closed. The session's
        former stream ends. Raises KVStoreError if no stream can be made.
        """
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            raise KVStoreError(ErrorKind.UNAVAILABLE, f"no stream can be made: {error.strerror}") from None
        ours.setblocking(False)
        refuse_descriptors(ours)
        before = self._of_session.get(session.session_id)
        if before is not None:
            before.abort()  # its client has asked for another one, and reads this one no more
        stream = _DirectStream(session, self._answering, self._message_bytes, self._ended)
        self._of_session[session.session_id] = stream
        connecting = asyncio.get_running_loop().create_task(_connect(stream, ours))
        self._connecting.add(connecting)
        connecting.add_done_callback(self._connecting.discard)
        return theirs.detach()

    async def close(self) -> None:
        """End all streams after the pending answers are sent."""
        for stream in [*self._of_session.values()]:
            stream.end()
        while self._of_session:
            await asyncio.sleep(CLOSING_POLL_S)

    def _ended(self, session: ClientSession, stream: _DirectStream) -> None:
        if self._of_session.get(session.session_id) is stream:
            del self._of_session[session.session_id]


async def _connect(stream: _DirectStream, connected: socket.socket) -> None:
    try:
        await asyncio.get_running_loop().connect_accepted_socket(lambda: stream, connected)
    except OSError as error:
        log.warning("a stream could not be connected: %s", error)
        connected.close()
        stream.connection_lost(error)


class _DirectStream(asyncio.Protocol):
    """One stream: it cuts bytes into requests, begins them in turns, and keeps answers back while the client does not
    read.
    """

    def __init__(
        self,
        session: ClientSession,
        answering: StreamServices,
        message_bytes: int,
        on_end: Callable[[ClientSession, _DirectStream], None],
    ) -> None:
        self._session = session
        self._requests = Requests(session, answering, self._send)
        self._now_ns, self._completions = answering.clock.monotonic_ns, answering.completions
        self._frames = Frames(message_bytes)
        self._on_end = on_end
        self._transport: asyncio.Transport | None = None
        self._next_turn: asyncio.Handle | None = None
        self._time_is_up: asyncio.Handle | None = None
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._is_over = False
        session.on_close.append(self.end)

    # What the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._is_over:  # the session has ended meanwhile
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._frames.feed(data)
        if self._next_turn is None:
            self._take_turn()

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()
        if self._next_turn is None:  # not at once: asyncio is in the middle of writing
            self._next_turn = asyncio.get_running_loop().call_soon(self._take_turn)

    def eof_received(self) -> None:
        """Treat the client as gone, since it sends no more: the project's client never closes one direction alone."""
        self.end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_over = True
        self._may_write.set()  # end the tasks that wait to write
        self._requests.cancel()
        for handle in (self._next_turn, self._time_is_up):
            if handle is not None:
                handle.cancel()
        if not self._session.closed:
            self._session.on_close.remove(self.end)
        self._on_end(self._session, self)

    def end(self) -> None:
        """Begin nothing more, send the pending answers, and close."""
        self._is_over = True
        if self._transport is not None and self._time_is_up is None:
            self._time_is_up = asyncio.get_running_loop().call_later(LAST_REPLY_S, self._transport.abort)
            self._transport.close()

    def abort(self) -> None:
        """End the stream now; unsent answers are lost."""
        self._is_over = True
        if self._transport is not None:
            self._transport.abort()

    # Requests and answers

    def _take_turn(self) -> None:
        """Begin waiting requests for the length of one turn, and do the work that follows their answers; then other
        streams have their turn, and later this one again.
        """
        self._next_turn = None
        self._completions.hold_later()
        try:
            self._begin_requests()
        finally:
            self._completions.do_later()

    def _begin_requests(self) -> None:
        assert self._transport is not None
        turn_ends_ns = self._now_ns() + TURN_NS
        while self._may_write.is_set() and not self._is_over:
            request = self._take_request()
            if request is None:
                self._transport.resume_reading()
                return
            reply = self._requests.begin(request)
            if reply is not None:
                self._write(reply)
            if self._now_ns() >= turn_ends_ns and len(self._frames):  # else nothing waits for another turn
                self._next_turn = asyncio.get_running_loop().call_soon(self._take_turn)
                if len(self._frames) <= READ_AHEAD_BYTES:
                    return
                break
        self._transport.pause_reading()  # what has come already is enough

    def _take_request(self) -> pb.Request | None:
        try:
            message = self._frames.take()
            return None if message is None else pb.Request.FromString(message)
        except FrameTooLarge as error:
            self._break_off(ErrorKind.TOO_LARGE, str(error))
        except DecodeError:
            self._break_off(ErrorKind.INVALID, "not a request")
        return None

    def _break_off(self, kind: ErrorKind, reason: str) -> None:
        """End a stream that cannot be read any more, with the reason in an answer to no request."""
        log.info("the stream of %s is broken off: %s", self._session.client_name, reason)
        self._write(error_reply(KVStoreError(kind, reason)))
        self.end()

    async def _send(self, reply: pb.Response) -> None:
        try:
            while not self._may_write.is_set():
                await self._may_write.wait()
        except asyncio.CancelledError:
            self._requests.undelivered(reply)
            raise
        if not self._write(reply):
            raise StreamOver

    def _write(self, reply: pb.Response) -> bool:
        """Write an answer; return whether it will be sent, as far as is known now."""
        transport = self._transport
        assert transport is not None
        is_first = not transport.get_write_buffer_size()
        is_going = not transport.is_closing()
        if is_going:
            transport.write(frame(reply.SerializeToString()))
            is_going = not (is_first and transport.is_closing())  # asyncio says of a failure only that
        if not is_going:
            self._requests.undelivered(reply)
        return is_going
