"""LFU with ageing and a time to live: what sets it apart from LRU."""

import pytest

from kvstore_simulator.policies import create
from kvstored.lifecycle import Cause
from tests.reference.blocks import Shelf
from tests.reference.policies import victims

S = 1_000_000_000


def evicted_before(uses: int, most: int) -> int | None:
    """Return how many chains, used once each, are evicted before one of `uses` uses; None when `most` are."""
    shelf = Shelf()
    policy = create("lfu-ttl", shelf.residency, 0)
    for _ in range(uses):
        popular = shelf.chain(0)[0]
    for evicted in range(most):
        shelf.chain(evicted + 1)
        victim = policy.next_victim(1)
        if victim == popular:
            return evicted
        shelf.residency.remove(victim, Cause.EVICTED, 1)
    return None


def test_frequency_outranks_recency() -> None:
    shelf = Shelf()
    policy = create("lfu-ttl", shelf.residency, 0)
    for _ in range(3):
        often = shelf.chain(0)[0]
    once = shelf.chain(1)[0]
    assert victims(policy, 1, 9) == [once, often]


def test_what_was_popular_once_gives_way_after_some_generations() -> None:
    assert evicted_before(uses=5, most=49) == 4, "K = 5 of the popular one against K = 1, 2, 3, 4, then 5 and younger"


def test_use_is_capped_so_that_nothing_stays_for_ever() -> None:
    assert evicted_before(uses=1000, most=69) is not None


@pytest.mark.parametrize("chains", [200])
def test_many_distinct_keys_do_not_pile_up(chains: int) -> None:
    shelf = Shelf()
    policy = create("lfu-ttl", shelf.residency, 0)
    for number in range(chains):
        for _ in range(number % 90):
            shelf.chain(number)
    left = 0
    while (row := policy.next_victim(1)) >= 0:
        shelf.residency.remove(row, Cause.EVICTED, 1)
        left += 1
    assert left == sum(1 for number in range(chains) if number % 90)
