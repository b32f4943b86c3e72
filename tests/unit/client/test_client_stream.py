"""One stream, many threads: a waiting thread reads for all of them; answers without a waiting thread are read too."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore_client.call import Call, CallStream
from kvstore_client.stream import RequestStream
from kvstore_client.transport.direct import DirectTransport
from kvstore_proto.framing import Frames, frame
from kvstore_proto.v1 import kvstore_pb2 as wire
from tests.reference.fake_daemon import eventually

PATIENCE_S = 60.0


class Far:
    """The other end of a direct stream, in the test's hands; implements `Health`."""

    def __init__(self) -> None:
        ours, self.socket = socket.socketpair()
        self.socket.settimeout(PATIENCE_S)
        self._frames = Frames(1 << 22)
        self.ends: list[str] = []
        self.unreleased: deque[int] = deque()
        self.stream = RequestStream(DirectTransport(ours), self, self.unreleased)

    def answered(self) -> None:
        pass

    def timed_out(self) -> None:
        pass

    def stream_ended(self, reason: str) -> None:
        self.ends.append(reason)

    def session_ended(self, stream: CallStream, reason: str) -> None:
        raise AssertionError(reason)

    def request(self) -> wire.Request:
        while (message := self._frames.take()) is None:
            data = self.socket.recv(65536)
            assert data, "the client has ended the stream"
            self._frames.feed(data)
        return wire.Request.FromString(message)

    def answer(self, *responses: wire.Response) -> None:
        self.socket.sendall(b"".join(frame(response.SerializeToString()) for response in responses))

    def ping(self, payload: bytes = b"") -> Call:
        return self.stream.submit(wire.Request(ping=wire.Ping(payload=payload)))


@pytest.fixture
def far() -> Iterator[Far]:
    far = Far()
    yield far
    far.stream.close()
    far.socket.close()


def pong(request_id: int, payload: bytes = b"") -> wire.Response:
    return wire.Response(request_id=request_id, ping=wire.PingReply(payload=payload))


