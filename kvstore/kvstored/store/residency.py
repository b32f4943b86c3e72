"""The making of the block index of a store from its tiers' `TierInfo`: which tiers clients map, which is durable, which
are memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore_tiers.base import Tier
from kvstored.config import Config
from kvstored.store.blocks import Residency
from kvstored.tier_set import TierSet


def make_residency(config: Config, tiers: Sequence[Tier]) -> Residency:
    """Return an empty block index over `tiers`, fastest first: tiers in memory, then a durable one, then remote ones.
    Raises ValueError if clients map none of them.
    """
    infos = [tier.info for tier in tiers]
    durable = next((position for position, info in enumerate(infos) if info.is_durable), -1)
    mapped = [info.is_mapped for info in infos].index(True)
    return Residency(
        [info.name for info in infos],
        ghost_keys=config.limits.ghosts_per_tenant,
        durable=durable,
        in_memory=sum(info.is_memory for info in infos),
        mapped=mapped,
        exported=TierSet.of(*(position for position, info in enumerate(infos[:mapped]) if info.is_exported)),
    )
