"""The client of an operation, as far as the store needs to know it: a session of the daemon, or a simulated engine.

The module owns the work under way for one client. It does no I/O.
"""

from __future__ import annotations

import asyncio
from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.fingerprint import Fingerprint
from kvstore_proto.objects import OBJECTS
from kvstored.lifecycle import Cause
from kvstored.store.blocks import ResidencyView
from kvstored.telemetry.flows import Process
from kvstored.tier_set import NO_TIERS, TierSet


class Owner(Protocol):
    """A tenant that owns a client's blocks. `digest` is written into the headers of those blocks."""

    @property
    def name(self) -> str: ...

    @property
    def digest(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class NoProcess:
    """A stand-in for a client's process that is unknown, or that is the daemon itself: pid 0, uid -1."""

    pid: int = 0
    uid: int = -1


@dataclass(slots=True, kw_only=True, eq=False)
class Client:
    """A client that the store's operations work for: a session of the daemon, or a simulated engine. `tenant_id` and
    `fingerprint_id` are the numbers that the block index uses for the client's tenant and fingerprint.
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
    pool: str = ""  # the shared pool that `tenant` is, where the client belongs to another tenant
    may_write: bool = True  # False for a reader of a pool
    counted_group: int = field(init=False)  # the layer group that has a block for each block of tokens; -1: no tokens

    def __post_init__(self) -> None:
        groups = self.fingerprint.groups
        whole = next((each for each in groups if each.kind in ("full", "latent")), groups[0])
        self.counted_group = -1 if self.fingerprint == OBJECTS else whole.group_id

    @property
    def account(self) -> str:
        """The user for whom the engine computed the blocks, from the fingerprint; "" unless it serves several users as
        one tenant.
        """
        return self.fingerprint.account

    def why_missing(self, residency: ResidencyView, key: bytes) -> Cause:
        """Return why the block `key` of this client's tenant cannot be read. `residency` is the block index."""
        row = residency.find(self.tenant_id, key) if self.exact and residency.exactness.has_lossy else -1
        if row >= 0 and not residency.exactness.served_tiers(row):
            return Cause.LOSSY_ONLY
        return residency.why_missing(self.tenant_id, key, self.fingerprint_id, self.family).cause

    def needs_parents(self, group_id: int) -> bool:
        """Return True when a block of the layer group `group_id` can only be used together with the block before it in
        its chain. It is False for an unknown group, and for a group that keeps a sliding window or a recurrent state.
        """
        group = self.fingerprint.group(group_id)
        return group is not None and not group.window_blocks(self.fingerprint.block_tokens)

    def require_writer(self) -> None:
        """Raise KVStoreError if this session's client may only read."""
        if not self.may_write:
            raise KVStoreError(
                ErrorKind.FORBIDDEN,
                f"this client reads the shared pool {self.pool}: its publisher alone puts and deletes blocks there",
            )

    def put_ended(self) -> None:
        """Note that a put of this client has ended: it reads none of the client's memory any more. This class does
        nothing."""
