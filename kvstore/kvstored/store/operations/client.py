"""The client of an operation, as far as the store needs to know it: a session of the daemon, or a simulated engine.

The module owns the work under way for one client. It does no I/O.
"""

from __future__ import annotations

import asyncio
from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvstore_proto.fingerprint import Fingerprint
from kvstored.lifecycle import Cause
from kvstored.store.blocks import ResidencyView
from kvstored.telemetry.flows import Process
from kvstored.tier_set import NO_TIERS, TierSet


class Owner(Protocol):
    """The tenant that a client's blocks belong to. `digest` is written into their headers."""

    @property
    def name(self) -> str: ...

    @property
    def digest(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class NoProcess:
    """A process that is not known, or is this one."""

    pid: int = 0
    uid: int = -1


@dataclass(slots=True, kw_only=True, eq=False)
class Client:
    """The client that an operation of the store works for. `tenant_id` is the residency's number for the tenant,
    `fingerprint_id` its number for the fingerprint.
    """

    session_id: int
    client_name: str
    tenant: Owner
    tenant_id: int
    fingerprint: Fingerprint
    fingerprint_digest: bytes
    fingerprint_id: int
    roots: dict[int, bytes]  # of each layer group
    peer: Process = NoProcess()
    exact: bool = True  # it has not accepted lossy copies
    family: Set[int] = frozenset()  # fingerprints that may be meant to be the same
    beginning: int = 0  # puts whose blocks have not all begun to be stored
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # held by the first of those
    copying: set[asyncio.Task[Any]] = field(default_factory=set)  # puts that read what the client offered
    closed: bool = False
    device_tiers: TierSet = NO_TIERS  # on its device: a lease may be on their memory

    @property
    def account(self) -> str:
        """The user for whom the engine asks, if it serves several."""
        return self.fingerprint.account

    def why_missing(self, residency: ResidencyView, key: bytes) -> Cause:
        """Return why a block that this client asked for is not readable."""
        row = residency.find(self.tenant_id, key) if self.exact and residency.exactness.has_lossy else -1
        if row >= 0 and not residency.exactness.served_tiers(row):
            return Cause.LOSSY_ONLY
        return residency.why_missing(self.tenant_id, key, self.fingerprint_id, self.family).cause

    def needs_parents(self, group_id: int) -> bool:
        """Return whether no block of a layer group can be used without the one before it: true unless it keeps a window
        or a state."""
        group = self.fingerprint.group(group_id)
        return group is not None and not group.window_blocks(self.fingerprint.block_tokens)

    def put_ended(self) -> None:
        """Note that a put of this client reads nothing any more."""
