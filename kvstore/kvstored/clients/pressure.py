"""The work that is under way for each tenant, and what is refused when there is too much of it.

Prefetch is refused first, then puts; a get is refused for nothing but its own tenant's work. A prefetch that has begun
is not counted: all of them hold a small part of the mapped tier at most (`store/transfer/promote.py`). Who reads a
shared pool is counted under its own tenant, not the pool's. Invariant: what `begin` has counted is counted until its
`end`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

from kvstore_console.units import human_bytes
from kvstore_proto.arena import slot_bytes
from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.identity import KEY_BYTES
from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstored.clients.sessions import ClientSession
from kvstored.store.assembly import Store

RETRY_MS = 20


class Work(Enum):
    """A kind of work; its value is the part of each bound up to which such work is begun."""

    PREFETCH = 0.5
    PUT = 0.75
    GET = 1.0  # and all other requests


_WORDS = {Work.PREFETCH: "prefetch is", Work.PUT: "puts are", Work.GET: "requests are"}
_COUNTERS = {Work.PREFETCH: "shed_prefetches", Work.PUT: "shed_puts", Work.GET: "throttled_requests"}


@dataclass(slots=True)
class Load:
    """Work that is under way: requests that wait for bytes, and the bytes that they move."""

    requests: int = 0
    nbytes: int = 0


class Pressure:
    """The bounds on the work under way in `store` for each tenant and for all of them, which its section `limits`
    has."""

    def __init__(self, store: Store) -> None:
        self._limits = store.config.limits
        self._residency, self._retention = store.residency, store.retention
        self._counters, self._flows = store.counters, store.flows
        self._loads: defaultdict[int, Load] = defaultdict(Load)
        self._moving_bytes = 0

    def check(self, session: ClientSession, work: Work, nbytes: int = 0) -> None:
        """Raise KVStoreError (THROTTLED) if work of `session` that moves `nbytes` is not to begin now."""
        load = self._loads.get(session.caller_id)
        reason = None if load is None else self._reason(load, work, nbytes)
        if reason is not None:
            self._counters.add(_COUNTERS[work])
            self._flows.tenants[session.caller_id].refused_requests += 1
            raise KVStoreError(ErrorKind.THROTTLED, f"{_WORDS[work]} refused for now: {reason}", RETRY_MS)

    @contextmanager
    def count(self, session: ClientSession, work: Work, nbytes: int) -> Iterator[None]:
        """Count work of `session` that moves `nbytes` while the context lasts. Raises KVStoreError as `check` does."""
        self.begin(session, work, nbytes)
        try:
            yield
        finally:
            self.end(session, nbytes)

    def begin(self, session: ClientSession, work: Work, nbytes: int) -> None:
        """Count work of `session` that moves `nbytes`, until `end`. Raises KVStoreError as `check` does."""
        self.check(session, work, nbytes)
        load = self._loads[session.caller_id]
        load.requests += 1
        load.nbytes += nbytes
        self._moving_bytes += nbytes

    def end(self, session: ClientSession, nbytes: int) -> None:
        """Note that work which `begin` has counted has ended."""
        load = self._loads[session.caller_id]
        load.requests -= 1
        load.nbytes -= nbytes
        self._moving_bytes -= nbytes
        if not load.requests:
            del self._loads[session.caller_id]

    def measure(self, session: ClientSession, op: str, request: pb.Request) -> tuple[Work, int]:
        """Return what kind of work the request of the kind `op` is, and how many bytes it moves."""
        if op == "store":
            return Work.PUT, slot_bytes(request.store.payload_bytes) * sum(map(bool, request.store.pages))
        if op == "acquire" and not request.acquire.mapped_only:
            return Work.GET, self.loaded_bytes(session, request.acquire.set.keys)
        return Work.GET, 0

    def loaded_bytes(self, session: ClientSession, keys: bytes) -> int:
        """Return how many bytes of the leading stored blocks of the packed `keys` are not mapped, and so must be
        loaded."""
        residency = self._residency
        whole = min(len(keys) // KEY_BYTES, self._limits.max_keys) * KEY_BYTES
        rows = self._retention.find_run(session.tenant_id, keys[:whole])
        return sum(residency.slot_bytes(row) for row in rows if not residency.has(row, residency.mapped))

    def _reason(self, load: Load, work: Work, nbytes: int) -> str | None:
        limits, part = self._limits, work.value
        if load.requests >= limits.requests_per_tenant * part:
            return f"{load.requests} requests of this tenant are under way, limits.requests_per_tenant"
        if load.nbytes and load.nbytes + nbytes > limits.moving_per_tenant_bytes * part:
            return f"{human_bytes(load.nbytes)} of this tenant are under way, limits.moving_per_tenant"
        if work is Work.GET or self._moving_bytes + nbytes <= limits.moving_bytes * part:
            return None
        if load.nbytes and load.nbytes + nbytes > limits.moving_bytes * part / len(self._loads):
            return f"{human_bytes(self._moving_bytes)} of all tenants are under way, limits.moving, too many its own"
        return None
