"""How much of what the store has a request may load at most; how much it does, `restore/choice.py` decides. Pure.

Whole blocks only, never the last token of a prompt (something must be computed for its logits), and no more of a slow
tier than can be promoted within the time that a step may wait: a block that does not make it costs the step twice.
"""

from __future__ import annotations

from kvstore_client.results import Lookup

_READY_TIERS = frozenset({"host", "gpu"})
_SHARE_OF_DEADLINE = 0.5  # the estimate is one, and the copy needs time too


def restorable_at_most(tokens: int, block_tokens: int) -> int:
    """Leading whole blocks that a request of so many tokens can do without computing."""
    return max(tokens - 1, 0) // block_tokens


def loadable_blocks(found: Lookup, most_blocks: int, deadline_s: float) -> int:
    """Leading blocks of `found` that can be had within the deadline, `most_blocks` at most."""
    slow = sum(tier not in _READY_TIERS for tier in found.tiers[: found.blocks])
    blocks = min(found.blocks, most_blocks)
    if not slow or found.estimated_load_s <= deadline_s * _SHARE_OF_DEADLINE:
        return blocks
    affordable = int(slow * deadline_s * _SHARE_OF_DEADLINE / found.estimated_load_s)
    for block, tier in enumerate(found.tiers[:blocks]):
        affordable -= tier not in _READY_TIERS
        if affordable < 0:
            return block
    return blocks
