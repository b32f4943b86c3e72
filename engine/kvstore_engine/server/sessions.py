"""The daemon sessions of a server's tenants.

Owns one session for each tenant with requests, and how tenants are kept apart in the daemon: to it the server is one
user, so a tenant's name is in the fingerprint as its account, and so in the root of every key. The nameless
tenant of a server without keys shares with every other engine of this user.
Invariant: at most `MAX_SESSIONS` are open; a tenant beyond them computes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import kvstore_client
from kvstore_engine.restore import KvSession
from kvstore_engine.server.store_watch import StoreWatch
from kvstore_proto.fingerprint import Fingerprint

MAX_SESSIONS = 64
_log = logging.getLogger(__name__)


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
