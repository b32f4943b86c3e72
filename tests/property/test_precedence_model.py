"""The order of precedence in docs/policies.md, over random chains, leases, shares and priorities of one tier."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstored.clock import ManualClock
from kvstored.lifecycle import Cause
from kvstored.store.policies import Share, create
from kvstored.store.policies.ranked import Priorities
from kvstored.store.transfer.victims import OrphanQueue, Victims
from tests.reference.blocks import BLOCK_BYTES, Shelf, key
from tests.reference.tiers import HOST

TENANTS, MAX_CHAINS = 3, 5
CHAINS = st.lists(
    st.tuples(st.integers(0, TENANTS - 1), st.integers(1, 4), st.sampled_from([0, 0, -2, 3]), st.booleans()),
    min_size=1, max_size=MAX_CHAINS,
)  # fmt: skip
SHARES = st.lists(
    st.builds(
        lambda least, more, weight: Share(
            least * BLOCK_BYTES, None if more is None else (least + more) * BLOCK_BYTES, weight
        ),
        st.integers(0, 3), st.none() | st.integers(0, 4), st.sampled_from([0, 1, 2, 5]),
    ),
    min_size=TENANTS, max_size=TENANTS,
)  # fmt: skip


@pytest.mark.parametrize("name", ["lru", "lfu-ttl", "s3-fifo", "chain-hazard"])
@given(chains=CHAINS, shares=SHARES)
@example(chains=[(0, 1, 3, False), (1, 1, -2, False)], shares=[Share(max_bytes=0), Share(), Share()])
@example(chains=[(0, 1, 0, False), (1, 1, -2, False)], shares=[Share(max_bytes=0), Share(), Share()])
def test_victims_leave_in_the_order_of_precedence(
    name: str, chains: list[tuple[int, int, int, bool]], shares: list[Share]
) -> None:
    shelf = Shelf(tenants=TENANTS)
    residency = shelf.residency
    policy, priorities = create(name, residency, HOST), Priorities(residency)
    priorities.follow(policy)
    for tenant, share in enumerate(shares):
        policy.set_share(tenant, share)
    held: set[int] = set()
    for number, (tenant, length, priority, is_held) in enumerate(chains):
        rows = shelf.chain(*range(10 * number, 10 * number + length), tenant=tenant)
        for row in rows:
            priorities.set(row, priority, number)
        if is_held:
            residency.pin(rows[0])
            held.add(rows[0])
    victims = Victims(policy, residency, OrphanQueue(residency), priorities, ManualClock(100))
    is_weighted = any(share.weight for share in shares)
    while (row := victims.next(())) >= 0:
        of_tenant: dict[int, int] = defaultdict(int)
        candidates = []
        for at in range(residency.rows.capacity):
            if residency.tier_mask(at):
                of_tenant[residency.tenant_of(at)] += 1
                candidates += [at] if residency.is_evictable(at, HOST) else []
        mine = residency.tenant_of(row)

        def spare(tenant: int, counts: dict[int, int] = of_tenant) -> int:
            return counts[tenant] * BLOCK_BYTES - shares[tenant].min_bytes

        def is_over(tenant: int, counts: dict[int, int] = of_tenant) -> bool:
            return shares[tenant].max_bytes is not None and counts[tenant] * BLOCK_BYTES > (
                shares[tenant].max_bytes or 0
            )

        assert row in candidates and row not in held, "a lease and a child hold"
        assert spare(mine) >= BLOCK_BYTES, "nobody falls below its minimum"
        others = {residency.tenant_of(at) for at in candidates if spare(residency.tenant_of(at)) >= BLOCK_BYTES}
        if is_weighted:

            def claim(tenant: int) -> tuple[bool, float]:
                return is_over(tenant), spare(tenant) / (shares[tenant].weight or 1)

            assert claim(mine) == max(map(claim, others)), "the one that holds most for its weight"
            others = {mine}
        elif over := {tenant for tenant in others if is_over(tenant)}:
            assert mine in over, "a tenant over its maximum loses blocks first"
            others = over if len(over) == 1 else {mine}
        priority = residency.priority(row)
        lower = [at for at in candidates if residency.tenant_of(at) in others and residency.priority(at) < priority]
        assert not [at for at in lower if residency.priority(at) < 0 or priority > 0], "a lower priority first"
        for taken in residency.remove(row, Cause.EVICTED, 100):
            assert taken.tier == HOST
    here = [at for at in range(residency.rows.capacity) if residency.tier_mask(at)]
    for at in here:
        if residency.is_evictable(at, HOST):
            tenant = residency.tenant_of(at)
            blocks = sum(residency.tenant_of(other) == tenant for other in here)
            assert (blocks - 1) * BLOCK_BYTES < shares[tenant].min_bytes, "nothing else may stay"


def test_what_is_above_the_minima_settles_by_weight() -> None:
    shelf = Shelf(tenants=2)
    policy, priorities = create("lru", shelf.residency, HOST), Priorities(shelf.residency)
    policy.set_share(0, Share(min_bytes=10 * BLOCK_BYTES, weight=3))
    policy.set_share(1, Share(weight=1))
    victims = Victims(policy, shelf.residency, OrphanQueue(shelf.residency), priorities, ManualClock(1))
    for number in range(400):
        shelf.chain(number, tenant=0 if number % 8 == 0 else 1)  # the other floods
        if number >= 50:
            shelf.residency.remove(victims.next(()), Cause.EVICTED, number)
    assert [shelf.residency.tenant_blocks(tenant) for tenant in (0, 1)] == [40, 10]
    assert shelf.residency.find(0, key(392)) >= 0
