"""The handshake connection as the anchor of leases: whether it stands can be asked at any time, from any thread."""

from __future__ import annotations

import select
import socket

import pytest

from kvstore_client.handshake import Handshake
from kvstore_proto.v1 import handshake_pb2 as hs


def test_a_connection_that_another_thread_closes_while_it_is_asked_for_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    handshake = Handshake(ours, hs.Welcome(), -1)
    assert handshake.is_alive()
    poll = select.poll

    def poll_beside_close() -> select.poll:
        handshake.close()
        return poll()

    monkeypatch.setattr(select, "poll", poll_beside_close)
    assert not handshake.is_alive()
    assert not handshake.is_alive()
    theirs.close()


def test_a_connection_ends_with_either_side() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    handshake = Handshake(ours, hs.Welcome(), -1)
    theirs.close()
    assert not handshake.is_alive()
    handshake.close()
    assert not handshake.is_alive()
