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
from kvstored.events.records import STATISTICS, unpack
from kvstored.events.stream import EventStream

HIGH_WATER = 100_000  # batches that wait for one subscriber, at most; it misses those after
READ_BYTES = 1 << 20
LOWER = 5  # priority: where processors are short, events wait for puts, not puts for events
END = (-1).to_bytes(8, "big", signed=True)


class Worker:
    """`replay` is None where replay is off."""

    def __init__(self, daemon: socket.socket, stream: EventStream, publish: Any, replay: Any) -> None:
        self._daemon = daemon
        self._stream = stream
        self._publish = publish
        self._replay = replay
        self._unread = bytearray()
        self._reported = (0, 0, 0)

    def run(self) -> None:
        """Until the daemon is gone."""
        poller = zmq.Poller()
        poller.register(self._daemon, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._daemon.fileno() in ready:
                received = self._daemon.recv(READ_BYTES)
                if not received:
                    return
                self._unread += received
                self._stream.apply(unpack(self._unread))
                for batch in self._stream.batches():
                    self._publish.send_multipart((batch.topic, batch.number.to_bytes(8, "big"), batch.payload))
            if self._replay is not None and self._replay in ready:
                self._answer()
            self._report()

    def _answer(self) -> None:
        """One request: the number of the first batch, after the topic where there are several."""
        client, *words = self._replay.recv_multipart()
        words = [word for word in words if word]
        if not words or len(words) > 2 or len(words[-1]) != 8:
            return
        topic = words[0] if len(words) == 2 else None
        for batch in self._stream.replay(int.from_bytes(words[-1], "big"), topic):
            self._replay.send_multipart(
                (client, b"", batch.topic, batch.number.to_bytes(8, "big"), batch.payload)
            )  # fmt: skip
        self._replay.send_multipart((client, b"", b"", END, b""))

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


def _bound(context: Any, kind: int, address: str) -> Any:
    opened = context.socket(kind)
    opened.set_hwm(HIGH_WATER)
    opened.setsockopt(zmq.LINGER, 0)
    mask = os.umask(0o077)  # a socket file is its owner's alone
    try:
        opened.bind(address)
    finally:
        os.umask(mask)
    return opened


def first_number() -> int:
    """Grows from process to process, as long as none publishes 65,536 batches a second of its life."""
    return int(time.time()) << 16


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's: the daemon ends this process
    daemon = socket.socket(fileno=int(sys.argv[1]))
    settings = _receive_settings(daemon)
    os.nice(LOWER)
    context = zmq.Context()
    name = ""
    try:
        encode = encoder(settings["encoding"])
        name = "listen"
        publish = _bound(context, zmq.PUB, settings["listen"])
        name = "replay"
        replay = _bound(context, zmq.ROUTER, settings["replay"]) if settings["replay"] else None
    except zmq.ZMQError as error:
        daemon.sendall(f"events.{name} {settings[name]}: {error}\n".encode())
        return 1
    daemon.sendall(b"ready\n")
    places = [Place(*place) for place in settings["places"]]
    Worker(daemon, EventStream(places, encode, settings["buffer"], time.time, first_number()), publish, replay).run()
    context.destroy(linger=0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
