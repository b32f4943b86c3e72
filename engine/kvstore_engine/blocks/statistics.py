"""What a block space says of itself.

Owns plain numbers.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SpaceStatistics:
    """Blocks by who holds them: used (by a sequence), cached (by the trie alone), free; and what has happened."""

    blocks: int
    used: int
    cached: int
    free: int
    evicted: int
    copied: int
    deduplicated: int
