"""The policy chain-hazard lets events wait for the next turn of the event loop, or for the next decision."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvstored.lifecycle import Cause
from kvstored.policy_names import CHAIN_HAZARD
from kvstored.store.policies import RequestContext, create
from kvstored.store.policies.base import PolicySettings
from kvstored.store.policies.chain_hazard import _WAITING_MAX, ChainHazard
from tests.reference.blocks import Shelf, key
from tests.reference.examples import each_nth
from tests.reference.policies import trust_at_once

S = 1_000_000_000


def test_a_request_does_not_wait_for_what_the_policy_learns_afterwards() -> None:
    """The daemon has that done in the next turn of its event loop."""
    owed: list[Callable[[], None]] = []
    shelf = Shelf()
    policy = create(CHAIN_HAZARD, shelf.residency, 0, PolicySettings(later=owed.append))
    assert isinstance(policy, ChainHazard)
    learning = policy.follower.book.learning
    for number in range(60):
        shelf.now_ns += S
        shelf.chain(*range(100 * number, 100 * number + 80))
    assert len(owed) == 1, "all requests in one turn"
    assert learning.is_due and not learning.renewed
    owed.pop()()
    assert learning.renewed
    shelf.chain(*range(80))
    assert len(owed) == 1


def test_a_request_waits_for_the_next_turn_or_the_next_decision() -> None:
    owed: list[Callable[[], None]] = []
    shelf = Shelf()
    policy = create(CHAIN_HAZARD, shelf.residency, 0, PolicySettings(later=owed.append))
    assert isinstance(policy, ChainHazard)
    learning = policy.follower.book.learning
    taken_in = [learning.requests]
    rows = shelf.chain(1, 2, 3)
    taken_in.append(learning.requests)
    assert policy.next_victim(1) == rows[-1]
    taken_in.append(learning.requests)
    shelf.chain(1, 2, 3, 4)
    taken_in.append(learning.requests)
    assert len(owed) == 1
    owed.pop()()
    taken_in.append(learning.requests)
    shelf.chain(*range(10, 10 + 2 * _WAITING_MAX))  # a long one does not wait: nor should a decision, for all of them
    taken_in.append(learning.requests)
    assert taken_in == [0, 0, 1, 1, 2, 3]


@pytest.mark.parametrize("seed", each_nth(range(4), 4))
def test_whether_events_wait_changes_no_decision(seed: int) -> None:
    def decisions(*, waits: bool) -> list[tuple[int, bool]]:
        chance, held = random.Random(seed), dict[int, None]()
        owed: list[Callable[[], None]] = []
        found: list[tuple[int, bool]] = []
        shelf = Shelf(tenants=2)
        policy = create(CHAIN_HAZARD, shelf.residency, 0, PolicySettings(later=owed.append))
        assert isinstance(policy, ChainHazard)
        trust_at_once(policy)
        for number in range(400):
            shelf.now_ns += chance.choice((0, S))
            chat, length, tenant = chance.randrange(30), chance.randrange(1, 9), chance.randrange(2)
            if chance.random() < 0.3:
                policy.expect(RequestContext(number, 2048))
            held.update(dict.fromkeys(shelf.chain(*range(100 * chat, 100 * chat + length), tenant=tenant)))
            if chance.random() < 0.5:
                rows = shelf.residency.find_keys(tenant, [key(100 * chat), key(100 * chat + 1)])
                shelf.residency.request_run(tenant, rows, [key(number + 10_000)], shelf.now_ns)
            if not waits:
                assert len(policy) == len(held)
            if chance.random() < 0.1:
                lost = chance.choice(list(held))
                del held[lost]
                shelf.residency.remove(lost, Cause.INVALIDATED, shelf.now_ns)
            while len(held) > 100:
                victim = policy.next_victim(shelf.now_ns)
                found.append((victim, policy.declines(tenant, key(number + 9_999), 1, victim, shelf.now_ns)))
                del held[victim]
                shelf.residency.remove(victim, Cause.EVICTED, shelf.now_ns)
            while owed and chance.random() < 0.4:
                owed.pop()()
        return found

    assert decisions(waits=True) == decisions(waits=False)
