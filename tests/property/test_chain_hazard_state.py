"""A fresh policy takes over what chain-hazard has learned: it goes on as if nothing had happened."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstored.lifecycle import Cause
from kvstored.store.policies import create
from kvstored.store.policies.chain_hazard import ChainHazard
from tests.reference.blocks import Shelf, key
from tests.reference.examples import examples, fewer
from tests.reference.policies import victims
from tests.reference.policy_state import carried, exported

S = 1_000_000_000
CAPACITY = 160
ONE_OFF = 10**6  # block numbers of what is used once
LATER_S = 60  # by then, and after so much as one large prompt, every order is found anew


class Store:
    """A tier of `CAPACITY` blocks. The same seed gives the same requests."""

    def __init__(self, seed: int) -> None:
        self.shelf = Shelf("host")
        self.residency = self.shelf.residency
        self.policy = self.fresh_policy()
        self.chance = random.Random(seed)
        self.fresh = iter(range(10**5))
        self.chats = [[next(self.fresh) for _ in range(3)] for _ in range(30)]
        self.now_ns = S
        self.hits = 0

    def fresh_policy(self) -> ChainHazard:
        policy = create("chain-hazard", self.residency, 0)
        assert isinstance(policy, ChainHazard)
        return policy

    def request(self) -> None:
        chance = self.chance
        self.now_ns += round(chance.expovariate(1.0) * S)
        if chance.random() < 0.5:
            blocks = chance.choice(self.chats)
            blocks += [next(self.fresh) for _ in range(chance.randrange(0, 3))]
            if len(blocks) > 24:
                blocks[2:] = [next(self.fresh) for _ in range(2)]  # another one, after the same system prompt
        else:
            first = ONE_OFF + next(self.fresh) * 100
            blocks = list(range(first, first + chance.randrange(4, 12)))
        self.shelf.now_ns = self.now_ns
        self.hits += len(self.residency.find_keys(0, map(key, blocks)))
        self.shelf.chain(*blocks)
        while len(self.policy) > CAPACITY:
            self.residency.remove(self.policy.next_victim(self.now_ns), Cause.EVICTED, self.now_ns)

    def learn(self) -> None:
        """Learn what waits for a request that can bear it; all ranks are of what is known now."""
        learning = self.policy.follower.book.learning
        while learning.is_due:
            learning.step(self.now_ns / S, 1e6)
        learning.tables.want(np.frombuffer(self.policy.follower.book.chains.cell, np.int32))
        while learning.tables.make():
            pass

    def restart(self, *, remembers: bool) -> None:
        state = exported(self.policy)
        self.policy = self.fresh_policy()
        if remembers:
            carried(state, self.policy, self.now_ns)

    def victims(self) -> list[int]:
        """Return the victims in the order of the chains' worths, as of one moment however often they were looked at."""
        now_ns = self.now_ns + LATER_S * S
        self.policy.requested((), [key(2 * ONE_OFF * 100 + number) for number in range(600)], 0, now_ns)
        return victims(self.policy, now_ns, CAPACITY)

    def renewals(self) -> tuple[int, bool]:
        learning = self.policy.follower.book.learning
        return learning.renewed, learning.is_due

    def worths(self, rows: list[int]) -> list[float]:
        """Return the worths that the order of victims is made of, once it has been asked for."""
        follower = self.policy.follower
        return [follower.candidates[0].value(follower.book.owner[row], follower.now_s) for row in rows]


@settings(max_examples=examples(20), deadline=None)
@given(seed=st.integers(0, 10**6), requests=st.integers(10, 500))
def test_victims_are_ranked_as_before(seed: int, requests: int) -> None:
    stores = [Store(seed), Store(seed)]
    for store in stores:
        for _ in range(requests):
            store.request()
        store.learn()
    stores[1].restart(remembers=True)
    assert stores[0].policy.is_lru == stores[1].policy.is_lru
    renewals = [store.renewals() for store in stores]
    before, after = (store.victims() for store in stores)
    assert sorted(before) == sorted(after)
    if renewals != [store.renewals() for store in stores]:
        return  # the question made a renewal due, which begins with another order of classes
    if not stores[0].policy.is_lru:  # counts are kept in single precision
        assert np.allclose(stores[0].worths(before), stores[0].worths(after), rtol=1e-5, atol=0)
    else:
        assert before == after


@settings(max_examples=examples(10), deadline=None)
@given(seed=st.integers(0, 10**6), requests=st.integers(60, 400))
def test_a_state_that_went_through_a_policy_is_the_same(seed: int, requests: int) -> None:
    store = Store(seed)
    for _ in range(requests):
        store.request()
    before = exported(store.policy)
    store.restart(remembers=True)
    after = exported(store.policy)
    for name in ("learning", "book", "signature", "guard", "shadow", "evidence"):
        assert before[name].tolist() == after[name].tolist()
    assert {each.tobytes() for each in before["steps"]} <= {each.tobytes() for each in after["steps"]}
    named = [{bytes(row["key"]) for row in state["rows"]} for state in (before, after)]
    assert named[0] == named[1]


@pytest.mark.slow
def test_it_hits_as_if_there_had_been_no_restart() -> None:
    hits: dict[bool | None, int] = {}
    for remembers in (None, True, False):
        hits[remembers] = 0
        for seed in range(fewer(48, 0.5)):  # each alone is luck
            store = Store(seed)
            for _ in range(600):
                store.request()
            if remembers is not None:
                store.restart(remembers=remembers)
            store.hits = 0
            for _ in range(60):
                store.request()
            hits[remembers] += store.hits
    assert hits[False] < 0.9 * hits[None], "then there is nothing to remember"
    assert hits[True] >= 0.98 * hits[None]
