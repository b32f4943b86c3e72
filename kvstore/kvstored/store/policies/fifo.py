"""First in, first out, leaf-first: a use changes nothing.

The yardstick that shows what recency is worth. It needs no work at all on a hit, which is why caches with many threads
like it. A bad choice nearly everywhere here: a prompt that all sessions share is evicted as soon as a private chat of
the same age, but for its children, which hold it (Yang, Zhang, Qiu, Yue, Rashmi: "FIFO queues are all you need for
cache eviction", SOSP 2023, shows when FIFO with a little more is enough: see `s3fifo`).
"""

from __future__ import annotations

from kvstored.store.blocks import ResidencyView
from kvstored.store.policies.base import PolicySettings
from kvstored.store.policies.lru import Lru


def fifo(residency: ResidencyView, tier: int, settings: PolicySettings | None = None, name: str = "") -> Lru:
    """The order of LRU, in which no use moves a block. Cold is the older half."""
    return Lru(residency, tier, settings, name, counts_uses=False, warm_share=0.5)
