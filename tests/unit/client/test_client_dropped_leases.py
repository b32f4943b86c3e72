"""A lease that was dropped without release is given back: not before the last view of its blocks is gone, and once."""

from __future__ import annotations

import gc
import os
import signal

import numpy as np
import pytest

from kvstore_client import Session
from kvstore_client.call import Call
from kvstore_client.stream import RequestStream
from kvstore_proto.v1 import kvstore_pb2 as wire
from tests.reference.fake_daemon import FakeDaemon, eventually
from tests.reference.twelve_blocks import PAYLOADS, TOKENS


def held(daemon: FakeDaemon) -> int:
    return sum(len(client.leases) for client in daemon.clients.values())


def test_what_nobody_released_is_given_back(daemon: FakeDaemon, session: Session) -> None:
    session.put(TOKENS, payloads=PAYLOADS)
    for _ in range(5):
        assert len(session.get(TOKENS)) == 12
    gc.collect()
    session.ping()
    eventually(lambda: held(daemon) == 0)
    assert len(daemon.released) == len(set(daemon.released)) == 5


def test_a_view_alone_keeps_the_lease(daemon: FakeDaemon, session: Session) -> None:
    session.put(TOKENS, payloads=PAYLOADS)
    view = session.get(TOKENS).payload(3)[8:].view(np.uint16)[::2]
    gc.collect()
    session.ping()
    session.touch(TOKENS)
    assert held(daemon) == 1 and not view.flags.writeable
    assert np.array_equal(view, PAYLOADS[3].view(np.uint8)[8:].view(np.uint16)[::2])
    del view
    gc.collect()
    session.ping()
    eventually(lambda: held(daemon) == 0)


def test_a_released_lease_is_released_once(daemon: FakeDaemon, session: Session) -> None:
    session.put(TOKENS, payloads=PAYLOADS)
    with session.get(TOKENS) as lease:
        assert len(lease) == 12
    del lease
    gc.collect()
    session.ping()
    eventually(lambda: held(daemon) == 0)
    assert len(daemon.released) == len(set(daemon.released))


def test_a_forked_child_gives_back_nothing_of_its_parent(daemon: FakeDaemon, session: Session) -> None:
    session.put(TOKENS, payloads=PAYLOADS)
    lease, other = session.get(TOKENS), session.get(TOKENS)
    assert session.daemon is not None
    with session.daemon._succession:  # as another thread may hold it, which is not in the child
        child = os.fork()
        if not child:
            signal.alarm(10)
            other.release()
    if not child:
        from kvstore_client.anchors import _dropped

        del lease
        gc.collect()
        os._exit(len(_dropped))
    assert os.waitpid(child, 0)[1] == 0
    assert lease.valid and other.valid and held(daemon) == 2
    lease.release()


def test_what_was_just_given_back_counts_no_more(daemon: FakeDaemon, session: Session) -> None:
    session.put(TOKENS, payloads=PAYLOADS)
    daemon.knobs.leases_per_client = 1
    for _ in range(20):
        with session.get(TOKENS) as lease:
            assert len(lease) == 12, lease.reason
            assert session.get(TOKENS).reason == "throttled"
        del lease
    for _ in range(20):
        assert len(session.get(TOKENS)) == 12, "dropped"


def test_a_release_that_is_sent_behind_a_get_and_confirmed_before_its_answer_is_read(
    daemon: FakeDaemon, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.put(TOKENS, payloads=PAYLOADS)
    daemon.knobs.leases_per_client = 1
    submit, orders = RequestStream.submit, []

    def submit_and_wait(stream: RequestStream, request: wire.Request) -> Call:
        call = submit(stream, request)
        if request.HasField("acquire"):
            stream.send_releases()
            eventually(lambda: call.is_answered() and not stream._releases)
            orders.append(request.request_id)
        return call

    session.get(TOKENS).release()
    monkeypatch.setattr(RequestStream, "submit", submit_and_wait)
    assert len(session.get(TOKENS)) == 12
    assert len(orders) == 2, "the first was judged before the release"
