"""Moves blocks that will be requested to the mapped tier: it asks the predictor, plans, and hands blocks to the
promoter.

The module owns the times: a few times a second, and soon after a hint. Every part of it is bounded: a slice of the
control thread's time looks at one chain. Its reads wait behind demand in the lanes; they take a free slot or one whose
block is worth less, and `credit` judges them. While the predictor fails, or is none, it does nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from kvstore_predictor.base import Guess
from kvstored.clock import NS_PER_S, Clock
from kvstored.config.schema import PrefetchSection
from kvstored.store.blocks import Residency
from kvstored.store.policies import ChainHint, EvictionPolicy, Listens, ResidencyClass, Weighs
from kvstored.store.prefetch.credit import Held, PrefetchCredit, PrefetchFigures
from kvstored.store.prefetch.guarded_predictor import GuardedPredictor
from kvstored.store.prefetch.queue import PrefetchCandidate, PrefetchQueue, UnmappedBlock
from kvstored.store.prefetch.recent import RecentRequests
from kvstored.store.transfer.promote import Promoter
from kvstored.tier_set import MEMBERS

PLAN_S = 0.25  # at least, from one plan to the next
GUESSES = 64
PLANNED_BLOCKS = 2048
STEPS = 512  # up a chain, of one slice: 0.3 ms
WALK_BLOCKS = 16_384  # of a chain
AGAIN_S = 2.0  # after which what a chain lacks is looked at again, at most
PUMPED = 16  # blocks handed out in a turn: half a millisecond
LOOKED_AT = 64  # blocks brought and not used yet, a tick
AHEAD_BYTES = 64 << 20  # under way on a link at once
SPREADS, SLACK_S = 2.0, 5.0  # a block is held so many times the distance of first and due after it was due, and so long
HOLD_LEAST = 0.25  # what is less likely is not held any longer
RENEWED_S = 2.0  # so often, at most, the policy is asked to keep a chain


class PrefetchStatus(NamedTuple):
    """A report on a store's prefetch. `failure` is why the predictor is off, "" while it works. `tenants` has figures
    by tenant number, `all` the figures of all tenants together.
    """

    is_enabled: bool
    predictor: str
    failure: str
    guesses: int
    planned_blocks: int
    under_way_blocks: int
    cancelled_blocks: int
    all: PrefetchFigures
    tenants: dict[int, PrefetchFigures]


class _Took(dict[tuple[int, int], tuple[int, float]]):
    """The source, and the seconds of a read, of blocks by tiers and size."""


class _Walked(NamedTuple):
    """The missing blocks of a chain when it was looked at; they count as unchanged until `until_s`."""

    blocks: list[UnmappedBlock]
    until_s: float


class Prefetcher:
    """The component that promotes blocks which the predictor expects to be requested."""

    def __init__(
        self,
        settings: PrefetchSection,
        predictor: GuardedPredictor,
        residency: Residency,
        promoter: Promoter,
        policies: Sequence[EvictionPolicy],
        clock: Clock,
        recent: RecentRequests,
        credit: PrefetchCredit,
    ) -> None:
        self._settings = settings
        self._predictor = predictor
        self._residency = residency
        self._promoter = promoter
        self._policies = policies
        self._clock = clock
        self._recent = recent
        self._credit = credit
        self.is_enabled = settings.enabled
        self._queue = PrefetchQueue(settings.budget_bytes_per_s, AHEAD_BYTES)
        self._walked: dict[tuple[int, bytes], _Walked] = {}
        self._planned_s = -PLAN_S
        self._planning: asyncio.Task[None] | None = None
        self._guesses = self._cancelled = 0
        self._pump_is_due = False

    def tick(self) -> None:
        """Make a new plan of blocks to prefetch and start promotions; call it a few times a second."""
        self._recent.tidy()
        if not self._predictor.works:
            return
        self._look_after_held()
        self.wake()

    def wake(self) -> None:
        """Make a new plan of blocks to prefetch soon, since the predictor has learned something, unless one was made
        less than `PLAN_S` seconds ago."""
        is_due = self._now_s() - self._planned_s >= PLAN_S
        if self.is_enabled and self._predictor.works and is_due and self._planning is None:
            self._planned_s = self._now_s()
            self._planning = asyncio.get_running_loop().create_task(self._plan())
            self._planning.add_done_callback(self._planning_ended)

    def requested(self, tenant: int, keys: Sequence[bytes], now_ns: int) -> None:
        """Note that a request has asked for the blocks `keys` of `tenant`; the stored ones are mapped now."""
        held_of = self._credit.held_of(tenant)
        if held_of:
            now_s = now_ns / NS_PER_S
            for key in dict.fromkeys(key for key in keys if key in held_of):
                if self._slot(tenant, key) == held_of[key].slot:
                    self._credit.used(tenant, key, now_s)
                else:
                    self._credit.wasted(tenant, key, now_s, is_evicted=True)

    def forgotten(self, tenant: int, keys: Sequence[bytes] | None) -> None:
        """Note that the blocks `keys` of `tenant` (None: all its blocks) were deleted: they count as wasted
        prefetches.
        """
        held_of = self._credit.held_of(tenant)
        for key in list(held_of) if keys is None else [key for key in keys if key in held_of]:
            self._credit.wasted(tenant, key, self._now_s(), is_evicted=True)

    def statistics(self) -> PrefetchStatus:
        credit, demanded = self._credit, self._promoter.demanded_blocks
        return PrefetchStatus(
            self.is_enabled, self._predictor.name, self._predictor.failure, self._guesses, len(self._queue),
            self._queue.under_way, self._cancelled, credit.statistics(None, demanded(None)),
            {tenant: credit.statistics(tenant, demanded(tenant)) for tenant in credit.tenants},
        )  # fmt: skip

    # Planning

    async def _plan(self) -> None:
        now_s = self._now_s()
        guesses = self._predictor.guesses(now_s, self._settings.horizon_s, GUESSES)
        self._guesses = len(guesses)
        former, self._walked = self._walked, {}
        candidates: list[PrefetchCandidate] = []
        left = PLANNED_BLOCKS
        for guess in guesses:
            chain = (guess.tenant, guess.key)
            until_s = min(now_s + self._settings.horizon_s, _until_s(guess))
            self._hold(guess, until_s, now_s)
            if guess.probability < self._settings.min_probability:
                continue
            walked = former.get(chain)
            if walked is None or now_s >= walked.until_s:
                row = self._end_of(chain)
                if row < 0:
                    continue  # its put may come yet
                parts = self._recent.parts(*chain)
                blocks = await (self._missing_parts(guess.tenant, parts) if parts else self._missing(row))
                pause_s = (guess.first_s - now_s) / 4 if blocks else AGAIN_S
                walked = _Walked(blocks, now_s + min(max(pause_s, PLAN_S), AGAIN_S))
            self._walked[chain] = walked
            if walked.blocks:
                blocks = walked.blocks[:left]
                left -= len(blocks)
                candidates.append(
                    PrefetchCandidate(*chain, guess.probability, guess.first_s, guess.due_s, until_s, blocks)
                )
            if left <= 0:
                break
        for token in self._queue.plan(candidates):
            self._promoter.give_up(token)
        self._pump()

    def _planning_ended(self, planning: asyncio.Task[None]) -> None:
        self._planning = None
        if not planning.cancelled():
            planning.result()

    async def _missing(self, row: int) -> list[UnmappedBlock]:
        """Return the blocks of the chain that ends with `row` that are not mapped, up to one above that is, the head
        first, in slices. If the end is mapped, it was put there a moment ago: blocks between it and other mapped
        ones have made room for it; if there are no others, they are with the engine.
        """
        residency = self._residency
        mask, parents, took = residency.rows.mask, residency.rows.parent, _Took()
        blocks: list[UnmappedBlock] = []
        is_end_mapped = residency.mapped in MEMBERS[mask[row]]
        for step in range(1, WALK_BLOCKS):
            is_mapped = row >= 0 and residency.mapped in MEMBERS[mask[row]]
            if row < 0 or (is_mapped and (blocks or step > STEPS)):  # blocks near the end make room first
                break
            if not is_mapped:
                blocks += self._unmapped(row, took)
            row = parents[row]
            if step % STEPS == 0 and row >= 0:
                token = residency.token(row)
                await asyncio.sleep(0)
                row = residency.current(token)
        await asyncio.sleep(0)
        return [] if is_end_mapped and row < 0 else blocks[::-1]

    async def _missing_parts(self, tenant: int, keys: Sequence[bytes]) -> list[UnmappedBlock]:
        """Return the parts `keys` of an object that are not mapped, in their order, in slices."""
        residency, took, blocks = self._residency, _Took(), list[UnmappedBlock]()
        for step, key in enumerate(keys[:WALK_BLOCKS], 1):
            row = residency.find(tenant, key)
            if row >= 0 and residency.mapped not in MEMBERS[residency.rows.mask[row]]:
                blocks += self._unmapped(row, took)
            if step % STEPS == 0:
                await asyncio.sleep(0)
        return blocks

    def _unmapped(self, row: int, took: _Took) -> list[UnmappedBlock]:
        """Return the block `row` for a plan, or [] if no tier can be read. `took` has what is known of its like."""
        rows = self._residency.rows
        like = (rows.mask[row], rows.payload_bytes[row])
        source, load_s = took[like] if like in took else took.setdefault(like, self._promoter.seconds_of(row))
        return [UnmappedBlock(rows.token(row), self._residency.slot_bytes(row), source, load_s)] if source >= 0 else []

    # Moving

    def _pump(self) -> None:
        """Hand out the blocks that may go now, a few at a time."""
        self._pump_is_due = False
        now_s = self._now_s()
        for _ in range(PUMPED):
            # While one looks for room, what would be evicted for the next one is not known.
            if not self.is_enabled or self._promoter.prefetch_seeks_room:
                return
            found = self._queue.next(now_s)
            if found is None:
                return
            candidate, block = found
            row = self._residency.current(block.token)
            if row < 0 or self._promoter.is_coming(row):
                self._queue.skip(block)
            elif not self._credit.may_bring(
                candidate.tenant, candidate.probability, block.nbytes, self._queue.under_way_of(candidate.tenant), now_s
            ):
                self._queue.drop(candidate.tenant, candidate.key)
            else:
                pays = partial(self._pays, candidate.uses_an_hour(now_s))
                if self._promoter.prefetch_if(row, pays, partial(self._ended, candidate, block)):
                    self._queue.started(candidate, block)
                else:
                    self._queue.drop(candidate.tenant, candidate.key)
        self._pump_soon()

    def _pump_soon(self) -> None:
        if not self._pump_is_due:
            self._pump_is_due = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pays(self, uses_an_hour: float, victim: int) -> bool:
        """Return whether a block with this many uses an hour, while it is held, is worth more than `victim`."""
        policy, now_ns = self._policies[self._residency.mapped], self._clock.monotonic_ns()
        worth = policy.expected_uses_per_hour(victim, now_ns) if isinstance(policy, Weighs) else None
        if worth is None:
            return policy.residency_class(victim, now_ns) is ResidencyClass.COLD
        return uses_an_hour > worth

    def _ended(self, candidate: PrefetchCandidate, block: UnmappedBlock, is_mapped: bool, is_late: bool) -> None:
        self._queue.ended(block.token)
        row, now_s = self._residency.current(block.token), self._now_s()
        tenant, probability = candidate.tenant, candidate.probability
        if not is_mapped or row < 0:
            self._cancelled += 1
        elif is_late:
            self._credit.late(tenant, block.nbytes, probability, now_s)
        else:
            key = self._residency.key(row)
            until_s, slot = max(candidate.until_s, now_s + SLACK_S), self._slot(tenant, key)
            held = Held(candidate.key, block.nbytes, block.load_s, now_s, slot, probability)
            self._credit.brought(tenant, key, held, until_s)
            self._keep(tenant, row, candidate.due_s, now_s)  # else the policy's order evicts it first
        self._pump_soon()

    # Looking after

    def _hold(self, guess: Guess, until_s: float, now_s: float) -> None:
        """Hold the blocks brought for this guess as long as the request is expected, however long it takes."""
        hold = self._credit.hold(guess.tenant, guess.key)
        if hold is None or now_s - hold.renewed_s < RENEWED_S or guess.probability < HOLD_LEAST:
            return
        hold.renewed_s, hold.until_s = now_s, max(hold.until_s, until_s)
        chain = (guess.tenant, guess.key)
        parts = [self._residency.find(guess.tenant, key) for key in self._recent.parts(*chain)[:STEPS]]
        for row in parts or [self._end_of(chain)]:
            if row >= 0:
                self._keep(guess.tenant, row, guess.due_s, now_s)

    def _keep(self, tenant: int, row: int, due_s: float, now_s: float) -> None:
        """Let the policy of the mapped tier keep the chain down to `row` until it is due."""
        policy = self._policies[self._residency.mapped]
        if isinstance(policy, Listens):
            due = ChainHint(due_ns=round(due_s * NS_PER_S))
            policy.on_hint(tenant, row, self._residency.key(row), due, round(now_s * NS_PER_S))

    def _end_of(self, chain: tuple[int, bytes]) -> int:
        """Return the deepest block of the chain that is stored; -1 if none is known."""
        rows = (self._residency.find(chain[0], key) for key in self._recent.names(*chain))
        return next((row for row in rows if row >= 0), -1)

    def _look_after_held(self) -> None:
        now_s = self._now_s()
        for tenant, key, held in self._credit.to_look_at(LOOKED_AT):
            is_evicted = self._slot(tenant, key) != held.slot
            if is_evicted or self._credit.is_over(tenant, held, now_s):
                self._credit.wasted(tenant, key, now_s, is_evicted=is_evicted)

    def _slot(self, tenant: int, key: bytes) -> tuple[int, ...]:
        """Return the place of the block's mapped copy; () if there is none."""
        row = self._residency.find(tenant, key)
        mapped = self._residency.mapped
        return tuple(self._residency.slot(row, mapped)) if row >= 0 and self._residency.has(row, mapped) else ()

    def _now_s(self) -> float:
        return self._clock.monotonic_ns() / NS_PER_S


def _until_s(guess: Guess) -> float:
    """Return when nearly all requests of this guess have come, if one comes."""
    return guess.due_s + SPREADS * (guess.due_s - guess.first_s) + SLACK_S
