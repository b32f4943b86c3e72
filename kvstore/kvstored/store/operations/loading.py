"""Loading keeps the blocks of one get pinned while they come to a tier that its client reads in place.

The module begins and joins promotions, and says which blocks have come; `get.py` leases them. Invariants: a block is
pinned from before the first wait until it is leased or given back; a promotion that no get waits for is given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvstored.clock import NS_PER_S
from kvstored.store.assembly import Store
from kvstored.store.transfer.lane import Priority
from kvstored.tier_set import TierSet

if TYPE_CHECKING:
    from kvstored.store.transfer.device_promotion import DevicePromotion


class Loading:
    """The blocks of one get while they are copied to a tier that its client reads in place, pinned until `lease` or
    `close`. A position is a block's place in the chain. "Mapped" here means: in one of the tiers `readable`. `rows` are
    the blocks' rows as found; `sources` maps a position to the tier that the block is copied from."""

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
        """True when `wait` has reported the end of every promotion of this get."""
        return not self._coming and not self._arrived

    def extend(self, rows: Sequence[int]) -> range:
        """Add and pin the blocks `rows`, which continue the chain. Return their positions."""
        first = len(self.tokens)
        self.rows += rows
        self.tokens += [self._residency.token(row) for row in rows]
        positions = range(first, len(self.tokens))
        self._pinned.update(positions)
        self._residency.pin_run(rows)
        return positions

    async def verify(self, positions: range) -> int:
        """Verify the blocks' copies in the mapped tier, as far as the configuration wants that. Return how many blocks,
        counted from the first of `positions`, can still be read. A damaged block counts if another tier has a copy."""
        rows = self.rows[positions.start : positions.stop]
        if self._dram_check.wanted(rows):
            bad = await self._dram_check.verify(rows)
            for at, position in enumerate(positions):
                token = self.tokens[position]
                row = self._residency.current(token)
                if row < 0 or (token in bad and self._residency.has(row, self._residency.mapped)):
                    return at
        return len(rows)

    def begin(self, positions: Iterable[int], due_ns: int, *, one_by_one: bool) -> int:
        """Start to promote the blocks at `positions` that are not mapped, in this order; `wait` reports all. Each comes
        by itself for a caller that wants it `one_by_one`, else small ones come together. The caller waits until
        `due_ns` (monotonic) at most. Return for how many milliseconds waiting pays."""
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
        by_dram: list[tuple[int, int]] = []
        for position, row in lacking:
            if (way := ways.get(row)) is not None and (promotion := way.promote(row, due_ns)) is not None:
                self._taken[position], self._coming[position] = way, promotion
            else:
                by_dram.append((position, row))
        rows = [row for _, row in by_dram]
        runs = [[row] for row in rows] if one_by_one else [rows]
        promotions = [each for run in runs for each in promoter.promote_run(run, Priority.DEMAND, due_ns)]
        self._coming.update(zip((position for position, _ in by_dram), promotions, strict=True))
        for position, _ in lacking:
            self._coming[position].add_done_callback(partial(self._ended, position))
        return patience_ms

    async def wait(self, until_ns: int, *, for_all: bool = False) -> list[int]:
        """Wait for blocks; return the ascending positions of blocks that are mapped now and were not reported before.
        It returns when the first has come, with `for_all` when all promotions have ended. The list is empty when the
        monotonic time `until_ns` has passed, or when the promotions failed."""
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
        """Return whether the block at `position` is in a tier that the client reads in place."""
        row = self._residency.current(self.tokens[position])
        return row >= 0 and bool(self._residency.exactness.masks(exact=self._exact)[row] & self._readable)

    def lease(self, positions: Iterable[int]) -> list[int]:
        """Let the pins of the blocks at `positions` belong to a lease from now on. Return the rows of these blocks."""
        positions = list(positions)
        self._pinned.difference_update(positions)
        return [self._residency.current(self.tokens[position]) for position in positions]

    def close(self) -> None:
        """End the wait: give up promotions under way and remove the pins that no lease has. A second call
        does nothing.
        """
        coming, self._coming = self._coming, {}
        for position, promotion in coming.items():
            if not promotion.done():
                (self._taken.get(position) or self._promoter).give_up(self.tokens[position])
        pinned, self._pinned = self._pinned, set()
        self._residency.unpin_run([self.tokens[position] for position in pinned])

    def _ended(self, position: int, promotion: asyncio.Future[bool]) -> None:
        if self._coming.pop(position, None) is None:  # closed meanwhile
            return
        self._arrived.append(position)
        if len(self._coming) <= self._wakes_at:
            self._change.set()
