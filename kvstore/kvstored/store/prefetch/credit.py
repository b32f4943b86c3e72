"""The usefulness of prefetch by prediction, by tenant, and how much of it each tenant gets: less if it wastes bytes.

The module owns which blocks were brought and not used yet, the fate of the others, and each tenant's credit. A block is
*used* when a request comes while it is held, *late* when the request came while it was being brought, and *wasted* when
it left the mapped tier before, or no request came. It moves no block; times are arguments.

Credit: of the bytes brought for a tenant at most `waste_limit` may be waste. Wasted bytes count whole, bytes that wait
for their use by their risk: the chance, from recent guesses of that probability, that they are not used. A block whose
guess is probable enough by that measure is brought if the sum stays within the limit, or a few blocks above it:
something has to be tried first. Judged bytes count half after HALF_LIFE_S, so a tenant that was denied everything is
tried again, later the more it has wasted. A tenant's figures never decide for another one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np

from kvstore_predictor.base import Array, parts
from kvstored.telemetry import Counters

HALF_LIFE_S, PASSED_S = 600.0, 1.0
UNJUDGED_BLOCKS = 64  # may wait for their use at once before any was used; twice as many as were used lately, later
TRIED_BLOCKS = 32  # may be wasted above the limit
BINS = 10  # of probability
BELIEVED_BLOCKS = 128.0  # judged ones outweigh what a guess says of itself; those of one chain come together
COPIED = 64  # accounts of a piece: 0.3 ms
CREDIT = np.dtype(
    [
        ("tenant", "i8"), ("at_s", "f8"), ("used_bytes", "f8"), ("wasted_bytes", "f8"), ("used_blocks", "f8"),
        ("block_bytes", "i8"), ("bins", "f8", (BINS, 2)),
    ]
)  # fmt: skip


class Standing(IntEnum):
    FULL = 0  # all that is probable enough is brought
    REDUCED = 1  # only what surely is of use
    OFF = 2  # nothing


@dataclass(slots=True)
class PrefetchFigures:
    """The figures of prefetch for one tenant, or for all tenants together. `standing` says how much a tenant may
    prefetch; for all tenants it is the lowest of any tenant. Bytes are slot sizes.

    `demanded_blocks` were promoted while a request waited for them. `spared_s` is the loading time in seconds that
    requests were spared. `evicted_blocks` are wasted blocks that were evicted before their time was over."""

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
        """The share of prefetched blocks that a request used, in time or late, among those whose fate is known."""
        used = self.used_blocks + self.late_blocks
        return used / max(1, used + self.wasted_blocks)

    @property
    def recall(self) -> float:
        """The share of blocks prefetched in time, among all blocks that requests needed promoted."""
        return self.used_blocks / max(1, self.used_blocks + self.demanded_blocks)

    @property
    def wasted_share(self) -> float:
        """The share of prefetched bytes that no request used, among those whose fate is known."""
        return self.wasted_bytes / max(1, self.wasted_bytes + self.used_bytes)

    @property
    def spared_s_per_gb(self) -> float:
        return self.spared_s / max(1e-9, self.prefetched_bytes / 1e9)


@dataclass(slots=True)
class _Bin:
    """The blocks of guesses of about one probability, judged lately."""

    used: float = 0.0
    judged: float = 0.0

    def chance(self, probability: float) -> float:
        """Return the chance that a block with a guess of this probability is used."""
        return (self.used + BELIEVED_BLOCKS * probability) / (self.judged + BELIEVED_BLOCKS)


@dataclass(slots=True)
class _Account:
    """The account of a tenant. `figures`: all counts. The rest decays: bytes that were used and wasted until `at_s`;
    `held_bytes` wait for their use, and `risk_bytes` is their expected waste. `block_bytes`: the size of the last
    brought block.
    """

    figures: PrefetchFigures = field(default_factory=PrefetchFigures)
    used_bytes: float = 0.0
    wasted_bytes: float = 0.0
    used_blocks: float = 0.0
    at_s: float = 0.0
    held_bytes: int = 0
    risk_bytes: float = 0.0
    block_bytes: int = 1
    bins: list[_Bin] = field(default_factory=lambda: [_Bin() for _ in range(BINS)])

    def pass_time(self, now_s: float) -> None:
        if now_s - self.at_s < PASSED_S:
            return
        keep = 0.5 ** ((now_s - self.at_s) / HALF_LIFE_S)
        self.used_bytes, self.wasted_bytes = keep * self.used_bytes, keep * self.wasted_bytes
        self.used_blocks, self.at_s = keep * self.used_blocks, now_s
        for each in self.bins:
            each.used, each.judged = keep * each.used, keep * each.judged

    def bin(self, probability: float) -> _Bin:
        return self.bins[min(BINS - 1, int(probability * BINS))]

    def risk(self, probability: float) -> float:
        """Return the chance that a block with a guess of this probability is not used."""
        return 1 - self.bin(probability).chance(probability)

    def has_credit(self, nbytes: int, risk_bytes: float, limit: float) -> bool:
        """Return whether the tenant may prefetch `nbytes` more, of which `risk_bytes` are expected to go unused."""
        all_bytes = self.used_bytes + self.wasted_bytes + self.held_bytes + nbytes
        return self.wasted_bytes + self.risk_bytes + risk_bytes <= limit * all_bytes + TRIED_BLOCKS * nbytes


@dataclass(slots=True)
class Hold:
    """A waiting time: the prefetched blocks of one chain wait until `until_s` for the chain's request. `renewed_s` is
    when the policy was last asked to keep them; `blocks` is their number."""

    until_s: float
    renewed_s: float
    blocks: int = 0


@dataclass(slots=True)
class Held:
    """A block that was prefetched and not used yet. `slot` is the place of its copy. `chain` is the last key of the
    chain that the predictor expects to be requested with the chance `probability`. `risk_bytes` count as waste until
    the block is used or lost."""

    chain: bytes
    nbytes: int
    load_s: float
    landed_s: float
    slot: tuple[int, ...]
    probability: float
    risk_bytes: float = 0.0


class PrefetchCredit:
    """A record of how useful prefetch was for each tenant, which decides how many bytes may be prefetched for it.
    Prefetched blocks that wait for their use take at most `most_held_bytes` of the mapped tier."""

    def __init__(self, waste_limit: float, min_probability: float, most_held_bytes: int, counters: Counters) -> None:
        self._waste_limit = waste_limit
        self._min_probability = min_probability
        self._most_held_bytes = most_held_bytes
        self._counters = counters
        self._tenants: dict[int, _Account] = {}
        self._held: dict[int, dict[bytes, Held]] = {}  # by tenant and key
        self._holds: dict[tuple[int, bytes], Hold] = {}  # by tenant and chain, of those of which blocks wait
        self._looked_at: deque[tuple[int, bytes, Held]] = deque()
        self._held_bytes = 0

    # What may be brought

    def may_bring(self, tenant: int, probability: float, nbytes: int, under_way: int, now_s: float) -> bool:
        """Return whether a block of `nbytes` may be prefetched for `tenant` at `now_s`. Its chain is expected to be
        requested with this `probability`, and `under_way` blocks of the tenant are being prefetched."""
        if probability < self._min_probability or self._held_bytes >= self._most_held_bytes:
            return False
        account = self._account(tenant)
        account.pass_time(now_s)
        unjudged = account.figures.waiting_blocks + under_way
        if unjudged >= UNJUDGED_BLOCKS + 2 * account.used_blocks:
            return False
        risk = account.risk(probability)
        return risk <= 1 - self._min_probability and account.has_credit(nbytes, risk * nbytes, self._waste_limit)

    def _standing(self, account: _Account) -> Standing:
        """Return the standing, as of the last time that it was asked, or judged."""
        for standing, probability in ((Standing.FULL, self._min_probability), (Standing.REDUCED, 1.0)):
            nbytes = account.block_bytes
            if account.has_credit(nbytes, account.risk(probability) * nbytes, self._waste_limit):
                return standing
        return Standing.OFF

    # What happened

    def brought(self, tenant: int, key: bytes, held: Held, until_s: float) -> None:
        """Note that the block `key` was prefetched as `held` describes, and no request has wanted it yet; it waits
        until `until_s`. If an earlier prefetched copy is known, that copy counts as wasted."""
        if key in self.held_of(tenant):
            self.wasted(tenant, key, held.landed_s, is_evicted=True)
        account = self._account(tenant)
        account.pass_time(held.landed_s)
        held.risk_bytes = held.nbytes * account.risk(held.probability)
        account.risk_bytes += held.risk_bytes
        account.held_bytes += held.nbytes
        account.block_bytes = held.nbytes
        self._held.setdefault(tenant, {})[key] = held
        hold = self._holds.setdefault((tenant, held.chain), Hold(until_s, held.landed_s))
        hold.until_s, hold.blocks = max(hold.until_s, until_s), hold.blocks + 1
        self._looked_at.append((tenant, key, held))
        self._held_bytes += held.nbytes
        self._counters.add("predicted_blocks")
        figures = account.figures
        figures.waiting_blocks += 1
        figures.prefetched_blocks += 1
        figures.prefetched_bytes += held.nbytes

    def late(self, tenant: int, nbytes: int, probability: float, now_s: float) -> None:
        """Note that a request came for a block of `nbytes` while the block was being prefetched. The predictor had
        expected the request with this `probability`."""
        self._counters.add("predicted_blocks")
        self._counters.add("predicted_late_blocks")
        account = self._account(tenant)
        figures = account.figures
        figures.prefetched_blocks += 1
        figures.prefetched_bytes += nbytes
        figures.late_blocks += 1
        figures.used_bytes += nbytes
        self._judge(account, nbytes, probability, now_s, is_used=True)

    def held_of(self, tenant: int) -> dict[bytes, Held]:
        """Return the prefetched blocks of `tenant` that wait for their use, by key. Do not change the result."""
        return self._held.get(tenant, {})

    def hold(self, tenant: int, chain: bytes) -> Hold | None:
        """Return how long the prefetched blocks of `chain` (its last key) wait, or None if there are none."""
        return self._holds.get((tenant, chain))

    def is_over(self, tenant: int, held: Held, now_s: float) -> bool:
        """Return whether the time in which the prefetched block `held` of `tenant` should have been used is over at
        `now_s`."""
        return now_s >= self._holds[tenant, held.chain].until_s

    def used(self, tenant: int, key: bytes, now_s: float) -> None:
        """Note that a request has used the prefetched block `key`."""
        self._counters.add("predicted_used_blocks")
        held = self._take(tenant, key)
        account = self._account(tenant)
        figures = account.figures
        figures.used_blocks += 1
        figures.used_bytes += held.nbytes
        figures.spared_s += held.load_s
        figures.lead_s += (now_s - held.landed_s - figures.lead_s) / figures.used_blocks
        self._judge(account, held.nbytes, held.probability, now_s, is_used=True)

    def wasted(self, tenant: int, key: bytes, now_s: float, *, is_evicted: bool) -> None:
        """Note that the prefetched block `key` was evicted (`is_evicted`), or that its time is over, before a request
        used it.
        """
        self._counters.add("predicted_wasted_blocks")
        held = self._take(tenant, key)
        account = self._account(tenant)
        figures = account.figures
        figures.wasted_blocks += 1
        figures.evicted_blocks += is_evicted
        figures.wasted_bytes += held.nbytes
        self._judge(account, held.nbytes, held.probability, now_s, is_used=False)

    def to_look_at(self, limit: int) -> list[tuple[int, bytes, Held]]:
        """Return up to `limit` prefetched blocks that wait for their use: tenant, key and record of each. Successive
        calls go through all of them in turn."""
        found = []
        for _ in range(min(limit, len(self._looked_at))):
            waiting = tenant, key, held = self._looked_at.popleft()
            if self._held[tenant].get(key) is held:
                self._looked_at.append(waiting)
                found.append(waiting)
        return found

    def statistics(self, tenant: int | None, demanded_blocks: int) -> PrefetchFigures:
        """Return a copy of the figures of `tenant`, or of all tenants together (None), with this number of
        `demanded_blocks`.
        """
        if tenant is None:
            found = _sum([self.statistics(each, 0) for each in self._tenants])
        else:
            account = self._tenants.get(tenant, _Account())
            found = replace(account.figures, standing=self._standing(account))
        return replace(found, demanded_blocks=demanded_blocks)

    @property
    def tenants(self) -> list[int]:
        return sorted(self._tenants)

    # Over a restart

    def pieces(self) -> Iterator[Array]:
        """Yield the tenants' records to save, in small arrays of dtype CREDIT. Blocks that wait for their use are left
        out."""
        rows = (
            (tenant, each.at_s, each.used_bytes, each.wasted_bytes, each.used_blocks, each.block_bytes,
             [(bin_.used, bin_.judged) for bin_ in each.bins])
            for tenant, each in list(self._tenants.items())
        )  # fmt: skip
        return parts(rows, CREDIT, COPIED)

    def restore(self, credit: Array, later_s: float, now_s: float) -> None:
        """Continue from `credit`, the joined saved `pieces`; `later_s` is added to saved times."""
        for tenant, at_s, used_bytes, wasted_bytes, used_blocks, block_bytes, bins in credit.tolist():
            self._tenants[tenant] = _Account(
                used_bytes=used_bytes, wasted_bytes=wasted_bytes, used_blocks=used_blocks,
                at_s=min(at_s + later_s, now_s), block_bytes=block_bytes, bins=[_Bin(*bin_) for bin_ in bins],
            )  # fmt: skip

    # Inside

    def _judge(self, account: _Account, nbytes: int, probability: float, now_s: float, *, is_used: bool) -> None:
        account.pass_time(now_s)
        bin_ = account.bin(probability)
        bin_.used, bin_.judged = bin_.used + is_used, bin_.judged + 1
        if is_used:
            account.used_bytes += nbytes
            account.used_blocks += 1
        else:
            account.wasted_bytes += nbytes

    def _take(self, tenant: int, key: bytes) -> Held:
        held = self._held[tenant].pop(key)
        self._held_bytes -= held.nbytes
        hold = self._holds[tenant, held.chain]
        hold.blocks -= 1
        if not hold.blocks:
            del self._holds[tenant, held.chain]
        account = self._account(tenant)
        account.held_bytes -= held.nbytes
        account.risk_bytes = account.risk_bytes - held.risk_bytes if account.held_bytes else 0.0  # no rounding is kept
        account.figures.waiting_blocks -= 1
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
