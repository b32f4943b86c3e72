"""The daemon's side of a direct stream: answers in turns, keeps back what is not read, and ends with its session."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.framing import Frames, frame
from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstored.completions import CompletionQueue
from kvstored.rpc import direct_stream
from kvstored.rpc.direct_stream import TURN_NS, DirectStreams
from kvstored.rpc.requests import StreamServices

LIMIT = 4096
PATIENCE_S = 60


class Scene:
    """A session with a stream; time passes only as the test says."""

    def __init__(self) -> None:
        self.session: Any = SimpleNamespace(session_id=1, closed=False, on_close=[], in_flight=0, client_name="test")
        self.begun: list[int] = []
        self.undelivered: list[pb.Response] = []
        self.now_ns = 0
        self.request_ns = 0
        self.may_answer = asyncio.Event()
        self.payload = b""
        self.quick: pb.Response | None = None
        self.on_begin: Callable[[], None] = lambda: None
        quick = dict.fromkeys(("ping", "acquire"), self._quick)
        verbs: Any = SimpleNamespace(quick=quick, slow={"acquire": self._slow}, undelivered=self._undelivered)
        latencies: Any = SimpleNamespace(add=lambda op, ns: None)
        clock: Any = SimpleNamespace(monotonic_ns=lambda: self.now_ns)
        pressure: Any = SimpleNamespace(measure=lambda *_: (None, 0), begin=lambda *_: None, end=lambda *_: None)
        self.completions = CompletionQueue(asyncio.get_running_loop())
        self.streams = DirectStreams(StreamServices(verbs, 8, pressure, latencies, clock, self.completions), LIMIT)
        self.client = self.open()

    def open(self) -> Client:
        return Client(self.streams.open(self.session))

    def _quick(self, session: object, request: pb.Request) -> pb.Response | None:
        self.begun.append(request.request_id)
        self.on_begin()
        self.now_ns += self.request_ns
        if self.quick is not None:
            return self.quick
        return pb.Response(ping=pb.PingReply(payload=self.payload)) if request.HasField("ping") else None

    def _slow(self, session: object, request: pb.Request) -> AsyncGenerator[pb.Response, None]:
        return self._answers()

    async def _answers(self) -> AsyncGenerator[pb.Response, None]:
        await self.may_answer.wait()
        yield pb.Response(acquire=pb.AcquireReply(lease_id=7))

    def _undelivered(self, session: object, reply: pb.Response) -> None:
        self.undelivered.append(reply)

    def close(self) -> None:
        self.session.closed = True
        actions, self.session.on_close = self.session.on_close, []
        for action in actions:
            action()


class Client:
    def __init__(self, descriptor: int) -> None:
        self.socket = socket.socket(fileno=descriptor)
        self.socket.setblocking(False)
        self._frames = Frames(1 << 22)

    async def send(self, *requests: pb.Request) -> None:
        await self.send_bytes(b"".join(frame(request.SerializeToString()) for request in requests))

    async def send_bytes(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.socket, data)

    def read_now(self) -> None:
        """All that has come, at once: then the daemon's side can write all that it has."""
        with contextlib.suppress(BlockingIOError):
            while data := self.socket.recv(1 << 20):
                self._frames.feed(data)

    @property
    def has_answer(self) -> bool:
        return len(self._frames) > 0

    async def answer(self) -> pb.Response | None:
        """The next one; None at the end of the stream."""
        while (message := self._frames.take()) is None:
            data = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self.socket, 65536), PATIENCE_S)
            if not data:
                return None
            self._frames.feed(data)
        return pb.Response.FromString(message)


def ping(request_id: int) -> pb.Request:
    return pb.Request(request_id=request_id, ping=pb.Ping())


def acquire(request_id: int) -> pb.Request:
    return pb.Request(request_id=request_id, acquire=pb.Acquire())


def run(scenario: Callable[[Scene], Awaitable[None]]) -> None:
    failures: list[dict[str, Any]] = []

    async def whole() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
        scene = Scene()
        with contextlib.closing(scene.client.socket):
            await scenario(scene)
            scene.close()
            await scene.streams.close()

    asyncio.run(whole())
    assert not failures


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0)


