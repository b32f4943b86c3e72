"""The blocks of one get on their way to the mapped tier: pinned, promoted, and named as they become readable.

Owns the pins of the blocks that are not leased yet. Invariant: `close` releases every pin that `lease` has not handed
to a lease, however the get ended, and cancels queued promotions that no other get waits for; a read under way ends by
itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from functools import partial

from kvstored.clock import NS_PER_S, Clock
from kvstored.store.blocks import Residency
from kvstored.store.operations.discovery import Discovery
from kvstored.store.transfer.lane import Priority
from kvstored.store.transfer.promote import Promoter
from kvstored.store.transfer.straight import StraightPromotion
from kvstored.store.transfer.verification import DramCheck


class Loader:
    """Finds what can be had, verifies what is mapped as far as the configuration asks for it, and promotes the rest:
    to the mapped tier, or past it by one of `straight`."""

    def __init__(
        self,
        residency: Residency,
        promoter: Promoter,
        dram_check: DramCheck,
        discovery: Discovery,
        clock: Clock,
        straight: Sequence[StraightPromotion],
    ) -> None:
        self._straight = straight
        self.promoter = promoter
        self.dram_check = dram_check
        self.discovery = discovery
        self._residency = residency
        self._clock = clock

    def load(self, rows: Sequence[int], readable: int) -> Loading:
        """The leading run of a chain, for a client that reads the tiers of this mask. Nothing moves before `begin`."""
        straight = [each for each in self._straight if readable >> each.destination & 1]
        return Loading(self._residency, self.promoter, straight, self._clock, rows, readable)

    async def verify(self, rows: Sequence[int], tokens: Sequence[int]) -> int:
        """Verify copies in the mapped tier; how many leading blocks can still be had. One that another tier has too
        can, by promotion."""
        if not self.dram_check.wanted(rows):
            return len(rows)
        bad = await self.dram_check.verify(rows)
        for position, token in enumerate(tokens):
            row = self._residency.current(token)
            if row < 0 or (token in bad and self._residency.has(row, self._residency.mapped)):
                return position
        return len(rows)


class Loading:
    """`rows` are those of the leading run of a chain; positions are places in it. They are pinned from now on. Mapped
    stands here for: readable in a tier of the mask `readable`.

    `sources`: by position of a block that was not mapped when `begin` looked, the tier that it comes from.
    """

    def __init__(
        self,
        residency: Residency,
        promoter: Promoter,
        straight: Sequence[StraightPromotion],
        clock: Clock,
        rows: Sequence[int],
        readable: int,
    ) -> None:
        self._straight = straight
        self._taken: dict[int, StraightPromotion] = {}  # by position of a block that goes past the mapped tier
        self._residency = residency
        self._promoter = promoter
        self._clock = clock
        self._readable = readable
        self.tokens = [residency.token(row) for row in rows]
        self.sources: dict[int, int] = {}
        self._pinned = set(range(len(rows)))
        self._arrived: list[int] = []  # positions whose promotion has ended since `wait` looked
        self._coming: dict[int, asyncio.Future[bool]] = {}  # promotions that have not ended, by position
        self._change = asyncio.Event()
        self._wakes_at = 0  # at most so many promotions left before a waiter wakes
        residency.pin_run(rows)

    @property
    def is_over(self) -> bool:
        """Whether no promotion is under way any more whose end `wait` has not reported."""
        return not self._coming and not self._arrived

    def extend(self, rows: Sequence[int]) -> range:
        """More blocks of the chain, after those that are known; their positions."""
        first = len(self.tokens)
        self.tokens += [self._residency.token(row) for row in rows]
        positions = range(first, len(self.tokens))
        self._pinned.update(positions)
        self._residency.pin_run(rows)
        return positions

    def begin(self, positions: Iterable[int], due_ns: int) -> int:
        """Start to promote the blocks that are not mapped, in this order; `wait` reports the others. The caller waits
        until `due_ns` at most. Returns how many milliseconds they are worth waiting for."""
        residency, promoter = self._residency, self._promoter
        lacking = []
        for position in positions:
            row = residency.current(self.tokens[position])
            if residency.tier_mask(row) & self._readable:
                self._arrived.append(position)
            else:
                self.sources[position] = residency.fastest(row)
                lacking.append((position, row))
        patience_ms = promoter.patience_ms([row for _, row in lacking])
        ways = self._ways(lacking)
        for position, row in lacking:
            self._coming[position] = promotion = self._promote(position, row, ways.get(row), due_ns)
            promotion.add_done_callback(partial(self._ended, position))
        return patience_ms

    def _ways(self, lacking: Sequence[tuple[int, int]]) -> dict[int, StraightPromotion]:
        """By row, those that should go past the mapped tier, of positions and rows."""
        ways: dict[int, StraightPromotion] = {}
        rows = [row for _, row in sorted(lacking)] if self._straight else []
        for each in self._straight:
            ways |= dict.fromkeys(each.choose([row for row in rows if row not in ways]), each)
        return ways

    def _promote(
        self, position: int, row: int, straight: StraightPromotion | None, due_ns: int
    ) -> asyncio.Future[bool]:
        taken = straight.promote(row, due_ns) if straight is not None else None
        if straight is None or taken is None:
            return self._promoter.promote(row, Priority.DEMAND, due_ns)
        self._taken[position] = straight
        return taken

    async def wait(self, until_ns: int, *, for_all: bool = False) -> list[int]:
        """Ascending positions of blocks that are mapped now and were not reported before: as soon as there are any, or
        when all promotions have ended. Empty: time is up, or what ended was in vain."""
        if self._coming and (for_all or not self._arrived):
            self._wakes_at = 0 if for_all else len(self._coming) - 1
            self._change.clear()
            try:
                async with asyncio.timeout(max(0, until_ns - self._clock.monotonic_ns()) / NS_PER_S):
                    await self._change.wait()
            except TimeoutError:
                return []
        arrived, self._arrived = self._arrived, []
        return sorted(position for position in arrived if self.is_mapped(position))

    def is_mapped(self, position: int) -> bool:
        row = self._residency.current(self.tokens[position])
        return row >= 0 and bool(self._residency.tier_mask(row) & self._readable)

    def lease(self, positions: Iterable[int]) -> list[int]:
        """The rows of blocks whose pins are a lease's from now on."""
        positions = list(positions)
        self._pinned.difference_update(positions)
        return [self._residency.current(self.tokens[position]) for position in positions]

    def close(self) -> None:
        """Wait for nothing any more, and give back the pins that are left. Idempotent."""
        coming, self._coming = self._coming, {}
        for position, promotion in coming.items():
            if not promotion.done():
                (self._taken.get(position) or self._promoter).give_up(self.tokens[position])
        pinned, self._pinned = self._pinned, set()
        self._residency.unpin_run(self.tokens[position] for position in pinned)

    def _ended(self, position: int, promotion: asyncio.Future[bool]) -> None:
        if self._coming.pop(position, None) is None:  # closed meanwhile
            return
        self._arrived.append(position)
        if len(self._coming) <= self._wakes_at:
            self._change.set()
