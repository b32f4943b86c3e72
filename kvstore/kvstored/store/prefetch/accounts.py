"""What prefetch by prediction was good for, by tenant, and how much of it each tenant gets.

Owns which blocks were brought and not used yet, what became of the others, and each tenant's standing. A block is
*used* when a request comes within the horizon, *late* when the request came while it was being brought, and *wasted*
when it left the mapped tier before, or no request came. Never moves a block; times are arguments.

Standing: where more than `waste_limit` of the bytes judged lately was wasted, only chains that are surely requested are
brought; where that is still too much, none, for a while that doubles each time. Then a few blocks at a time are tried.
A tenant's figures never decide for another one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from enum import IntEnum

from kvstored.telemetry import Counters

JUDGED_MIN = 32  # blocks judged before a standing may fall,
CALM_MIN = 256  # and before it may rise again, at first
CALM_MAX = 16_384
PAUSE_S, PAUSE_MAX_S = 60.0, 3600.0
TRIAL_BLOCKS = 32  # unjudged at once, while a tenant is tried again
WINDOW_BLOCKS = 512  # what was judged before counts half after so many


class Standing(IntEnum):
    FULL = 0
    REDUCED = 1  # chains that are surely requested
    TRIED = 2  # and few of these at once
    OFF = 3


@dataclass(slots=True)
class PrefetchFigures:
    """Of one tenant, or of all; then `standing` is that of the tenant that is turned down furthest. Bytes are those of
    slots. `demanded_blocks` are promotions that a request did wait for; `spared_s`: loading time that requests were
    spared, by the rate of the links. Of the wasted ones `evicted_blocks` left before their time was over."""

    standing: Standing = Standing.FULL
    prefetched_blocks: int = 0
    prefetched_bytes: int = 0
    used_blocks: int = 0
    used_bytes: int = 0
    late_blocks: int = 0
    wasted_blocks: int = 0
    evicted_blocks: int = 0
    wasted_bytes: int = 0
    waiting_blocks: int = 0
    demanded_blocks: int = 0
    spared_s: float = 0.0
    lead_s: float = 0.0  # mean time from a block's arrival to its use

    @property
    def precision(self) -> float:
        """Share of the blocks judged that a request used, late or not."""
        used = self.used_blocks + self.late_blocks
        return used / max(1, used + self.wasted_blocks)

    @property
    def recall(self) -> float:
        """Share of the blocks that had to be promoted for requests that were there in time."""
        return self.used_blocks / max(1, self.used_blocks + self.demanded_blocks)

    @property
    def wasted_share(self) -> float:
        """Share of the bytes judged that was wasted."""
        return self.wasted_bytes / max(1, self.wasted_bytes + self.used_bytes)

    @property
    def spared_s_per_gb(self) -> float:
        return self.spared_s / max(1e-9, self.prefetched_bytes / 1e9)


@dataclass(slots=True)
class _Account:
    """`figures`: all that was counted; `used_bytes` and `wasted_bytes` are what was judged lately, in its standing."""

    figures: PrefetchFigures = field(default_factory=PrefetchFigures)
    judged: int = 0  # blocks, since the standing changed
    used_bytes: float = 0.0
    wasted_bytes: float = 0.0
    calm: int = CALM_MIN
    pause_s: float = PAUSE_S
    until_s: float = 0.0  # off


@dataclass(slots=True)
class Held:
    """A block that was brought, and not used yet. `slot` names its copy."""

    nbytes: int
    load_s: float
    until_s: float
    landed_s: float
    slot: tuple[int, ...]


class Accounts:
    """See the module. At most `most_held_bytes` of the mapped tier wait for their use."""

    def __init__(self, waste_limit: float, min_probability: float, most_held_bytes: int, counters: Counters) -> None:
        self._waste_limit = waste_limit
        self._min_probability = min_probability
        self._most_held_bytes = most_held_bytes
        self._counters = counters
        self._tenants: dict[int, _Account] = {}
        self._held: dict[int, dict[bytes, Held]] = {}  # by tenant and key
        self._looked_at: deque[tuple[int, bytes, Held]] = deque()
        self._held_bytes = 0

    # What may be brought

    def least_probability(self, tenant: int, now_s: float) -> float:
        """That a chain must have to be brought for `tenant` now; above 1: none is."""
        standing = self._standing(self._account(tenant), now_s)
        if standing is Standing.OFF:
            return 2.0
        return self._min_probability if standing is Standing.FULL else max(self._min_probability, 1 - self._waste_limit)

    def may_bring(self, tenant: int, under_way: int) -> bool:
        """Whether one more block may be, beside so many that are under way."""
        if self._held_bytes >= self._most_held_bytes:
            return False
        figures = self._account(tenant).figures
        return figures.standing is not Standing.TRIED or figures.waiting_blocks + under_way < TRIAL_BLOCKS

    def _standing(self, account: _Account, now_s: float) -> Standing:
        if account.figures.standing is Standing.OFF and now_s >= account.until_s:
            self._set(account, Standing.TRIED)
        return account.figures.standing

    # What happened

    def brought(self, tenant: int, key: bytes, held: Held) -> None:
        """The block is mapped now, and no request has asked for it. One that was brought before has left meanwhile."""
        if key in self.held_of(tenant):
            self.wasted(tenant, key, held.landed_s, is_evicted=True)
        self._held.setdefault(tenant, {})[key] = held
        self._looked_at.append((tenant, key, held))
        self._held_bytes += held.nbytes
        self._counters.add("predicted_blocks")
        figures = self._account(tenant).figures
        figures.waiting_blocks += 1
        figures.prefetched_blocks += 1
        figures.prefetched_bytes += held.nbytes

    def late(self, tenant: int, nbytes: int, now_s: float) -> None:
        """A request came for the block while it was being brought."""
        self._counters.add("predicted_blocks")
        self._counters.add("predicted_late_blocks")
        account = self._account(tenant)
        figures = account.figures
        figures.prefetched_blocks += 1
        figures.prefetched_bytes += nbytes
        figures.late_blocks += 1
        figures.used_bytes += nbytes
        self._judge(account, nbytes, now_s, is_used=True)

    def held_of(self, tenant: int) -> dict[bytes, Held]:
        """By key; not to be changed."""
        return self._held.get(tenant, {})

    def used(self, tenant: int, key: bytes, now_s: float) -> None:
        """A request has come for the block, and it was there."""
        self._counters.add("predicted_used_blocks")
        held = self._take(tenant, key)
        account = self._account(tenant)
        figures = account.figures
        figures.used_blocks += 1
        figures.used_bytes += held.nbytes
        figures.spared_s += held.load_s
        figures.lead_s += (now_s - held.landed_s - figures.lead_s) / figures.used_blocks
        self._judge(account, held.nbytes, now_s, is_used=True)

    def wasted(self, tenant: int, key: bytes, now_s: float, *, is_evicted: bool) -> None:
        """The block has left, or its time is over."""
        self._counters.add("predicted_wasted_blocks")
        held = self._take(tenant, key)
        account = self._account(tenant)
        figures = account.figures
        figures.wasted_blocks += 1
        figures.evicted_blocks += is_evicted
        figures.wasted_bytes += held.nbytes
        self._judge(account, held.nbytes, now_s, is_used=False)

    def to_look_at(self, limit: int) -> list[tuple[int, bytes, Held]]:
        """Blocks that wait for their use, in turn."""
        found = []
        for _ in range(min(limit, len(self._looked_at))):
            waiting = tenant, key, held = self._looked_at.popleft()
            if self._held[tenant].get(key) is held:
                self._looked_at.append(waiting)
                found.append(waiting)
        return found

    def statistics(self, tenant: int | None, demanded_blocks: int) -> PrefetchFigures:
        """A copy. None: of all tenants."""
        if tenant is None:
            found = _sum([account.figures for account in self._tenants.values()])
        else:
            found = self._tenants.get(tenant, _Account()).figures
        return replace(found, demanded_blocks=demanded_blocks)

    @property
    def tenants(self) -> list[int]:
        return sorted(self._tenants)

    # Inside

    def _judge(self, account: _Account, nbytes: int, now_s: float, *, is_used: bool) -> None:
        account.judged += 1
        standing = account.figures.standing
        keep = 1 - 0.5 / WINDOW_BLOCKS
        account.used_bytes = keep * account.used_bytes + (nbytes if is_used else 0)
        account.wasted_bytes = keep * account.wasted_bytes + (0 if is_used else nbytes)
        share = account.wasted_bytes / (account.used_bytes + account.wasted_bytes)
        if standing is Standing.OFF or account.judged < JUDGED_MIN:
            return
        if share > self._waste_limit:
            account.calm = min(CALM_MAX, 2 * account.calm)
            if standing is Standing.FULL:
                self._set(account, Standing.REDUCED)
            else:
                account.until_s = now_s + account.pause_s
                account.pause_s = min(PAUSE_MAX_S, 2 * account.pause_s)
                self._set(account, Standing.OFF)
        elif standing is Standing.TRIED or (
            standing is Standing.REDUCED and account.judged >= account.calm and share < self._waste_limit / 2
        ):
            account.pause_s = PAUSE_S
            self._set(account, Standing(standing - 1))

    def _set(self, account: _Account, standing: Standing) -> None:
        account.figures.standing, account.judged = standing, 0
        account.used_bytes = account.wasted_bytes = 0.0

    def _take(self, tenant: int, key: bytes) -> Held:
        held = self._held[tenant].pop(key)
        self._held_bytes -= held.nbytes
        self._account(tenant).figures.waiting_blocks -= 1
        return held

    def _account(self, tenant: int) -> _Account:
        account = self._tenants.get(tenant)
        if account is None:
            account = self._tenants[tenant] = _Account()
        return account


def _sum(tenants: Collection[PrefetchFigures]) -> PrefetchFigures:
    found = PrefetchFigures(max((each.standing for each in tenants), default=Standing.FULL))
    for each in tenants:
        found.prefetched_blocks += each.prefetched_blocks
        found.prefetched_bytes += each.prefetched_bytes
        found.used_blocks += each.used_blocks
        found.used_bytes += each.used_bytes
        found.late_blocks += each.late_blocks
        found.wasted_blocks += each.wasted_blocks
        found.evicted_blocks += each.evicted_blocks
        found.wasted_bytes += each.wasted_bytes
        found.waiting_blocks += each.waiting_blocks
        found.spared_s += each.spared_s
        found.lead_s += each.lead_s * each.used_blocks
    found.lead_s /= max(1, found.used_blocks)
    return found
