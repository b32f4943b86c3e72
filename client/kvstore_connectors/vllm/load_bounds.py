"""The upper bound of what a request may load; `restore/choice.py` decides how much it loads. Pure.

Only whole blocks are loaded, never the last token of a prompt (it must be computed for its logits), and only as much of
a slow tier as can be promoted within the time that a step may wait: a block that comes too late costs the step twice.
"""

from __future__ import annotations

from kvstore_client.results import Lookup

_READY_TIERS = frozenset({"host", "gpu"})
_SHARE_OF_DEADLINE = 0.5  # the estimate is one, and the copy needs time too


def restorable_at_most(tokens: int, block_tokens: int) -> int:
    """Return the number of leading whole blocks that a request of `tokens` tokens can load at most. The last token is
    always computed, so a block that ends with it does not count.
    """
    return max(tokens - 1, 0) // block_tokens


def loadable_blocks(found: Lookup, most_blocks: int, deadline_s: float) -> int:
    """Return the number of leading blocks of the lookup `found`, at most `most_blocks`, that can be loaded within
    `deadline_s` seconds.
    """
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
