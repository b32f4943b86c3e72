"""The daemon's side of the process that publishes events: it starts the process, sends it messages, and replaces it
when it has died.

A message is sent at once, as far as the process takes it; until it has taken all, `ready` is False. Single-threaded, on
the control loop, and never blocks it once it has started.
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

from kvstore_proto.version import pip_install
from kvstore_tiers.child_processes import variables_of_children
from kvstored.events.history import PublishedBefore
from kvstored.events.records import STATISTICS
from kvstored.telemetry import Counters

log = logging.getLogger(__name__)
START_S = 20.0
AGAIN_S = 1.0  # from a death to the next start
SEND_BYTES = 256 << 10  # at once: some 50 us
EXTRA = "events"
_NAMES = ("published_events", "replayed_batches", "event_snapshots")


class PublisherError(ValueError):
    """An error: the process that publishes events cannot work. The message says why and what to do."""


class Publisher:
    """The daemon's connection to the process that publishes KV events; the process is started again when it dies.
    `settings` are that process's settings, except for the part that `before` supplies. Call `start` once."""

    def __init__(self, settings: Mapping[str, Any], before: PublishedBefore, counters: Counters) -> None:
        self._settings = settings
        self._before = before
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self._waiting = bytearray()
        self._is_writing = self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None  # of a process that publishes
        self._coming: socket.socket | None = None  # of one that has not answered yet
        self._timer: asyncio.TimerHandle | None = None  # of the next start, or of the end of waiting for one
        self._statistics = (0, 0, 0)

    def start(self, announce_all: Callable[[], None]) -> None:
        """Start the publishing process, and wait for its answer. `announce_all` is called now and whenever a new
        process has started, since a new process knows no blocks. Raises PublisherError."""
        self._announce_all = announce_all
        ours = self._launch()
        ours.settimeout(START_S)
        try:
            answer = _line(ours)
        except OSError:
            answer = ""
        if answer != "ready":
            ours.close()
            self._leave()
            raise PublisherError(
                answer or f"the process for KV events did not start; if its packages are missing: {pip_install(EXTRA)}"
            )
        self._use(ours)

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else -1

    @property
    def ready(self) -> bool:
        """True when the publishing process runs and has taken all messages so far."""
        return self._socket is not None and not self._waiting

    def send(self, message: bytes) -> None:
        """Send `message` to the publishing process. While there is no process the message is dropped, since all blocks
        are announced to the next process."""
        if self._socket is None:
            return
        self._waiting += message
        if not self._is_writing:
            self._write()

    def close(self) -> None:
        """End the publishing process. A second call does nothing."""
        self._closed = True
        self._leave()

    # The process

    def _launch(self) -> socket.socket:
        """Start a process, and return the socket on which it will answer."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvstored.events.worker", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),), env=variables_of_children(), stdin=subprocess.DEVNULL,
                process_group=0,  # a terminal's signals are the daemon's
            )  # fmt: skip
        before = {"first_number": self._before.next_first_number(), "topics": self._before.topics}
        raw = json.dumps({**self._settings, **before}).encode()
        ours.sendall(struct.pack("<I", len(raw)) + raw)  # which a new socket takes at once
        return ours

    def _use(self, ours: socket.socket) -> None:
        ours.setblocking(False)
        self._socket, self._statistics = ours, (0, 0, 0)
        self._loop.add_reader(ours.fileno(), self._receive)
        self._announce_all()

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
            self._timer = self._loop.call_later(AGAIN_S, self._start_again)

    def _start_again(self) -> None:
        """Start a new process as `start` does, but wait for no answer."""
        self._counters.add("event_restarts")
        try:
            self._coming = self._launch()
        except OSError as error:
            self._failed(str(error))
            return
        self._coming.setblocking(False)
        self._loop.add_reader(self._coming.fileno(), self._answered)
        self._timer = self._loop.call_later(START_S, self._failed, f"it did not answer for {START_S:g} s")

    def _answered(self) -> None:
        """Read the line by which a restarted process answers."""
        assert self._coming is not None and self._timer is not None
        try:
            answer = _line(self._coming)
        except OSError as error:
            answer = str(error)
        if answer != "ready":
            self._failed(answer or "it ended")
            return
        self._timer.cancel()
        ours, self._coming, self._timer = self._coming, None, None
        self._loop.remove_reader(ours.fileno())
        self._use(ours)

    def _failed(self, why: str) -> None:
        log.error("no KV events: %s", why)
        self._leave()
        self._timer = self._loop.call_later(10 * AGAIN_S, self._start_again)

    def _leave(self) -> None:
        for connection in (self._socket, self._coming):
            if connection is not None:
                self._loop.remove_reader(connection.fileno())
                self._loop.remove_writer(connection.fileno())
                connection.close()
        self._socket = self._coming = None
        self._waiting.clear()
        self._is_writing = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    # Sending

    def _write(self) -> None:
        assert self._socket is not None
        sent = 0
        with (
            contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionError),
            memoryview(self._waiting)[:SEND_BYTES] as part,
        ):
            sent = self._socket.send(part)
        del self._waiting[:sent]
        if bool(self._waiting) == self._is_writing:
            return
        self._is_writing = bool(self._waiting)
        if self._is_writing:
            self._loop.add_writer(self._socket.fileno(), self._write)
        else:
            self._loop.remove_writer(self._socket.fileno())


def _line(connection: socket.socket) -> str:
    received = b""
    while not received.endswith(b"\n"):
        more = connection.recv(4096)
        if not more:
            break
        received += more
    return received.decode(errors="replace").strip()
