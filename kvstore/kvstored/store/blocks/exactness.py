"""Exactness is the part of a copy's identity that says whether its payload is what was put, or within an error bound
of it.

The module answers, from the optional columns of the index, what an exact reader may have, and which blocks may get
lossy copies. Exactness is known for each copy: a block may have an exact copy in DRAM and a lossy copy on NVMe, and a
lossy copy that is promoted stays lossy. Invariant: a copy is noted as lossy before it is published. A store without a
lossy copy pays one test of a flag.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Any

from kvstored.store.blocks.rows import RowColumns, TierCopies
from kvstored.tier_set import MEMBERS, NO_TIERS, TIER_SETS, TierSet

_FLOAT32, _BITS = Struct("<f"), Struct("<I")


class Exactness:
    """The answers for the blocks of `rows`, whose copies in each tier are `copies`; clients map the tier at
    `mapped`."""

    def __init__(self, rows: RowColumns, copies: Sequence[TierCopies], mapped: int) -> None:
        self._rows, self._copies, self._mapped = rows, copies, mapped
        self.tenants: set[int] = set()  # that allow lossy copies
        self.has_lossy = False  # now, or at some time before

    # Copies

    def note(self, row: int, tier: int, error: float) -> None:
        """Note that the copy in `tier`, which is not published yet, is lossy with an error of at most `error`."""
        self._copies[tier].optional.set("error", row, *_BITS.unpack(_FLOAT32.pack(error)))
        self.has_lossy = True

    def error(self, row: int, tier: int) -> float:
        """Return the error bound of the copy in `tier`; 0 when its payload is what was put."""
        if not self.has_lossy:
            return 0.0
        return float(*_FLOAT32.unpack(_BITS.pack(self._copies[tier].optional.get("error", row))))

    def is_lossy(self, row: int, tier: int) -> bool:
        """Return whether `tier` has a copy whose payload is not what was put."""
        return bool(self._copies[tier].optional.get("error", row))

    def exact_tiers(self, row: int) -> TierSet:
        """Return the tiers with a readable copy whose payload is what was put."""
        tiers = TIER_SETS[self._rows.mask[row]]
        return TIER_SETS[tiers & ~self.lossy_tiers(row)] if self.has_lossy else tiers

    def lossy_tiers(self, row: int) -> TierSet:
        """Return the tiers with a readable copy whose payload is not what was put."""
        if not self.has_lossy:
            return NO_TIERS
        lossy = NO_TIERS
        for tier in MEMBERS[self._rows.mask[row]]:
            if self.is_lossy(row, tier):
                lossy = lossy.with_tier(tier)
        return lossy

    def best_tiers(self, row: int) -> TierSet:
        """Return the tiers with exact copies; where there is none, the tiers with lossy ones."""
        tiers = TIER_SETS[self._rows.mask[row]]
        return self.exact_tiers(row) or tiers if self.has_lossy else tiers

    def is_coming(self, row: int) -> bool:
        """Return whether a lossy copy is being filled."""
        return self.has_lossy and any(self.is_lossy(row, tier) for tier in MEMBERS[self._rows.filling[row]])

    # Readers

    def served_tiers(self, row: int) -> TierSet:
        """Return the tiers from which an exact reader may have the block: none while the copy in the mapped tier is
        lossy, since a block has one copy there."""
        lossy = self.lossy_tiers(row)
        return NO_TIERS if self._mapped in MEMBERS[lossy] else TIER_SETS[self._rows.mask[row] & ~lossy]

    def masks(self, *, exact: bool) -> Sequence[int]:
        """Return for each row the set of tiers from which a reader may have it. Use it in the same turn of the loop."""
        return _ServedTiers(self) if exact and self.has_lossy else self._rows.mask

    # Blocks

    def accept_lossy(self, row: int, *, accepts: bool) -> None:
        """Set whether whoever put the block, and its tenant, accept lossy copies of it."""
        self._rows.optional.set("takes_lossy", row, accepts)

    def is_accepted(self, row: int) -> bool:
        """Return whether `accept_lossy` said so."""
        return bool(self._rows.optional.get("takes_lossy", row))

    def takes_lossy(self, row: int, tenant: int) -> bool:
        """Return whether copies of the block of `tenant` may be made lossy: that was accepted, or it has lossy copies
        alone."""
        if tenant not in self.tenants:
            return False
        return self.is_accepted(row) or not self.exact_tiers(row)


class _ServedTiers(Sequence[int]):
    """The column `mask` of the rows as an exact reader sees it."""

    def __init__(self, exactness: Exactness) -> None:
        self._exactness = exactness

    def __len__(self) -> int:
        return len(self._exactness._rows.mask)

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return [self._exactness.served_tiers(each) for each in range(len(self))[row]]
        return self._exactness.served_tiers(row)
