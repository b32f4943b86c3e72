"""The traffic of each tier and each tenant: blocks served, promoted, demoted, evicted, and missed, by cause.

It also keeps the last misses of each tenant, with their time, cause and client.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from typing import Protocol

from kvstored.clock import Clock
from kvstored.lifecycle import Cause

MAX_ACCOUNTS = 1024  # of a tenant; clients make their names up, and those beyond count under their tenant alone


class Process(Protocol):
    @property
    def pid(self) -> int: ...

    @property
    def uid(self) -> int: ...


class Named(Protocol):
    @property
    def name(self) -> str: ...


class Caller(Protocol):
    """A client whose blocks are counted. `tenant_id` is the tenant's number in the block index. `account` is the user
    for whom the engine asks, "" if the engine does not say."""

    session_id: int
    client_name: str
    tenant_id: int
    fingerprint_digest: bytes

    @property
    def peer(self) -> Process: ...

    @property
    def tenant(self) -> Named: ...

    @property
    def account(self) -> str: ...


@dataclass(slots=True)
class TierFlow:
    hits: int = 0
    promoted_blocks: int = 0
    demoted_blocks: int = 0
    evicted_blocks: int = 0


@dataclass(slots=True)
class TenantFlow:
    """The traffic of one tenant, as numbers of blocks and bytes. `hit_blocks` were leased to it; `missed_blocks` were
    wanted by a lookup or get and were not stored. `refused_requests` were too many at once."""

    lookups: int = 0
    hit_blocks: int = 0
    missed_blocks: int = 0
    refused_requests: int = 0


class Flows:
    """The traffic of all tiers and tenants: `tiers` by position, `tenants` by the tenant's number, `accounts` by tenant
    and the account's name, and `misses`, blocks by cause.
    """

    def __init__(self, tiers: int) -> None:
        self.tiers = [TierFlow() for _ in range(tiers)]
        self.tenants: defaultdict[int, TenantFlow] = defaultdict(TenantFlow)
        self.accounts: defaultdict[int, dict[str, TenantFlow]] = defaultdict(dict)
        self.misses: Counter[Cause] = Counter()

    def hit(self, tier: int, blocks: int) -> None:
        if blocks and tier < len(self.tiers):
            self.tiers[tier].hits += blocks

    def looked_up(self, caller: Caller) -> None:
        self.tenants[caller.tenant_id].lookups += 1
        account = self._account(caller)
        if account is not None:
            account.lookups += 1

    def found(self, caller: Caller, blocks: int) -> None:
        """Count `blocks` blocks that were leased to `caller`."""
        self.tenants[caller.tenant_id].hit_blocks += blocks
        account = self._account(caller)
        if account is not None:
            account.hit_blocks += blocks

    def missed(self, caller: Caller, cause: Cause, blocks: int) -> None:
        """Count `blocks` missing blocks of a chain that `caller` wanted. The first is missing for `cause`; those after
        it count too.
        """
        self.misses[cause] += blocks
        self.tenants[caller.tenant_id].missed_blocks += blocks
        account = self._account(caller)
        if account is not None:
            account.missed_blocks += blocks

    def misses_by_name(self) -> dict[str, int]:
        """Return the number of missed blocks since the start, by the name of the cause as `kvctl explain` shows it."""
        return {cause.name.lower(): blocks for cause, blocks in self.misses.items()}

    def _account(self, caller: Caller) -> TenantFlow | None:
        if not caller.account:
            return None
        accounts = self.accounts[caller.tenant_id]
        flow = accounts.get(caller.account)
        if flow is None and len(accounts) < MAX_ACCOUNTS:
            flow = accounts[caller.account] = TenantFlow()
        return flow


@dataclass(slots=True)
class Miss:
    """A client's request that missed a block, and the reason. `key` is the first missing block, of the layer group
    `group`. The request found `found_blocks` of the `asked_blocks` that it wanted. `times` counts repetitions."""

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
    group: int = 0
    times: int = 1


class RecentMisses:
    """A record of the last `limit` misses of each tenant, so that a tenant with many does not push out another's.

    A client that misses a block again is one entry with a count. Entries have keys, never token ids. One note costs
    about a microsecond: it is made while a client waits.
    """

    def __init__(self, limit: int, clock: Clock) -> None:
        self._limit = limit
        self._clock = clock
        self._rings: dict[int, deque[Miss]] = {}

    def note(
        self, request: str, session: Caller, key: bytes, cause: Cause, found: int, asked: int, group: int = 0
    ) -> None:
        """Note that a `request` ("get" or "lookup") of `asked` blocks found `found` of them and missed the block `key`
        for `cause`. `group` is its layer group.
        """
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
                group,
            )
        )

    def newest(self, limit: int, tenant: int | None = None) -> list[tuple[int, Miss]]:
        """Return the last `limit` misses, the newest first, each with its tenant's number; with `tenant`, only of that
        tenant.
        """
        found = [
            (number, miss)
            for number, ring in self._rings.items()
            if tenant is None or number == tenant
            for miss in ring
        ]
        found.sort(key=lambda entry: entry[1].at_ns, reverse=True)
        return found[:limit]
