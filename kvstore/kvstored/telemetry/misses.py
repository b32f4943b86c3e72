"""The last misses of each tenant: which block was asked for in vain, when, why and by whom.

A ring a tenant, so that one that misses all the time does not push out what another wants explained. The same client
missing the same block again is one entry with a count. Keys only, never token ids. One note costs about a microsecond:
it is made while a client waits.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvstored.clock import Clock
from kvstored.lifecycle import Cause
from kvstored.telemetry.caller import Caller


@dataclass(slots=True)
class Miss:
    """`key` is the first block of the request that was missing; `found_blocks` of `asked_blocks` were there."""

    key: bytes
    cause: Cause
    at_ns: int
    request: str
    session_id: int
    client_name: str
    pid: int
    fingerprint: bytes
    found_blocks: int
    asked_blocks: int
    times: int = 1


class RecentMisses:
    """At most `limit` entries a tenant."""

    def __init__(self, limit: int, clock: Clock) -> None:
        self._limit = limit
        self._clock = clock
        self._rings: dict[int, deque[Miss]] = {}

    def note(self, request: str, session: Caller, key: bytes, cause: Cause, found: int, asked: int) -> None:
        """A request of `asked` blocks found `found` of them and missed the block `key`."""
        ring = self._rings.get(session.tenant_id)
        if ring is None:
            ring = self._rings[session.tenant_id] = deque(maxlen=self._limit)
        now_ns = self._clock.monotonic_ns()
        if ring:
            last = ring[-1]
            if last.key == key and last.session_id == session.session_id and last.cause is cause:
                last.times += 1
                last.at_ns = now_ns
                return
        ring.append(
            Miss(
                key,
                cause,
                now_ns,
                request,
                session.session_id,
                session.client_name,
                session.peer.pid,
                session.fingerprint_digest,
                found,
                asked,
            )
        )

    def newest(self, limit: int, tenant: int | None = None) -> list[tuple[int, Miss]]:
        """(tenant, miss), the last one first."""
        found = [
            (number, miss)
            for number, ring in self._rings.items()
            if tenant is None or number == tenant
            for miss in ring
        ]
        found.sort(key=lambda entry: entry[1].at_ns, reverse=True)
        return found[:limit]
