"""The process that publishes events: it reads the daemon's records, sends batches, and sends missed ones again.

    python -m kvstored.events.worker SOCKET_FD

The first message has the settings, the first answer is "ready" or why not, a line; after that only statistics are
answered. Ends when the daemon does. Nothing that a subscriber sends changes what is published.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import zmq

from kvstored.events.encoding import CopyPlace, encoder
from kvstored.events.endpoint import EventEndpoint, Sent
from kvstored.events.records import STATISTICS, unpack
from kvstored.events.stream import EventBatch, EventStream
from kvstored.process import connections_within

HIGH_WATER = 100_000  # batches that wait for one subscriber, at most; it misses those after
UNREAD_BYTES = 256 << 20  # of batches that wait for subscribers, together; more, and those that do not read are cut
READ_BYTES = 1 << 20
LOWER = 5  # priority: where processors are short, events wait for puts, not puts for events
BEAT_S = 2.0  # a topic without a batch for as long gets an empty one; sockets' files are looked for
WINDOW_BYTES = 1 << 20
WINDOW_BATCHES = 256
MOST_BYTES = 64 << 20
WAITING_A_PEER = 8
REQUESTS_A_TURN = 64
STALL_S, GIVEN_UP_S = 5.0, 60.0
AGAIN_MS = 10  # from one look at whether peers have read to the next
END = (-1).to_bytes(8, "big", signed=True)
Request = tuple[bytes | None, int]


@dataclass
class _Peer:
    descriptor: int
    moved_s: float  # when it last read something
    waiting: deque[Request] = field(default_factory=deque)
    current: Iterator[EventBatch] | None = None
    sent: Sent = field(default_factory=Sent)

    @property
    def is_idle(self) -> bool:
        return not self.waiting and self.current is None and not len(self.sent)

    @property
    def may_be_sent_more(self) -> bool:
        return self.sent.held_bytes < WINDOW_BYTES and len(self.sent) < WINDOW_BATCHES


class Replays:
    """A component that sends subscribers the batches of events which they have missed. The batches come from `stream`,
    and subscribers ask for them on `endpoint`, a ZMQ ROUTER socket. `now_s` is a monotonic clock.

    A peer is sent the next batch when it has read most of the last one, so a peer that never reads costs `WINDOW_BYTES`
    or one batch, and all of them together `MOST_BYTES` and one batch more. A peer that reads nothing for `STALL_S`
    seconds while others wait, or for `GIVEN_UP_S`, is cut. One replay of a peer runs at a time: `WAITING_A_PEER` more
    requests wait, others are dropped."""

    def __init__(self, endpoint: EventEndpoint, stream: EventStream, now_s: Callable[[], float]) -> None:
        self._endpoint, self._stream, self._now_s = endpoint, stream, now_s
        self._peers: dict[bytes, _Peer] = {}
        endpoint.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)

    @property
    def are_under_way(self) -> bool:
        return bool(self._peers)

    @property
    def held_bytes(self) -> int:
        """The bytes that were sent to peers and that the peers have not read."""
        return sum(peer.sent.held_bytes for peer in self._peers.values())

    def take(self) -> None:
        """Read the requests for replays that have come. Each has the number of the first wanted batch, after the topic
        if there are several."""
        for _ in range(REQUESTS_A_TURN):
            try:
                frames = self._endpoint.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            identity, *words = (frame.bytes for frame in frames)
            words = [word for word in words if word]
            if not words or len(words) > 2 or len(words[-1]) != 8:
                continue
            peer = self._peers.get(identity)
            if peer is None:
                peer = self._peers[identity] = _Peer(frames[-1].get(zmq.SRCFD), self._now_s())
            if len(peer.waiting) < WAITING_A_PEER:
                peer.waiting.append((words[0] if len(words) == 2 else None, int.from_bytes(words[-1], "big")))

    def go_on(self) -> None:
        """Send each peer as many batches as it has room for, and cut off peers that do not read."""
        now_s = self._now_s()
        for peer in self._peers.values():
            if peer.sent.look() or not len(peer.sent):
                peer.moved_s = now_s
        is_full = False
        for identity, peer in list(self._peers.items()):
            while peer.may_be_sent_more and (peer.current is not None or peer.waiting):
                is_full = self.held_bytes >= MOST_BYTES
                if is_full or not self._send_next(identity, peer):
                    break
        for identity, peer in list(self._peers.items()):
            if now_s - peer.moved_s > (STALL_S if is_full else GIVEN_UP_S):
                self._endpoint.cut(peer.descriptor)
                peer.waiting.clear()
                peer.current, peer.moved_s = None, now_s  # once: the descriptor may be another connection's by then
            if peer.is_idle:
                del self._peers[identity]
        if not self._peers:
            self._stream.forget_snapshot()

    def _send_next(self, identity: bytes, peer: _Peer) -> bool:
        """Send one batch, or the end of a replay; return whether the peer took it."""
        if peer.current is None:
            name, first = peer.waiting.popleft()
            peer.current = self._stream.replay(first, name)
        batch = next(peer.current, None)
        if batch is None:
            peer.current, frames = None, (identity, b"", b"", END, b"")
        else:
            frames = (identity, b"", batch.topic, batch.number.to_bytes(8, "big"), batch.payload)
        tracker = self._endpoint.send(*frames)
        if tracker is None:
            peer.waiting.clear()
            peer.current = None
            return False
        peer.sent.add(tracker, len(frames[-1]))
        return True


class EventWorker:
    """The main loop of the process that publishes events. `daemon` is the connection to the daemon; `replay` is None if
    replay is off.
    """

    def __init__(
        self, daemon: socket.socket, stream: EventStream, publish: EventEndpoint, replay: EventEndpoint | None
    ) -> None:
        self._daemon = daemon
        self._stream = stream
        self._publish = publish
        self._replays = None if replay is None else Replays(replay, stream, time.monotonic)
        self._endpoints = [publish] if replay is None else [publish, replay]
        self._unread = bytearray()
        self._sent = Sent()
        self._reported = (0, 0, 0)
        self._beats_s = time.monotonic() + BEAT_S

    def run(self) -> None:
        """Serve until the connection to the daemon ends."""
        poller = zmq.Poller()
        poller.register(self._daemon, zmq.POLLIN)
        for endpoint in self._endpoints:
            poller.register(endpoint.monitor, zmq.POLLIN)
        for endpoint in self._endpoints[1:]:
            poller.register(endpoint.socket, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(self._patience_ms()))
            if self._daemon.fileno() in ready and not self._receive():
                return
            for endpoint in self._endpoints:
                endpoint.look()
            if self._replays is not None:
                self._replays.take()
                self._replays.go_on()
            if time.monotonic() >= self._beats_s:
                self._beat()
            self._report()

    def _patience_ms(self) -> float:
        until_beat_ms = max(0.0, 1e3 * (self._beats_s - time.monotonic()))
        is_busy = self._replays is not None and self._replays.are_under_way
        return min(AGAIN_MS, until_beat_ms) if is_busy else until_beat_ms

    def _receive(self) -> bool:
        """Apply the daemon's messages, and publish their events. Return whether the daemon is still there."""
        received = self._daemon.recv(READ_BYTES)
        self._unread += received
        self._stream.apply(unpack(self._unread))
        for batch in self._stream.batches():
            self._send(batch)
        return bool(received)

    def _send(self, batch: EventBatch) -> None:
        tracker = self._publish.send(batch.topic, batch.number.to_bytes(8, "big"), batch.payload)
        self._sent.add(tracker, len(batch.payload))
        if self._sent.held_bytes > UNREAD_BYTES:
            self._sent.look()
            if self._sent.held_bytes > UNREAD_BYTES:
                count = self._publish.cut_slow()
                print(f"KV events: {count} subscribers that do not read were cut off", file=sys.stderr, flush=True)
                self._sent = Sent()  # what is not free yet will be at once

    def _beat(self) -> None:
        self._beats_s = time.monotonic() + BEAT_S
        self._sent.look()
        for batch in self._stream.beats():
            self._send(batch)
        for endpoint in self._endpoints:
            endpoint.restore()

    def _report(self) -> None:
        stream = self._stream
        now = (stream.published_events, stream.replayed_batches, stream.snapshots)
        if now != self._reported:
            with contextlib.suppress(BlockingIOError):  # the next report has it all
                self._daemon.send(STATISTICS.pack(*now), socket.MSG_DONTWAIT)
                self._reported = now


