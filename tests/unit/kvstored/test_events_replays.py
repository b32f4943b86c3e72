"""Replays that nobody reads: what they cost is bounded, and others are answered."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="msgspec (pip install '.[events]') is not installed")
pytest.importorskip("zmq", reason="pyzmq (pip install '.[events]') is not installed")

import zmq

from kvstored.events import worker
from kvstored.events.encoding import CopyPlace, encoder
from kvstored.events.endpoint import EventEndpoint, Sent
from kvstored.events.records import KindRecord
from kvstored.events.stream import EventStream
from kvstored.events.worker import END, GIVEN_UP_S, STALL_S, WAITING_A_PEER, Replays
from tests.reference.event_records import StoredBlock, changes_of
from tests.reference.running_daemon import eventually, free_port

TOPIC = b"kv@n.t@m"
BATCH_BLOCKS, BATCHES = 40, 24
TOKENS = bytes(range(256)) * 16  # of a block: a batch has some 200 KB of them


class Node:
    """A ROUTER with a stream of batches behind it, and a clock that is set."""

    def __init__(self, context: Any, address: str, most: int = 8) -> None:
        self.now_s = 0.0
        self.stream = EventStream([CopyPlace("CPU")], encoder("map"), BATCHES, lambda: 0.0)
        self.endpoint = EventEndpoint(context, zmq.ROUTER, address, most, 1000)
        self.replays = Replays(self.endpoint, self.stream, lambda: self.now_s)
        self.stream.apply([KindRecord(0, 1024, 0, TOPIC)])
        for number in range(BATCHES):
            self.store(number)

    def store(self, number: int) -> None:
        first = number * BATCH_BLOCKS
        blocks = [StoredBlock(row, 0, 1, row + 1, 0, TOKENS) for row in range(first, first + BATCH_BLOCKS)]
        self.stream.apply([changes_of(stored=blocks)])
        list(self.stream.batches())

    def turn(self) -> None:
        self.now_s += 0.1
        self.endpoint.look()
        self.replays.take()
        self.replays.go_on()

    def turns_until(self, condition: Callable[[], bool]) -> bool:
        def turned() -> bool:
            self.turn()
            return condition()

        return eventually(turned)


@pytest.fixture
def context() -> Iterator[Any]:
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def node(context: Any, tmp_path: Path) -> Node:
    return Node(context, f"ipc://{tmp_path}/r")


def asking(context: Any, tmp_path: Path, *, reads: bool) -> Any:
    peer = context.socket(zmq.DEALER)
    peer.linger = 0
    if not reads:
        peer.setsockopt(zmq.RCVHWM, 1)
        peer.setsockopt(zmq.RCVBUF, 4096)
    peer.connect(f"ipc://{tmp_path}/r")
    return peer


def ask(peer: Any, first: int = 0) -> None:
    peer.send_multipart((b"", first.to_bytes(8, "big")))


def numbers_read(node: Node, peer: Any) -> list[int]:
    """The batches of one answer, as they are sent."""
    found: list[int] = []

    def ended() -> bool:
        while peer.poll(0):
            _, _, number, payload = peer.recv_multipart()
            if number == END:
                assert not payload
                return True
            found.append(int.from_bytes(number, "big"))
        return False

    assert node.turns_until(ended)
    return found


def test_who_reads_gets_everything_in_order(node: Node, context: Any, tmp_path: Path) -> None:
    peer = asking(context, tmp_path, reads=True)
    ask(peer)
    assert numbers_read(node, peer) == list(range(BATCHES))
    assert node.turns_until(lambda: not node.replays.are_under_way)


def test_one_that_never_reads_costs_a_window_and_delays_nobody(node: Node, context: Any, tmp_path: Path) -> None:
    silent = asking(context, tmp_path, reads=False)
    for _ in range(100):
        ask(silent)
    assert node.turns_until(lambda: node.replays.held_bytes >= worker.WINDOW_BYTES)
    for _ in range(100):
        node.turn()
    largest_bytes = max(len(batch.payload) for batch in node.stream.replay(0))
    assert node.replays.held_bytes <= worker.WINDOW_BYTES + largest_bytes
    (peer,) = node.replays._peers.values()
    assert len(peer.waiting) <= WAITING_A_PEER, "of a hundred requests"
    honest = asking(context, tmp_path, reads=True)
    ask(honest)
    assert numbers_read(node, honest) == list(range(BATCHES))
    node.now_s += GIVEN_UP_S + 1
    assert node.turns_until(lambda: not node.replays.held_bytes and not node.replays.are_under_way), "it was cut off"


@pytest.mark.slow
def test_many_that_never_read_are_bounded_together(
    node: Node, context: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "MOST_BYTES", 3 << 20)
    silent = [asking(context, tmp_path, reads=False) for _ in range(7)]
    for each in silent:
        ask(each)
    assert node.turns_until(lambda: node.replays.held_bytes >= worker.MOST_BYTES)
    honest = asking(context, tmp_path, reads=True)
    ask(honest)
    for _ in range(20):
        node.turn()
    assert node.replays.held_bytes < worker.MOST_BYTES + worker.WINDOW_BYTES
    node.now_s += STALL_S
    assert numbers_read(node, honest) == list(range(BATCHES)), "those that do not read made room"


def test_connections_over_the_bound_are_cut_and_ipv6_is_heard(context: Any) -> None:
    port = free_port()
    node = Node(context, f"tcp://[::1]:{port}", most=4)
    strangers = [socket.create_connection(("::1", port)) for _ in range(12)]
    assert node.turns_until(lambda: sum(_is_cut(each) for each in strangers) == 8)
    assert node.turns_until(lambda: len(node.endpoint) == 4)
    for each in strangers:
        each.close()
    assert node.turns_until(lambda: len(node.endpoint) == 0)
    peer = context.socket(zmq.DEALER)
    peer.setsockopt(zmq.IPV6, 1)
    peer.connect(f"tcp://[::1]:{port}")
    ask(peer, BATCHES - 1)
    assert numbers_read(node, peer) == [BATCHES - 1]


def test_a_socket_file_that_was_removed_is_made_again(node: Node, context: Any, tmp_path: Path) -> None:
    (tmp_path / "r").unlink()

    def is_there() -> bool:
        node.endpoint.restore()
        return (tmp_path / "r").exists()

    assert eventually(is_there)
    assert (tmp_path / "r").stat().st_mode & 0o077 == 0
    peer = asking(context, tmp_path, reads=True)
    ask(peer, BATCHES - 1)
    assert numbers_read(node, peer) == [BATCHES - 1]


def test_subscribers_that_do_not_read_are_cut_and_their_memory_is_free(context: Any, tmp_path: Path) -> None:
    endpoint = EventEndpoint(context, zmq.PUB, f"ipc://{tmp_path}/e", 8, 1000)
    slow = context.socket(zmq.SUB)
    slow.linger = 0
    slow.setsockopt(zmq.RCVHWM, 1)
    slow.setsockopt(zmq.RECONNECT_IVL, -1)
    slow.connect(f"ipc://{tmp_path}/e")
    slow.subscribe(b"")
    sent = Sent()

    def is_held_up() -> bool:
        endpoint.look()
        sent.add(endpoint.send(TOPIC, b"n", bytes(1 << 20)), 1 << 20)
        sent.look()
        return sent.held_bytes >= 8 << 20

    assert eventually(is_held_up)
    assert endpoint.cut_slow() == 1

    def is_free() -> bool:
        endpoint.look()
        sent.look()
        return not sent.held_bytes

    assert eventually(is_free)


def _is_cut(connection: socket.socket) -> bool:
    """Return whether the other side has ended a connection: ZMQ's greeting comes before that."""
    connection.setblocking(False)
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
