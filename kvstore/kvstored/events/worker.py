"""The process that publishes events: it reads the daemon's records, sends batches, and answers who missed some.

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
from typing import Any

import zmq

from kvstored.events.encoding import Place, encoder
from kvstored.events.endpoint import Endpoint, Sent
from kvstored.events.records import STATISTICS, unpack
from kvstored.events.replays import AGAIN_MS, Replays
from kvstored.events.stream import Batch, EventStream
from kvstored.process import connections_within

HIGH_WATER = 100_000  # batches that wait for one subscriber, at most; it misses those after
UNREAD_BYTES = 256 << 20  # of batches that wait for subscribers, together; more, and those that do not read are cut
READ_BYTES = 1 << 20
LOWER = 5  # priority: where processors are short, events wait for puts, not puts for events
BEAT_S = 2.0  # a topic without a batch for as long gets an empty one; sockets' files are looked for


class EventWorker:
    """`replay` is None where replay is off."""

    def __init__(self, daemon: socket.socket, stream: EventStream, publish: Endpoint, replay: Endpoint | None) -> None:
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
        """Until the daemon is gone."""
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
        """Apply what the daemon sent, and publish it. Return whether the daemon is still there."""
        received = self._daemon.recv(READ_BYTES)
        self._unread += received
        self._stream.apply(unpack(self._unread))
        for batch in self._stream.batches():
            self._send(batch)
        return bool(received)

    def _send(self, batch: Batch) -> None:
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
        publish = Endpoint(context, zmq.PUB, settings["listen"], most, HIGH_WATER)
        name = "replay"
        replay = Endpoint(context, zmq.ROUTER, settings["replay"], most, HIGH_WATER) if settings["replay"] else None
    except zmq.ZMQError as error:
        daemon.sendall(f"events.{name} {settings[name]}: {error}\n".encode())
        return 1
    daemon.sendall(b"ready\n")
    stream = EventStream(
        [Place(*place) for place in settings["places"]], encode, settings["buffer"], time.time,
        settings["first_number"], former_topics=settings["topics"],
    )  # fmt: skip
    EventWorker(daemon, stream, publish, replay).run()
    context.destroy(linger=0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
