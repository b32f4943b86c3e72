"""Loading keeps the blocks of one get pinned while they come to a tier that its client reads in place.

The module begins and joins promotions, and says which blocks have come; `get.py` leases them. Invariants: a block is
pinned from before the first wait until it is leased or given back; a promotion that no get waits for is given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from functools import partial

from kvstored.clock import NS_PER_S
from kvstored.store.assembly import Store
from kvstored.store.transfer.device_promotion import DevicePromotion
from kvstored.store.transfer.lane import Priority
from kvstored.tier_set import TierSet


class Loading:
    """The blocks of one get on their way to a tier that its client reads in place; positions are places in its chain.
    They are pinned until `lease` or `close`. "Mapped" here means: readable in one of the tiers `readable`. `rows`
    are as they were found. `sources`: the source tier of each block that was not mapped when `begin` looked, by
    position.
    """

    def __init__(self, store: Store, rows: Sequence[int], readable: TierSet, *, exact: bool) -> None:
        self._device_promotions = [each for each in store.device_promotions if each.destination in readable]
        self._taken: dict[int, DevicePromotion] = {}  # by position of a block that goes past the mapped tier
        self._residency, self._promoter, self._clock = store.residency, store.promoter, store.clock
        self._dram_check = store.dram_check
        self._readable, self._exact = readable, exact
        self.rows: list[int] = []
        self.tokens: list[int] = []
        self.sources: dict[int, int] = {}
        self._pinned: set[int] = set()
        self._arrived: list[int] = []  # positions whose promotion has ended since `wait` looked
        self._coming: dict[int, asyncio.Future[bool]] = {}  # promotions that have not ended, by position
        self._change = asyncio.Event()
        self._wakes_at = 0  # at most so many promotions left before a waiter wakes
        self.extend(rows)

    @property
    def is_over(self) -> bool:
        """True if `wait` has reported the end of all promotions."""
        return not self._coming and not self._arrived

    def extend(self, rows: Sequence[int]) -> range:
        """Add blocks of the chain, after the known ones; return their positions."""
        first = len(self.tokens)
        self.rows += rows
        self.tokens += [self._residency.token(row) for row in rows]
        positions = range(first, len(self.tokens))
        self._pinned.update(positions)
        self._residency.pin_run(rows)
        return positions

    async def verify(self, positions: range) -> int:
        """Verify copies in the mapped tier, as far as the configuration asks for it; return how many blocks from the
        first of `positions` on can still be had. A damaged block that another tier has can be had by promotion.
        """
        rows = self.rows[positions.start : positions.stop]
        if self._dram_check.wanted(rows):
            bad = await self._dram_check.verify(rows)
            for at, position in enumerate(positions):
                token = self.tokens[position]
                row = self._residency.current(token)
                if row < 0 or (token in bad and self._residency.has(row, self._residency.mapped)):
                    return at
        return len(rows)

    def begin(self, positions: Iterable[int], due_ns: int) -> int:
        """Start to promote the blocks that are not mapped, in this order; `wait` reports the others. The caller waits
        until `due_ns` at most. Return how many milliseconds they are worth waiting for.
        """
        residency, promoter = self._residency, self._promoter
        lacking = []
        for position in positions:
            row = residency.current(self.tokens[position])
            if residency.exactness.masks(exact=self._exact)[row] & self._readable:
                self._arrived.append(position)
            else:
                self.sources[position] = residency.fastest(row)
                lacking.append((position, row))
        patience_ms = promoter.patience_ms([row for _, row in lacking])
        ways: dict[int, DevicePromotion] = {}  # by row, of those that should go past the mapped tier
        for each in self._device_promotions:
            ways |= dict.fromkeys(each.choose([row for _, row in sorted(lacking) if row not in ways]), each)
        for position, row in lacking:
            way, promotion = ways.get(row), None
            if way is not None and (promotion := way.promote(row, due_ns)) is not None:
                self._taken[position] = way
            self._coming[position] = promotion = promotion or promoter.promote(row, Priority.DEMAND, due_ns)
            promotion.add_done_callback(partial(self._ended, position))
        return patience_ms

    async def wait(self, until_ns: int, *, for_all: bool = False) -> list[int]:
        """Return ascending positions of blocks that are mapped now and were not reported before: at the first of them,
        or when all promotions have ended. Empty if time is up, or if the ended promotions failed.
        """
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
        """Return whether the block is in a tier that the client reads in place."""
        row = self._residency.current(self.tokens[position])
        return row >= 0 and bool(self._residency.exactness.masks(exact=self._exact)[row] & self._readable)

    def lease(self, positions: Iterable[int]) -> list[int]:
        """Return the rows of blocks whose pins belong to a lease from now on."""
        positions = list(positions)
        self._pinned.difference_update(positions)
        return [self._residency.current(self.tokens[position]) for position in positions]

    def close(self) -> None:
        """Stop waiting, and give back the remaining pins. Idempotent."""
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
