"""Whether the daemon answers: a session can be connected to one that is stopped, whose sockets still accept.

Owns a thread that pings at intervals, and the log line when the daemon stops or starts to answer, one for all sessions.
It is never between a request and the daemon.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

log = logging.getLogger(__name__)
INTERVAL_S = 1.0
MISSES = 2  # in a row: one may be a daemon that is busy


class Pinged(Protocol):
    def ping(self) -> float | None: ...


class StoreWatch:
    """`sessions()` are the open ones; one that answers is enough. The thread pings from `start` until `close`."""

    def __init__(self, sessions: Callable[[], Iterable[Pinged]]) -> None:
        self._sessions = sessions
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="store watch", daemon=True)
        self._missed = 0
        self.answers: bool | None = None  # None: not pinged yet

    def start(self) -> None:
        self._thread.start()

    def look(self) -> None:
        """Ping once, and log a change."""
        session = next(iter(self._sessions()), None)
        if session is None:
            return
        self._missed = 0 if session.ping() is not None else self._missed + 1
        if 0 < self._missed < MISSES:
            return
        answers = not self._missed
        if answers != self.answers:
            if not answers:
                log.warning("kvstored does not answer: prompts are computed, and nothing is stored, until it does")
            elif self.answers is not None:
                log.warning("kvstored answers again: stored prompts are loaded")
        self.answers = answers

    def close(self) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(INTERVAL_S):
            self.look()
