"""What went through each tier: hits served from it, blocks promoted out of it, demoted into it, evicted from it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TierFlow:
    hits: int = 0
    promoted_blocks: int = 0
    demoted_blocks: int = 0
    evicted_blocks: int = 0
    expired_blocks: int = 0


class Flows:
    """One `TierFlow` a tier, by its position in the residency index."""

    def __init__(self, tiers: int) -> None:
        self.tiers = [TierFlow() for _ in range(tiers)]

    def hit(self, tier: int, blocks: int) -> None:
        if blocks and tier < len(self.tiers):
            self.tiers[tier].hits += blocks
