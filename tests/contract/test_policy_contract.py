"""Every eviction policy keeps its contract, for any victim order. See kvstored.store.policies.base
for the obligations.
"""

import pytest

from kvstore_simulator.policies import POLICIES, create
from kvstored.lifecycle import Cause
from kvstored.store.policies import POLICIES as DAEMON
from kvstored.store.policies import WITH_WORTH, EvictionPolicy, PolicySettings, ResidencyClass, Share, Weighs
from tests.reference.blocks import BLOCK_BYTES, Shelf, key
from tests.reference.policies import trust_at_once, victims

S = 1_000_000_000
HOST, NVME = 0, 1


@pytest.fixture(params=sorted(POLICIES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def evict_all(shelf: Shelf, policy: EvictionPolicy, *, tenant: int | None = None) -> list[int]:
    """Evict until nothing may leave; the rows in order. Removal by choice crashes unless it is leaf-first."""
    order: list[int] = []
    while (row := policy.next_victim(shelf.now_ns, tenant=tenant)) >= 0:
        order.append(row)
        shelf.residency.remove(row, Cause.EVICTED, shelf.now_ns)
    return order


def test_it_names_every_block_leaves_first(name: str) -> None:
    shelf = Shelf()
    policy = create(name, shelf.residency, HOST)
    for leaf in (10, 11, 12):
        shelf.chain(0, 1, leaf)
    assert len(policy) == 5
    order = evict_all(shelf, policy)
    assert len(order) == 5
    assert shelf.residency.rows.live == 0
    assert len(policy) == 0
    assert policy.next_victim(shelf.now_ns) == -1


@pytest.mark.parametrize("name", DAEMON)
def test_its_name_is_the_one_it_is_known_by(name: str) -> None:
    assert create(name, Shelf().residency, HOST).name == name


def test_asking_twice_gives_one_answer(name: str) -> None:
    shelf = Shelf()
    policy = create(name, shelf.residency, HOST)
    shelf.chain(0, 1)
    shelf.chain(5)
    first = policy.next_victim(1)
    assert policy.next_victim(1) == first
    second = policy.next_victim(1, exclude={first})
    assert second not in (-1, first)
    assert policy.next_victim(1) == first
    assert victims(policy, 1, 10)[:2] == [first, second]


def test_order_of_one_time_blocks_is_the_order_of_use_tail_first(name: str) -> None:
    shelf = Shelf()
    policy = create(name, shelf.residency, HOST)
    first, second = shelf.chain(0, 1), shelf.chain(10, 11)
    assert evict_all(shelf, policy) == [*first[::-1], *second[::-1]]


def test_pinned_blocks_stay_and_return_to_their_place(name: str) -> None:
    shelf = Shelf()
    policy = create(name, shelf.residency, HOST)
    (a,), (b,), (c,) = shelf.chain(0), shelf.chain(1), shelf.chain(2)
    shelf.residency.pin(a)
    shelf.residency.pin(b)
    assert policy.next_victim(1) == c
    shelf.residency.unpin(b)
    assert policy.next_victim(1) == b
    shelf.residency.unpin(a)
    assert policy.next_victim(1) == a
    assert evict_all(shelf, policy) == [a, b, c]


def test_a_pinned_leaf_holds_its_ancestors_in_the_last_tier(name: str) -> None:
    shelf = Shelf()
    policy = create(name, shelf.residency, HOST)
    rows = shelf.chain(*range(5))
    shelf.residency.pin(rows[-1])
    assert policy.next_victim(1) == -1
    shelf.residency.unpin(rows[-1])
    assert evict_all(shelf, policy) == rows[::-1]


def test_a_whole_chain_can_be_demoted(name: str) -> None:
    shelf = Shelf("host", "nvme")
    host, nvme = create(name, shelf.residency, HOST), create(name, shelf.residency, NVME)
    rows = shelf.chain(*range(6))
    moved: list[int] = []
    while (row := host.next_victim(1)) >= 0:
        shelf.residency.attach(row, NVME, shelf.slot(), 1)
        shelf.residency.detach(row, HOST)
        moved.append(row)
    assert moved == rows[::-1]
    assert (len(host), len(nvme)) == (0, 6)
    assert evict_all(shelf, nvme) == rows[::-1]


def test_the_last_tier_keeps_a_parent_whose_child_is_above(name: str) -> None:
    shelf = Shelf("host", "nvme")
    nvme = create(name, shelf.residency, NVME)
    parent = shelf.store(0, tier=NVME)
    child = shelf.store(1, 0, tier=HOST, depth=1)
    assert nvme.next_victim(1) == -1
    shelf.residency.attach(parent, HOST, shelf.slot(), 1)
    assert nvme.next_victim(1) == parent, "the host has a copy now"
    shelf.residency.detach(parent, HOST)
    assert nvme.next_victim(1) == -1
    shelf.residency.remove(child, Cause.EVICTED, 1)
    assert nvme.next_victim(1) == parent


def test_a_used_block_outlives_an_unused_one(name: str) -> None:
    if name == "fifo":
        pytest.skip("that a use changes nothing is what FIFO is")
    shelf = Shelf()
    policy = create(name, shelf.residency, HOST)
    (a,), (b,) = shelf.chain(0), shelf.chain(1)
    shelf.chain(0)
    assert evict_all(shelf, policy) == [b, a]


def test_a_row_used_again_for_another_block_starts_anew(name: str) -> None:
    shelf = Shelf()
    policy = create(name, shelf.residency, HOST)
    (a,) = shelf.chain(0)
    shelf.residency.pin(a)
    assert policy.next_victim(1) == -1
    shelf.residency.remove(a, Cause.CORRUPT, 1)
    (b,) = shelf.chain(1)
    assert b == a
    assert policy.next_victim(1) == b
    (c,) = shelf.chain(2)
    assert evict_all(shelf, policy) == [b, c]


def test_a_policy_that_comes_later_knows_what_is_there(name: str) -> None:
    shelf = Shelf()
    first = shelf.chain(0, 1)
    shelf.now_ns += 1
    second = shelf.chain(10, 11)
    policy = create(name, shelf.residency, HOST)
    assert evict_all(shelf, policy) == [*first[::-1], *second[::-1]]


def test_over_maximum_then_order(name: str) -> None:
    shelf = Shelf(tenants=2)
    policy = create(name, shelf.residency, HOST)
    policy.set_share(1, Share(max_bytes=BLOCK_BYTES))
    within = [shelf.chain(number, tenant=0)[0] for number in (0, 1)]
    over = [shelf.chain(number, tenant=1)[0] for number in (0, 1)]
    assert evict_all(shelf, policy) == [over[0], *within, over[1]]


def test_a_tenant_without_blocks_loses_none_of_others(name: str) -> None:
    shelf = Shelf(tenants=2)
    policy = create(name, shelf.residency, HOST)
    (row,) = shelf.chain(0)
    assert policy.next_victim(1, tenant=1) == -1
    assert policy.next_victim(1, tenant=0) == row


def test_a_minimum_protects_from_others_and_not_from_its_owner(name: str) -> None:
    shelf = Shelf(tenants=2)
    policy = create(name, shelf.residency, HOST)
    policy.set_share(0, Share(min_bytes=2 * BLOCK_BYTES))
    mine = [shelf.chain(number, tenant=0)[0] for number in range(3)]
    other = shelf.chain(9, tenant=1)[0]
    assert evict_all(shelf, policy) == [mine[0], other]
    assert evict_all(shelf, policy, tenant=0) == mine[1:]
    assert policy.next_victim(1, tenant=1) == -1


def test_classes_are_distinguished_and_counted(name: str) -> None:
    shelf = Shelf()
    policy = create(name, shelf.residency, HOST)
    old = shelf.chain(*range(100, 140))
    shelf.now_ns = 3_600_000_000_000
    for _ in range(40):
        shelf.now_ns += 5_000_000_000
        new = shelf.chain(0, 1)
    now_ns = shelf.now_ns
    assert policy.residency_class(new[0], now_ns) is ResidencyClass.HOT
    assert policy.residency_class(old[0], now_ns) is ResidencyClass.COLD
    counts = policy.class_counts(now_ns)
    assert sum(counts.values()) == len(policy) == 42
    for kind in ResidencyClass:
        assert counts[kind] == sum(policy.residency_class(row, now_ns) is kind for row in old + new)
    nbytes = policy.class_bytes(now_ns)
    assert nbytes == {kind: count * BLOCK_BYTES for kind, count in counts.items()}


def test_it_does_not_stumble_over_the_same_blocks_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Amortised cost: with many pinned blocks ahead of the free ones, questions asked of residency stay
    linear.
    """
    shelf = Shelf()
    policy = create(name, shelf.residency, HOST)
    pinned = [shelf.chain(number)[0] for number in range(500)]
    free = [shelf.chain(number)[0] for number in range(500, 1000)]
    for row in pinned:
        shelf.residency.pin(row)
    asked = 0
    is_evictable = shelf.residency.is_evictable

    def counting(row: int, tier: int) -> bool:
        nonlocal asked
        asked += 1
        return is_evictable(row, tier)

    monkeypatch.setattr(shelf.residency, "is_evictable", counting)
    assert evict_all(shelf, policy) == free
    assert asked <= 2100


@pytest.mark.parametrize("limit", [1, 3, 50])
def test_victims_named_together_are_those_named_one_by_one(name: str, limit: int) -> None:
    """Each run is a piece of one chain, and what is left to be named is the same after it."""
    left: list[list[int]] = []
    for at_once in (1, limit):
        shelf = Shelf()
        policy = create(name, shelf.residency, HOST)
        for turn in range(3):
            for number in range(12):
                shelf.now_ns += S
                shelf.chain(*range(100 * number, 100 * number + 5 + 4 * turn * (number % 3)))
        order: list[int] = []
        while run := policy.next_victims(shelf.now_ns, at_once):
            assert len(run) <= at_once
            assert [shelf.residency.parent(row) for row in run[:-1]] == run[1:]
            shelf.residency.remove_run(run, HOST, Cause.EVICTED, shelf.now_ns)
            order += run
        assert len(shelf.residency) == len(policy) == 0
        left.append(order)
    assert left[0] == left[1]


def test_what_is_kept_by_worth_leaves_leaves_first(name: str) -> None:
    shelf = Shelf(tenants=2)
    policy = create(name, shelf.residency, HOST, PolicySettings(keep_worth=1e9))
    trust_at_once(policy)
    rows = [shelf.chain(0, 1, tenant=tenant) for tenant in (0, 1)]
    pinned = shelf.chain(5, 6)
    shelf.residency.pin(pinned[-1])
    left = 0
    while isinstance(policy, Weighs) and (found := policy.below_keep_worth(S, 10)):
        assert found == policy.below_keep_worth(S, 10), "asking changes nothing"
        for row in found:
            shelf.residency.remove(row, Cause.EXPIRED, S)
        left += len(found)
    assert left == (4 if name in WITH_WORTH else 0)
    assert policy.next_victim(S) == (-1 if name in WITH_WORTH else rows[0][-1])
    assert isinstance(policy, Weighs) == (name in WITH_WORTH)
    if isinstance(policy, Weighs):
        assert policy.expected_uses_per_hour(pinned[0], S) is not None


@pytest.mark.parametrize("kind", ["policy", "admission"])
def test_an_unknown_name_is_refused_with_the_known_ones(kind: str) -> None:
    from kvstored.store.policies import create_admission

    make = create if kind == "policy" else create_admission
    wrong = "lruu" if kind == "policy" else "alway"
    with pytest.raises(ValueError, match=rf"unknown {kind} '{wrong}'.*did you mean '(lru|always)'"):
        make(wrong, Shelf().residency, HOST)


def test_keys_of_the_shelf_are_distinct() -> None:
    assert len({key(number) for number in range(1000)}) == 1000
