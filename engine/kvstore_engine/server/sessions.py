"""The daemon sessions of a server's tenants, and the check that the daemon answers.

Owns one session for each tenant with requests, and how tenants are kept apart in the daemon: to it the server is one
user, so a tenant's name is in the fingerprint as its account, and so in the root of every key. The nameless
tenant of a server without keys shares with every other engine of this user.
A session can be connected to a daemon that is stopped, whose sockets still accept: one thread for all sessions pings at
intervals, never between a request and the daemon, and logs when the daemon stops or starts to answer.
Invariant: at most `MAX_SESSIONS` are open; a tenant beyond them computes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import kvstore_client
from kvstore_engine.restore import KvSession
from kvstore_proto.fingerprint import Fingerprint

INTERVAL_S = 1.0
MISSES = 2  # in a row: one may be a daemon that is busy
MAX_SESSIONS = 64
_log = logging.getLogger(__name__)


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
                _log.warning("kvstored does not answer: prompts are computed, and nothing is stored, until it does")
            elif self.answers is not None:
                _log.warning("kvstored answers again: stored prompts are loaded")
        self.answers = answers

    def close(self) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(INTERVAL_S):
            self.look()


class TenantSessions:
    """Sessions with the daemon in `folder`, opened when first asked for."""

    def __init__(
        self,
        folder: Path,
        fingerprint: Fingerprint,
        connect: Callable[..., KvSession] = kvstore_client.connect,
    ) -> None:
        self._folder, self._fingerprint, self._connect = folder, fingerprint, connect
        self._sessions: dict[str, KvSession] = {}
        self._watch = StoreWatch(lambda: list(self._sessions.values()))

    def watch(self) -> None:
        """From now on check whether the daemon answers."""
        self._watch.start()

    def __call__(self, tenant: str) -> KvSession | None:
        """The tenant's session: degraded, not an error, while no daemon answers. None beyond the limit."""
        session = self._sessions.get(tenant)
        if session is None and len(self._sessions) < MAX_SESSIONS:
            name = f"kvengine:{tenant}" if tenant else "kvengine"
            session = self._connect(
                self._folder, fingerprint=fingerprint_for(self._fingerprint, tenant), client_name=name
            )
            self._sessions[tenant] = session
        elif session is None:
            _log.warning("tenant %s gets no daemon session: %d are open already", tenant, MAX_SESSIONS)
        return session

    def state(self) -> str:
        """ "connected" if all are and the daemon answers, else "degraded"; "none" before the first."""
        states = {session.state for session in self._sessions.values()}
        if not states:
            return "none"
        return "connected" if states == {"connected"} and self._watch.answers is not False else "degraded"

    def close(self) -> None:
        self._watch.close()
        for session in self._sessions.values():
            session.close()
        self._sessions.clear()


def fingerprint_for(fingerprint: Fingerprint, tenant: str) -> Fingerprint:
    """For two tenants the results make keys that are never equal."""
    return replace(fingerprint, account=tenant)