def beside(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def is_being_read(far: Far) -> bool:
    return far.stream._transport._reading.locked()  # type: ignore[attr-defined]


def looks_of_the_attendant(far: Far, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return for each time that the attendant goes to sleep from now on whether data would wake it."""
    transport = far.stream._transport
    assert isinstance(transport, DirectTransport)
    looks: list[bool] = []
    events = transport._events

    def noting(attends: bool) -> int:
        looks.append(attends)
        return events(attends)

    monkeypatch.setattr(transport, "_events", noting)
    return looks


def test_who_waits_reads_the_answers_of_others_too(far: Far) -> None:
    first, second = far.ping(), far.ping()
    far.answer(pong(second.request_id, b"2"), pong(first.request_id, b"1"))
    answered = first.wait(PATIENCE_S)
    assert answered is not None and answered.ping.payload == b"1"
    assert second.is_answered()
    answered = second.wait(0.0)
    assert answered is not None and answered.ping.payload == b"2"


def test_a_wait_of_nothing_takes_what_has_come(far: Far) -> None:
    call = far.ping()
    assert call.wait(0.0) is None
    far.answer(pong(call.request_id))
    assert call.wait(0.0) is not None


def test_an_acquire_that_is_given_up_is_ended_and_who_waits_for_it_goes_on(far: Far) -> None:
    call = far.stream.submit(wire.Request(acquire=wire.Acquire(order=wire.ACQUIRE_ORDER_FRONT)))
    assert far.request().request_id == call.request_id
    late: list[int] = []
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(call.wait, PATIENCE_S)
        eventually(lambda: is_being_read(far))
        call.cancel(lambda response: late.append(response.acquire.lease_id))
        assert list(far.request().release.request_ids) == [call.request_id]
        far.answer(
            wire.Response(request_id=call.request_id, acquire=wire.AcquireReply(lease_id=7, more=True)),
            wire.Response(request_id=call.request_id, acquire=wire.AcquireReply()),
        )
        answered = waiting.result(PATIENCE_S)
    assert answered is not None and not answered.acquire.more
    assert late == [7, 0]
    call.cancel(lambda response: None)
    far.ping()
    assert far.request().HasField("ping"), "what has ended is not ended again"


def test_when_the_reader_leaves_one_who_waits_reads_on(far: Far) -> None:
    """Three wait; the reader is answered first, then the other two."""
    calls = [far.ping() for _ in range(3)]
    answered: dict[int, bool] = {}

    def wait(call: Call) -> None:
        answered[call.request_id] = call.wait(PATIENCE_S) is not None

    reader = beside(lambda: wait(calls[0]))
    eventually(lambda: is_being_read(far))
    others = [beside(lambda call=call: wait(call)) for call in calls[1:]]
    eventually(lambda: len(far.stream._followers) == 2)
    far.answer(pong(calls[0].request_id))
    reader.join(PATIENCE_S)
    for call, other in zip(calls[1:], others, strict=True):
        far.answer(pong(call.request_id))
        other.join(PATIENCE_S)
    assert answered == dict.fromkeys([call.request_id for call in calls], True)
    assert not far.stream._followers and not is_being_read(far)


def test_who_is_answered_before_it_can_sleep_does_not_sleep(far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread reads, and takes in the answer just as the caller has found that it need not read itself."""
    call = far.ping()

    def read_by_another(is_done: Callable[[], bool], deadline: float) -> bool:
        if not is_done():
            far.stream.received(pong(call.request_id))
        return False

    monkeypatch.setattr(far.stream._transport, "read_until", read_by_another)
    monkeypatch.setattr(Call, "sleep", lambda call, timeout_s: pytest.fail("it slept"))
    assert call.wait(PATIENCE_S) is not None


def test_when_the_readers_time_is_up_one_who_waits_reads_on(far: Far) -> None:
    slow, call = far.ping(), far.ping()
    reader = beside(lambda: slow.wait(0.05))
    eventually(lambda: is_being_read(far))
    answered: list[wire.Response | None] = []
    other = beside(lambda: answered.append(call.wait(PATIENCE_S)))
    reader.join(PATIENCE_S)
    far.answer(pong(call.request_id))
    other.join(PATIENCE_S)
    assert answered[0] is not None


def test_an_abandoned_calls_answer_is_read_though_no_caller_waits(far: Far) -> None:
    call, came = far.ping(), []
    call.abandon(came.append)
    far.answer(pong(call.request_id, b"late"))
    eventually(lambda: bool(came))
    assert came[0].ping.payload == b"late"
    eventually(lambda: not far.stream.awaits_late_answers)


def test_an_abandoned_calls_answer_is_read_after_a_reader_has_left(far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = looks_of_the_attendant(far, monkeypatch)
    call, read, came = far.ping(), far.ping(), []
    reader = beside(lambda: read.wait(PATIENCE_S))
    eventually(lambda: is_being_read(far))
    call.abandon(came.append)
    eventually(lambda: looks == [False])
    far.answer(pong(read.request_id))
    reader.join(PATIENCE_S)
    far.answer(pong(call.request_id))
    eventually(lambda: bool(came))


def test_an_answer_that_was_read_before_its_call_was_abandoned_is_handed_over(far: Far) -> None:
    call, read, came = far.ping(), far.ping(), []
    far.answer(pong(call.request_id), pong(read.request_id))
    assert read.wait(PATIENCE_S) is not None
    call.abandon(came.append)
    assert came and not far.stream.awaits_late_answers


def test_a_store_that_is_answered_twice_is_waited_for_twice(far: Far) -> None:
    call = far.stream.submit(wire.Request(store=wire.Store(loan=1)))
    pending = wire.StoreReply(statuses=b"\1", durability=bytes([wire.DURABILITY_PENDING]))
    durable = wire.StoreReply(statuses=b"\1", durability=bytes([wire.DURABILITY_DURABLE]), final=True)
    for reply in (pending, durable):
        far.answer(wire.Response(request_id=call.request_id, store=reply))
        answered = call.wait(PATIENCE_S)
        assert answered is not None and answered.store == reply


def test_an_end_is_noticed_though_no_caller_waits_and_reported_once(far: Far) -> None:
    far.socket.close()
    eventually(lambda: bool(far.ends))
    answered = far.ping().wait(PATIENCE_S)
    assert answered is not None and answered.error.kind == wire.ERROR_KIND_UNAVAILABLE
    assert far.ends == ["the daemon ended the stream"]


def test_an_end_reaches_everybody_who_waits_once(far: Far) -> None:
    with ThreadPoolExecutor(8) as threads:
        waiting = [threads.submit(far.ping().wait, PATIENCE_S) for _ in range(8)]
        eventually(lambda: len(far.stream._followers) == 7)
        far.socket.close()
        for future in waiting:
            answered = future.result(PATIENCE_S)
            assert answered is not None and answered.error.kind == wire.ERROR_KIND_UNAVAILABLE
    eventually(lambda: bool(far.ends))
    assert len(far.ends) == 1


def test_the_daemons_last_words_are_why_a_stream_ended(far: Far) -> None:
    error = wire.Error(kind=wire.ERROR_KIND_TOO_LARGE, message="a message of 9 bytes, more than 8")
    far.answer(wire.Response(error=error))
    far.socket.close()
    eventually(lambda: far.ends == [error.message])


def test_what_is_no_message_ends_the_stream(far: Far) -> None:
    far.socket.sendall(frame(b"\xff\xff\xff"))
    far.socket.shutdown(socket.SHUT_WR)
    eventually(lambda: bool(far.ends))
    assert "cannot be read" in far.ends[0]


def test_a_forked_child_takes_nothing_of_its_parents_stream(far: Far) -> None:
    call = far.ping()
    far.answer(pong(call.request_id, b"the parent's"))
    with far.stream._lock, far.stream._releasing, far.stream._transport._lock:  # type: ignore[attr-defined]
        pid = os.fork()  # as another thread may hold them, which is not in the child
        if pid == 0:
            signal.alarm(10)
            stolen, refused = call.wait(0.05), far.ping().wait(0.05)
            call.cancel(lambda _: None)
            call.expire()
            far.stream.release([7])
            is_free = not far.stream.send_releases()
            os._exit(0 if stolen is None and refused is not None and refused.HasField("error") and is_free else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    answered = call.wait(PATIENCE_S)
    assert answered is not None and answered.ping.payload == b"the parent's"
    assert far.request().request_id == call.request_id
    far.ping(b"after")
    assert far.request().ping.payload == b"after", "nothing of the child's was sent"


def test_an_interrupted_reader_ends_the_stream_and_no_caller_waits_in_vain(far: Far) -> None:
    class Interrupted(BaseException):
        pass

    def interrupt(_: wire.Response) -> None:
        raise Interrupted

    abandoned, call, other = far.ping(), far.ping(), far.ping()
    reader = beside(lambda: other.wait(PATIENCE_S))
    eventually(lambda: is_being_read(far))
    reader_gone: list[bool] = []
    abandoned.abandon(interrupt)
    excepted = threading.excepthook
    threading.excepthook = lambda args: reader_gone.append(args.exc_type is Interrupted)
    try:
        far.answer(pong(abandoned.request_id), pong(call.request_id))
        reader.join(PATIENCE_S)
    finally:
        threading.excepthook = excepted
    assert reader_gone == [True]
    answered = call.wait(PATIENCE_S)
    assert answered is not None and answered.error.message == "reading the stream was interrupted"
    assert far.ends == ["reading the stream was interrupted"]
    eventually(lambda: not is_being_read(far))


def test_the_second_answer_of_an_abandoned_store_is_read_though_the_first_had_come(far: Far) -> None:
    call, came = far.stream.submit(wire.Request(store=wire.Store(loan=1))), []
    pending = wire.StoreReply(statuses=b"\1", durability=bytes([wire.DURABILITY_PENDING]))
    read = far.ping()
    far.answer(wire.Response(request_id=call.request_id, store=pending), pong(read.request_id))
    assert read.wait(PATIENCE_S) is not None
    call.abandon(came.append)
    assert len(came) == 1
    far.answer(wire.Response(request_id=call.request_id, store=wire.StoreReply(final=True)))
    eventually(lambda: len(came) == 2)


def test_closing_ends_waiting_calls_and_reports_no_end(far: Far) -> None:
    answered: list[wire.Response | None] = []
    call = far.ping()
    reader = beside(lambda: answered.append(call.wait(PATIENCE_S)))
    eventually(lambda: is_being_read(far))
    far.stream.close()
    reader.join(PATIENCE_S)
    assert answered[0] is not None and answered[0].error.message == "the session was closed"
    eventually(lambda: far.stream._transport._socket.fileno() < 0)  # type: ignore[attr-defined]
    assert far.ends == []
    answered.append(far.ping().wait(0.0))
    assert answered[1] is not None and answered[1].HasField("error")
    far.stream.close()


def test_a_daemon_that_does_not_read_blocks_no_caller_and_receives_everything_in_order_later(far: Far) -> None:
    payload, calls = bytes(20_000), []
    for _ in range(100):  # ten times what a socket holds
        calls.append(far.ping(payload))
    for call in calls:
        request = far.request()
        assert request.request_id == call.request_id and request.ping.payload == payload


def test_releases_are_collected_and_sent_again_after_a_stream_that_did_not_confirm_them(
    far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore_client.stream.RELEASE_DELAY_S", 0.5)  # a busy machine may take 5 ms for one line
    far.stream.release([1])
    far.stream.release([2, 3])
    request = far.request()
    assert list(request.release.lease_ids) == [1, 2, 3]
    far.socket.close()
    eventually(lambda: list(far.unreleased) == [1, 2, 3])


def test_what_was_confirmed_is_not_sent_again(far: Far) -> None:
    far.stream.release([1])
    far.answer(wire.Response(request_id=far.request().request_id, release=wire.ReleaseReply(released=1)))
    far.socket.close()
    eventually(lambda: bool(far.ends))
    assert not far.unreleased


def test_a_delete_does_not_pass_leases_that_were_given_back_before_it(far: Far) -> None:
    for _ in range(50):
        far.stream.release([1])
        far.stream.submit(wire.Request(delete=wire.Delete()))
        assert far.request().HasField("release")
        assert far.request().HasField("delete")


def test_a_storm_of_threads_each_gets_its_own_answers(far: Far) -> None:
    """Answers come in any order, some never, some after their call was abandoned; threads come, wait and leave."""
    calls, threads, late = 200, 8, []
    rng = random.Random(7)
    total = calls * threads
    is_slow = {number: rng.random() < 0.1 for number in range(total)}

    def serve() -> None:
        held: list[wire.Response] = []
        with contextlib.suppress(OSError):
            for _ in range(total):
                request = far.request()
                number = int.from_bytes(request.ping.payload, "big")
                response = pong(request.request_id, request.ping.payload)
                if is_slow[number]:
                    held.append(response)
                    continue
                far.answer(response)
                if len(held) > 20:
                    far.answer(held.pop(rng.randrange(len(held))))
            far.answer(*held)

    def ask(thread: int) -> int:
        answered = 0
        for index in range(calls):
            payload = (thread * calls + index).to_bytes(4, "big")
            call = far.ping(payload)
            response = call.wait(0.002 if is_slow[thread * calls + index] else PATIENCE_S)
            if response is None:
                call.abandon(late.append)
            else:
                assert response.ping.payload == payload
                answered += 1
        return answered

    server = beside(serve)
    with ThreadPoolExecutor(threads) as pool:
        answered = sum(pool.map(ask, range(threads)))
    server.join(PATIENCE_S)
    eventually(lambda: answered + len(late) == total)
    assert late, "some were late"
    assert not far.stream._followers and not far.stream._waiting and not far.stream.awaits_late_answers


def test_the_attendant_sleeps_while_another_thread_reads(far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though an answer without a waiting caller is due, and data arrives."""
    rounds = looks_of_the_attendant(far, monkeypatch)
    call, other = far.ping(), far.ping()
    reader = beside(lambda: call.wait(PATIENCE_S))
    eventually(lambda: is_being_read(far))
    other.abandon()
    eventually(lambda: bool(rounds))
    for _ in range(100):
        seen = far.stream.message_bytes
        far.answer(pong(12345))
        eventually(lambda seen=seen: far.stream.message_bytes > seen)
    far.answer(pong(call.request_id), pong(other.request_id))
    reader.join(PATIENCE_S)
    assert rounds[0] is False and len(rounds) <= 3