def test_later_work_of_a_request_follows_its_answer_in_the_same_turn() -> None:
    async def scenario(scene: Scene) -> None:
        seen: list[tuple[bool, int]] = []

        def note() -> None:
            scene.client.read_now()
            seen.append((scene.client.has_answer, turns))

        scene.on_begin = lambda: scene.completions.later(lambda: scene.completions.later(note))
        turns = 0
        await scene.client.send(ping(1))
        while not scene.begun:
            turns += 1
            await asyncio.sleep(0)
        assert seen == [(True, turns)], "no turn of the loop came between the request and its later work"

    run(scenario)


def test_requests_are_answered_by_number_and_slow_ones_when_they_are_done() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.client.send(acquire(1), ping(2), ping(3))
        for number in (2, 3):
            answer = await scene.client.answer()
            assert answer is not None and answer.request_id == number and answer.HasField("ping")
        assert scene.session.in_flight == 1
        scene.may_answer.set()
        answer = await scene.client.answer()
        assert answer is not None and (answer.request_id, answer.acquire.lease_id) == (1, 7)
        await until(lambda: scene.session.in_flight == 0)
        assert scene.undelivered == []

    run(scenario)


def test_a_request_in_two_pieces_is_one() -> None:
    async def scenario(scene: Scene) -> None:
        data = frame(ping(5).SerializeToString())
        await scene.client.send_bytes(data[:3])
        for _ in range(10):
            await asyncio.sleep(0)
        assert scene.begun == []
        await scene.client.send_bytes(data[3:])
        answer = await scene.client.answer()
        assert answer is not None and answer.request_id == 5

    run(scenario)


def test_a_turn_ends_and_others_get_theirs_before_it_is_ours_again() -> None:
    async def scenario(scene: Scene) -> None:
        scene.request_ns = TURN_NS // 4
        other = Scene()
        with contextlib.closing(other.client.socket):
            await scene.client.send(*map(ping, range(1, 101)))
            await other.client.send(ping(1))
            await until(lambda: bool(other.begun))
            assert len(scene.begun) <= 12, "two turns and what was begun before"
            await until(lambda: len(scene.begun) == 100)
            assert scene.begun == list(range(1, 101))
            other.close()

    run(scenario)


def test_nothing_is_begun_for_a_client_that_does_not_read_until_it_reads() -> None:
    async def scenario(scene: Scene) -> None:
        scene.payload = bytes(50_000)
        sending = asyncio.create_task(scene.client.send(*map(ping, range(1, 201))))
        for _ in range(2000):
            await asyncio.sleep(0)
        begun = len(scene.begun)
        assert 0 < begun < 20, "what the socket and the buffer hold"
        for number in range(1, 201):
            answer = await scene.client.answer()
            assert answer is not None and answer.request_id == number
        await sending

    run(scenario)


def test_a_slow_answer_waits_for_room_too_and_is_undelivered_when_the_client_leaves_instead() -> None:
    async def scenario(scene: Scene) -> None:
        scene.payload = bytes(50_000)
        await scene.client.send(acquire(1), *map(ping, range(2, 40)))
        await until(lambda: len(scene.begun) > 3)
        for _ in range(100):
            await asyncio.sleep(0)
        scene.may_answer.set()
        for _ in range(100):
            await asyncio.sleep(0)
        assert scene.undelivered == [] and scene.session.in_flight == 1
        scene.client.socket.close()
        await until(lambda: scene.session.in_flight == 0)
        assert [reply.acquire.lease_id for reply in scene.undelivered] == [7]

    run(scenario)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (frame(bytes(LIMIT + 1)), pb.ERROR_KIND_TOO_LARGE),
        (frame(b"\xff\xff\xff"), pb.ERROR_KIND_INVALID),
    ],
)
def test_a_stream_that_cannot_be_read_receives_the_reason_and_ends(data: bytes, kind: int) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.client.send(ping(1))
        await scene.client.send_bytes(data)
        await scene.client.send(ping(2))
        first, last = await scene.client.answer(), await scene.client.answer()
        assert first is not None and first.request_id == 1
        assert last is not None and last.request_id == 0 and last.error.kind == kind
        with contextlib.suppress(ConnectionResetError):  # what it had not read
            assert await scene.client.answer() is None
        assert scene.begun == [1]
        await until(lambda: scene.session.on_close == [])

    run(scenario)


