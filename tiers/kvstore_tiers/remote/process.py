"""The daemon's side of a worker process: it starts the process, sends it requests, and starts another when it has died.

A call ends when the worker has answered, or is dead: never while the worker could still touch the memory that the call
named. A worker that does not answer in time is killed.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

from kvstore_tiers.child_processes import variables_of_children

START_S = 20.0  # a worker that is not ready by then hangs
SPARE_S = 2.0  # beyond the driver's own bound, before a worker counts as hung
PAUSE_S = 1.0  # from one start to the next, at least
_LOG = logging.getLogger(__name__)
Message = dict[str, Any]


@dataclass(frozen=True)
class RemoteSettings:
    """The settings of a remote tier's worker process. `secret`, in hex, is the secret of the node or cluster, from
    which keys are made. `readers` and `writers` are numbers of threads. `owner` is a random name that all worker
    processes of this tier share; `generation` is the number of worker processes before this one.
    """

    url: str
    timeout_s: float
    credentials: Mapping[str, str]
    secret: str
    readers: int
    writers: int
    owner: str = field(default_factory=lambda: secrets.token_hex(8))
    generation: int = 0

    def pack(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpack(cls, raw: bytes) -> RemoteSettings:
        return cls(**json.loads(raw))


class _Call:
    __slots__ = ("answer", "ended")

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.answer: Message = {}

    def end(self, answer: Message) -> None:
        self.answer = answer
        self.ended.set()


class _Running:
    """One worker, from its start to its death."""

    def __init__(self, name: str, settings: RemoteSettings, memory_fd: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvstore_tiers.remote.worker", str(theirs.fileno()), str(memory_fd)],
                pass_fds=(theirs.fileno(), memory_fd), env=variables_of_children(), stdin=subprocess.DEVNULL,
                process_group=0,  # a terminal's signals are the daemon's
            )  # fmt: skip
        self.began_s = time.monotonic()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", round(SPARE_S), 0))
        self._connection = Connection(ours.detach())
        self._lock = threading.Lock()
        self._calls: dict[int, _Call] = {}
        self._last = 0
        self._name = name
        self.refused = ""  # why the driver could not be opened
        self.is_dead = False
        self._ready = _Call()
        self._connection.send_bytes(settings.pack())
        self._receiving = threading.Thread(target=self._receive, name=f"{name}-answers", daemon=True)
        self._receiving.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_ready(self) -> bool:
        return self._ready.ended.is_set() and not self.is_dead

    def call(self, message: Message, wait_s: float) -> Message:
        """Return the answer. Raises OSError if the worker refuses to serve, hangs or dies."""
        if not self._ready.ended.wait(START_S):
            self.kill("was not ready in time")
        call = _Call()
        with self._lock:
            if self.is_dead:
                raise ConnectionError(errno.ECONNRESET, self.why_dead())
            self._last += 1
            self._calls[self._last] = call
            try:
                self._connection.send_bytes(json.dumps({"id": self._last, **message}).encode())
            except OSError:  # it has died, or does not read: half a message is lost with it
                self._process.kill()
        if not call.ended.wait(wait_s):
            self.kill(f"did not answer in {wait_s:.1f} s")
            call.ended.wait()
        return call.answer

    def kill(self, reason: str) -> None:
        if self._process.returncode is None:
            _LOG.warning("the worker of tier %s %s; it is replaced", self._name, reason)
        self._process.kill()

    def close(self) -> None:
        """End the worker, and wait for its end."""
        self._process.kill()
        self._receiving.join()

    def _receive(self) -> None:
        try:
            first = json.loads(self._connection.recv_bytes())
            self.refused = first.get("refused", "")
            self._ready.end(first)
            while True:
                answer = json.loads(self._connection.recv_bytes())
                with self._lock:
                    call = self._calls.pop(answer["id"], None)
                if call is not None:
                    call.end(answer)
        except (EOFError, OSError):
            pass
        self._process.kill()
        self._process.wait()  # from here on it touches no memory
        self._connection.close()
        with self._lock:
            self.is_dead = True
            calls, self._calls = self._calls, {}
        self._ready.end({})
        for call in calls.values():
            call.end({"error": self.why_dead(), "errno": errno.ECONNRESET})

    def why_dead(self) -> str:
        return self.refused or f"the worker of {self._name} has died"


class RemoteWorkerProcess:
    """The worker process of the remote tier `name`, which calls the store's library, as the daemon sees it. The process
    maps the memory behind the descriptor `memory_fd`, like the daemon. When it dies, the next call starts another.
    """

    def __init__(self, name: str, settings: RemoteSettings, memory_fd: int) -> None:
        self._name = name
        self._settings = settings
        self._memory_fd = os.dup(memory_fd)
        self._lock = threading.Lock()
        self._closed = False
        self._refused_before = ""
        self._running: _Running | None = _Running(name, settings, self._memory_fd)
        self.restarts = 0

    @property
    def is_ready(self) -> bool:
        """True if the present worker process is alive and has opened the store's driver."""
        running = self._running
        return running is not None and running.is_ready

    @property
    def pid(self) -> int | None:
        """The process number of the present worker; None if the worker is dead or the tier closed."""
        running = self._running
        return running.pid if running is not None and not running.is_dead else None

    def call(self, message: Message) -> Message:
        """Send the request `message` to the worker and return its answer. Raises OSError if the request fails, or if
        the worker dies or does not answer in time.
        """
        answer = self._worker().call(message, self._settings.timeout_s + SPARE_S)
        if "error" in answer:
            raise OSError(answer["errno"], answer["error"])
        return answer

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            running = self._running
        if running is not None:
            running.close()
        os.close(self._memory_fd)

    def _worker(self) -> _Running:
        with self._lock:
            running = self._running
            if self._closed or running is None:
                raise ConnectionError(errno.ESHUTDOWN, "the tier is closed")
            if not running.is_dead:
                return running
            if running.refused and running.refused != self._refused_before:
                self._refused_before = running.refused
                _LOG.error("tier %s cannot be used: %s", self._name, running.refused)
            if time.monotonic() - running.began_s < PAUSE_S:
                raise ConnectionError(errno.ECONNRESET, running.why_dead())
            self.restarts += 1
            settings = replace(self._settings, generation=self.restarts)
            self._running = _Running(self._name, settings, self._memory_fd)
            return self._running