def _receive_settings(daemon: socket.socket) -> dict[str, Any]:
    (length,) = struct.unpack("<I", daemon.recv(4, socket.MSG_WAITALL))
    settings: dict[str, Any] = json.loads(daemon.recv(length, socket.MSG_WAITALL))
    return settings


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's: the daemon ends this process
    daemon = socket.socket(fileno=int(sys.argv[1]))
    settings = _receive_settings(daemon)
    os.nice(LOWER)
    context = zmq.Context()
    most = connections_within(settings["connections"])
    name = ""
    try:
        encode = encoder(settings["encoding"])
        name = "listen"
        publish = EventEndpoint(context, zmq.PUB, settings["listen"], most, HIGH_WATER)
        name = "replay"
        replay = (
            EventEndpoint(context, zmq.ROUTER, settings["replay"], most, HIGH_WATER) if settings["replay"] else None
        )
    except zmq.ZMQError as error:
        daemon.sendall(f"events.{name} {settings[name]}: {error}\n".encode())
        return 1
    daemon.sendall(b"ready\n")
    stream = EventStream(
        [CopyPlace(*place) for place in settings["places"]], encode, settings["buffer"], time.time,
        settings["first_number"], former_topics=settings["topics"],
    )  # fmt: skip
    EventWorker(daemon, stream, publish, replay).run()
    context.destroy(linger=0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
