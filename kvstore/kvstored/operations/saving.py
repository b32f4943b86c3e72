"""Saving: give blocks that are only in DRAM a durable copy on NVMe, before an operator takes the DRAM copy away.

Asks write-back in portions, because a lane's queue is bounded and refuses what is over it. Never drops anything.
"""

from __future__ import annotations

import asyncio

from kvstored.movement.writeback import WriteBack
from kvstored.residency import Residency

PORTION_BLOCKS = 512


def tokens_in_tier(residency: Residency, tier: int, tenant: int | None = None) -> list[int]:
    """Names of the rows with a readable copy in a tier now, deepest first."""
    rows = [
        row
        for row, mask in enumerate(residency.rows.mask)
        if mask >> tier & 1 and (tenant is None or residency.tenant_of(row) == tenant)
    ]
    rows.sort(key=residency.depth, reverse=True)
    return [residency.token(row) for row in rows]


async def save(
    residency: Residency, writeback: WriteBack, tier: int, timeout_s: float, tenant: int | None = None
) -> tuple[int, int]:
    """Write every block of `tier` that is not durable; (blocks that now are, blocks that are still not).

    A block whose write the medium refuses stays where it is and counts among the second.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    wanted = [token for token in tokens_in_tier(residency, tier, tenant) if not _is_safe(residency, writeback, token)]
    for start in range(0, len(wanted), PORTION_BLOCKS):
        for token in wanted[start : start + PORTION_BLOCKS]:
            row = residency.current(token)
            if row >= 0 and residency.has(row, tier):
                writeback.write_through(row)
        await writeback.flush(max(0.0, deadline - asyncio.get_running_loop().time()))
    left = sum(not _is_safe(residency, writeback, token) for token in wanted)
    return len(wanted) - left, left


def _is_safe(residency: Residency, writeback: WriteBack, token: int) -> bool:
    """Durable, or gone by policy meanwhile."""
    row = residency.current(token)
    return row < 0 or writeback.is_durable(row)
