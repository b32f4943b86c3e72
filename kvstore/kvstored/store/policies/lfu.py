"""Least frequently used with dynamic ageing, and no time to live: `lfu_ttl` without its clock.

LFU-DA (Arlitt, Cherkasova, Dilley, Friedrich, Jin: "Evaluating content management techniques for web proxy caches",
2000). It is here to show what the time to live is worth. A bad choice for sessions, as `lfu_ttl` tells, and more so:
what was used often and is over stays until as much else has passed.
"""

from __future__ import annotations

from typing import ClassVar

from kvstored.store.blocks import ResidencyView
from kvstored.store.policies.base import PolicySettings
from kvstored.store.policies.lfu_ttl import LfuTtl


class Lfu(LfuTtl):
    """`settings.ttl_s` is not heeded."""

    name: ClassVar[str] = "lfu"

    def __init__(self, residency: ResidencyView, tier: int, settings: PolicySettings | None = None) -> None:
        super().__init__(residency, tier, PolicySettings(ttl_s=None))
