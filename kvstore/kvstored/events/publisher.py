"""The daemon's side of the process that publishes events: starts it, sends it records, replaces it when it has died.

Records are sent a few milliseconds after the first that waits. When more wait than `BACKLOG_BYTES`, later ones are
dropped, and everything is announced anew once those are sent: a subscriber then sees a clear and all blocks.
Single-threaded, on the control loop, and never blocks it once it has started.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from kvstore_tiers.child_variables import variables_of_children
from kvstored.events.records import STATISTICS
from kvstored.telemetry import Counters

log = logging.getLogger(__name__)
START_S = 20.0
AGAIN_S = 1.0  # from a death to the next start
SEND_S = 0.005
SEND_BYTES = 256 << 10  # at once: some 50 us
BACKLOG_BYTES = 64 << 20
EXTRA = "events"
_NAMES = ("published_events", "replayed_batches", "event_snapshots")


class PublisherError(ValueError):
    """The process cannot publish; the message says why and what to do."""


class Publisher:
    """`settings`: as the worker takes them. `announce_all` is called when a new process knows nothing."""

    def __init__(self, settings: Mapping[str, Any], counters: Counters) -> None:
        self._settings = settings
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self.announce_all: Callable[[], None] = lambda: None
        self._waiting = bytearray()
        self._timer: asyncio.TimerHandle | None = None
        self._overflowed = False
        self._is_writing = self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._statistics = (0, 0, 0)
        self._start()

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else -1

    @property
    def waiting_bytes(self) -> int:
        """Records that have not been sent to the process."""
        return len(self._waiting)

    def append(self, record: bytes) -> None:
        if self._socket is None or self._overflowed:
            self._counters.add("dropped_events")
            return
        self._waiting += record
        if self._timer is None and not self._is_writing:
            self._timer = self._loop.call_later(SEND_S, self._send)
        elif len(self._waiting) > BACKLOG_BYTES:
            self._overflowed = True
            log.warning("KV events: the queue is full; all blocks are announced again when it has drained")

    def schedule(self, action: Callable[[], None]) -> None:
        """Run a piece of a long announcement soon, once little waits."""
        if len(self._waiting) < SEND_BYTES:
            self._loop.call_soon(action)
        elif not self._closed:
            self._loop.call_later(SEND_S, self.schedule, action)

    def close(self) -> None:
        """End the process. Idempotent."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._leave()

    # The process

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvstored.events.worker", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),), env=variables_of_children(), stdin=subprocess.DEVNULL,
            )  # fmt: skip
        raw = json.dumps(dict(self._settings)).encode()
        ours.settimeout(START_S)
        try:
            ours.sendall(struct.pack("<I", len(raw)) + raw)
            answer = _line(ours)
        except OSError:
            answer = ""
        if answer != "ready":
            self._process.kill()
            self._process.wait()
            ours.close()
            raise PublisherError(
                answer or f"the process for KV events did not start; is there `pip install 'kvstored[{EXTRA}]'`?"
            )
        ours.setblocking(False)
        self._socket, self._statistics = ours, (0, 0, 0)
        self._loop.add_reader(ours.fileno(), self._receive)

    def _receive(self) -> None:
        assert self._socket is not None
        try:
            raw = self._socket.recv(STATISTICS.size * 1000)
        except BlockingIOError:
            return
        except OSError:
            raw = b""
        if not raw:
            self._died()
            return
        latest = STATISTICS.unpack(raw[-STATISTICS.size :])
        for name, before, now in zip(_NAMES, self._statistics, latest, strict=True):
            self._counters.add(name, now - before)
        self._statistics = latest

    def _died(self) -> None:
        self._leave()
        if not self._closed:
            log.warning("the process for KV events has died; it is started again")
            self._loop.call_later(AGAIN_S, self._start_again)

    def _start_again(self) -> None:
        if self._closed:
            return
        self._counters.add("event_restarts")
        try:
            self._start()
        except (PublisherError, OSError) as error:
            log.error("no KV events: %s", error)
            self._loop.call_later(10 * AGAIN_S, self._start_again)
            return
        self.announce_all()

    def _leave(self) -> None:
        if self._socket is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()
            self._socket = None
        self._waiting.clear()
        self._overflowed = self._is_writing = False
        self._timer = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    # Sending

    def _send(self) -> None:
        self._timer = None
        if self._socket is None:
            return
        sent = 0
        with (
            contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionError),
            memoryview(self._waiting)[:SEND_BYTES] as part,
        ):
            sent = self._socket.send(part)
        del self._waiting[:sent]
        if self._waiting:
            if not self._is_writing:
                self._is_writing = True
                self._loop.add_writer(self._socket.fileno(), self._send)
            return
        if self._is_writing:
            self._is_writing = False
            self._loop.remove_writer(self._socket.fileno())
        if self._overflowed:
            self._overflowed = False
            self.announce_all()


def _line(connection: socket.socket) -> str:
    received = b""
    while not received.endswith(b"\n"):
        more = connection.recv(4096)
        if not more:
            break
        received += more
    return received.decode(errors="replace").strip()
