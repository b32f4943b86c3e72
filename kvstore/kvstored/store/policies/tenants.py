"""Which tenant gives up a block: what tenants are owed and allowed goes before the order of their blocks."""

from __future__ import annotations

from collections.abc import Callable

from kvstored.store.policies.base import Policy, Share

_NO_SHARE = Share()


def choose_tenant(
    policy: Policy,
    tenants: int,
    *,
    first: Callable[[int], int],
    is_expired: Callable[[int], bool],
    standing: Callable[[int], float],
) -> int:
    """The row that leaves the policy's tier next, over all tenants, or -1.

    `first`: a tenant's row that would be evicted first, or -1. Of the first rows of two tenants that are otherwise
    equal, the one of lower `standing` leaves.
    """
    residency, tier = policy.residency, policy.tier
    chosen = -1
    smallest: tuple[bool, int, bool, float] | None = None
    for number in range(tenants):
        share = policy.shares.get(number, _NO_SHARE)
        held_bytes = residency.tenant_bytes(number, tier)
        row = first(number)
        if row < 0 or held_bytes - residency.copies[tier].nbytes[row] < share.min_bytes:
            continue
        within = share.max_bytes is None or held_bytes <= share.max_bytes
        order = (within, share.priority, not is_expired(row), standing(row))
        if smallest is None or order < smallest:
            chosen, smallest = row, order
    return chosen