def test_a_stream_ends_with_its_session_after_what_was_answered() -> None:
    async def scenario(scene: Scene) -> None:
        scene.payload = bytes(50_000)
        await scene.client.send(*map(ping, range(1, 40)), acquire(40))
        await until(lambda: len(scene.begun) > 3)
        for _ in range(100):
            await asyncio.sleep(0)
        begun = len(scene.begun)
        scene.close()
        answers = 0
        with contextlib.suppress(ConnectionResetError):
            while await scene.client.answer() is not None:
                answers += 1
        assert answers == begun == len(scene.begun)

    run(scenario)


def test_a_client_that_does_not_read_cannot_keep_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_stream, "LAST_REPLY_S", 0.01)

    async def scenario(scene: Scene) -> None:
        scene.payload = bytes(50_000)
        await scene.client.send(acquire(1), *map(ping, range(2, 40)))
        await until(lambda: len(scene.begun) > 3)
        scene.close()
        await until(lambda: scene.session.in_flight == 0)  # its end was reported to the waiting task
        assert not scene.streams._of_session

    run(scenario)


def test_a_client_that_reads_the_rest_in_time_leaves_no_alarm_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_stream, "LAST_REPLY_S", 0.05)

    async def scenario(scene: Scene) -> None:
        scene.payload = bytes(50_000)
        await scene.client.send(*map(ping, range(1, 40)))
        await until(lambda: len(scene.begun) > 3)
        scene.close()
        with contextlib.suppress(ConnectionResetError):
            while await scene.client.answer() is not None:
                pass
        await scene.streams.close()
        await asyncio.sleep(0.1)  # past the alarm, which would call the loop's exception handler

    run(scenario)


def test_a_stream_that_breaks_off_when_its_client_reads_again_ends_once() -> None:
    async def scenario(scene: Scene) -> None:
        scene.payload = bytes(50_000)
        await scene.client.send(*map(ping, range(1, 9)))
        await scene.client.send_bytes(frame(b"\xff\xff\xff"))
        for _ in range(100):
            await asyncio.sleep(0)
        scene.client.read_now()
        last = None
        with contextlib.suppress(ConnectionResetError):
            while (answer := await scene.client.answer()) is not None:
                last = answer
        assert last is not None and last.error.kind == pb.ERROR_KIND_INVALID
        await until(lambda: not scene.streams._of_session)

    run(scenario)


def test_a_lease_of_an_answer_at_once_is_taken_back_when_its_client_has_gone() -> None:
    async def scenario(scene: Scene) -> None:
        scene.quick = pb.Response(acquire=pb.AcquireReply(lease_id=9))
        await scene.client.send(acquire(1), acquire(2))
        scene.client.socket.close()
        await until(lambda: len(scene.begun) == 2)
        assert [reply.acquire.lease_id for reply in scene.undelivered] == [9, 9]

    run(scenario)


def test_the_stream_before_keeps_nothing_once_another_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_stream, "LAST_REPLY_S", 10 * PATIENCE_S)

    async def scenario(scene: Scene) -> None:
        scene.payload = bytes(50_000)
        await scene.client.send(acquire(1), *map(ping, range(2, 40)))
        await until(lambda: len(scene.begun) > 3)
        again = scene.open()
        with contextlib.closing(again.socket):
            await until(lambda: scene.session.in_flight == 0)
            assert len(scene.session.on_close) == 1 and len(scene.streams._of_session) == 1
        await until(lambda: not scene.streams._of_session)

    run(scenario)


def test_a_session_has_one_stream_and_the_new_one_serves() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.client.send(ping(1))
        assert (await scene.client.answer()) is not None
        again = scene.open()
        with contextlib.closing(again.socket):
            assert await scene.client.answer() is None
            await again.send(ping(2))
            answer = await again.answer()
            assert answer is not None and answer.request_id == 2
            assert len(scene.session.on_close) == 1

    run(scenario)


def test_a_session_that_ends_before_its_stream_is_connected_leaves_nothing() -> None:
    async def scenario(scene: Scene) -> None:
        scene.close()
        assert await scene.client.answer() is None
        await until(lambda: not scene.streams._of_session)

    run(scenario)


def test_out_of_descriptors_is_an_error_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(24, os.strerror(24))

    async def scenario(scene: Scene) -> None:
        monkeypatch.setattr(socket, "socketpair", fail)
        with pytest.raises(KVStoreError, match="Too many open files") as caught:
            scene.open()
        assert caught.value.kind is ErrorKind.UNAVAILABLE
        await scene.client.send(ping(1))
        assert await scene.client.answer() is not None, "the stream of before stands"

    run(scenario)
