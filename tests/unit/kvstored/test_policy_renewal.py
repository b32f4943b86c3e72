"""A policy that is made anew in steps, while blocks come, go and are used between the steps."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from kvstored.clock import NS_PER_S
from kvstored.lifecycle import Cause
from kvstored.policy_names import POLICIES
from kvstored.state.renewal import Renewal
from kvstored.state.step_runner import StepRunner
from kvstored.store.policies import EvictionPolicy, create, create_empty
from kvstored.store.policies.lru import Lru
from tests.reference.blocks import Shelf, key
from tests.reference.examples import each_nth

SESSIONS, LENGTH = 60, 6
END_NS = 400 * NS_PER_S


class Interrupted(StepRunner):
    """Steps between which `others` run."""

    def __init__(self, others: Callable[[], None]) -> None:
        super().__init__()
        self._others = others

    async def run_one(self, step):  # type: ignore[no-untyped-def]
        found = await super().run_one(step)
        self._others()
        return found


def stored(chance: random.Random, tenants: int) -> Shelf:
    """A tier with sessions that were used at different times, each of one tenant."""
    shelf = Shelf("host", tenants=tenants)
    for session in range(SESSIONS):
        shelf.now_ns += NS_PER_S
        shelf.chain(*range(session * 100, session * 100 + chance.randint(1, LENGTH)), tenant=session % tenants)
    for session in chance.sample(range(SESSIONS), SESSIONS // 2):
        shelf.now_ns += NS_PER_S
        shelf.chain(session * 100, tenant=session % tenants)
    return shelf


def renewed(shelf: Shelf, name: str, others: Callable[[], None]) -> EvictionPolicy:
    former = create(name, shelf.residency, 0)
    policy = create_empty(name, shelf.residency, 0)
    asyncio.run(Renewal(shelf.residency, policy).run(Interrupted(others)))
    shelf.residency.listen(0, policy)
    assert len(policy) == len(former)
    return policy


def drained(shelf: Shelf, policy: EvictionPolicy) -> list[bytes]:
    """Evict all; return the keys in order."""
    gone = []
    while (row := policy.next_victim(shelf.now_ns + NS_PER_S)) >= 0:
        gone.append(shelf.residency.key(row))
        shelf.residency.remove(row, Cause.EVICTED, shelf.now_ns)
    return gone


@pytest.mark.parametrize("tenants", [1, 3])
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_it_evicts_in_the_order_of_one_that_was_made_at_once(name: str, tenants: int) -> None:
    shelf, like = (stored(random.Random(4), tenants) for _ in range(2))
    at_once = create(name, like.residency, 0)
    assert drained(shelf, renewed(shelf, name, lambda: None)) == drained(like, at_once)


@pytest.mark.parametrize("seed", each_nth(range(12), 4))
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_blocks_come_go_and_are_used_between_the_steps(name: str, seed: int) -> None:
    chance = random.Random(seed)
    tenants = 1 + seed % 3
    shelf = stored(chance, tenants)
    fresh = iter(range(100_000, 200_000, 100))

    def others() -> None:
        if shelf.now_ns > END_NS:
            return
        for _ in range(chance.randint(0, 3)):
            shelf.now_ns += NS_PER_S
            what, session = chance.random(), chance.randrange(SESSIONS)
            row = shelf.residency.find(session % tenants, key(session * 100))
            if what < 0.4:
                first = next(fresh)
                shelf.chain(*range(first, first + chance.randint(1, 3)), tenant=session % tenants)
            elif what < 0.7 and row >= 0:
                shelf.chain(session * 100, tenant=session % tenants)
            elif row >= 0 and shelf.residency.may_forget(row):
                shelf.residency.remove(row, Cause.EVICTED, shelf.now_ns)

    policy = renewed(shelf, name, others)
    if isinstance(policy, Lru):
        for queue, index in zip(policy.queues.of, shelf.residency.tenants, strict=True):
            assert list(queue) == sorted(index.readable.values(), key=lambda row: by_use(shelf, row))
    drained(shelf, policy)
    assert not len(policy) and not any(len(index.readable) for index in shelf.residency.tenants)


def by_use(shelf: Shelf, row: int) -> tuple[int, int]:
    return shelf.residency.last_access_ns(row), -shelf.residency.depth(row)
