"""The chain policy with its own order in force from the first request on: it must reach each block that may leave."""

from __future__ import annotations

from hypothesis import settings
from hypothesis.stateful import invariant

from kvstored.store.policies.chain_hazard import ChainHazard
from tests.property.test_policies_model import HOST, AnyPolicy
from tests.reference.examples import examples
from tests.reference.policies import trust_at_once


class ChainsFromTheStart(AnyPolicy):
    policy_name = "chain-hazard"

    def __init__(self) -> None:
        super().__init__()
        assert isinstance(self.policy, ChainHazard)
        trust_at_once(self.policy)

    @invariant()
    def tails_are_rows_of_their_chain_in_the_tier(self) -> None:
        assert isinstance(self.policy, ChainHazard)
        book = self.policy.follower.book
        owned = {}
        for row in self.stamps:
            if book.owner[row] >= 0:
                owned.setdefault(book.owner[row], []).append(row)
        for chain in range(book.chains.slots):
            tail = book.chains.tail[chain]
            assert tail < 0 or tail in owned.get(chain, ()), "a tail that is not the chain's"
        for row in self.stamps:
            assert self.residency.has(row, HOST)


class ChainsGuarded(AnyPolicy):
    policy_name = "chain-hazard"


class ChainsOfWindows(ChainsFromTheStart):
    window = 2


for _machine in (ChainsFromTheStart, ChainsGuarded, ChainsOfWindows):
    _machine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=50, deadline=None)
TestChains = ChainsFromTheStart.TestCase
TestChainsGuarded = ChainsGuarded.TestCase
TestChainsOfWindows = ChainsOfWindows.TestCase
