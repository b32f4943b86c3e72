"""Admission: what may enter a tier."""

from kvstored.lifecycle import Cause
from kvstored.policy_names import CHAIN_HAZARD
from kvstored.store.policies import EvictionPolicy, PolicySettings, create, create_admission
from kvstored.store.policies.base import WARM_WORTH
from kvstored.store.transfer.gate import MAX_PATH_BLOCKS, missing_path
from tests.reference.blocks import Shelf
from tests.reference.policies import trust_at_once


def test_always_admits() -> None:
    shelf = Shelf("host", "nvme")
    assert create_admission("always", shelf.residency, 1).admit(shelf.chain(0)[0], 1)


def test_second_touch_refuses_what_was_used_once() -> None:
    shelf = Shelf("host", "nvme")
    admission = create_admission("second-touch", shelf.residency, 1)
    row = shelf.chain(0)[0]
    assert not admission.admit(row, 1)
    shelf.chain(0)
    assert admission.admit(row, 1)


def test_second_touch_remembers_use_across_eviction() -> None:
    shelf = Shelf("host", "nvme")
    admission = create_admission("second-touch", shelf.residency, 1)
    shelf.residency.remove(shelf.chain(0)[0], Cause.EVICTED, 1)
    assert admission.admit(shelf.chain(0)[0], 1)


def test_a_parent_follows_its_child() -> None:
    shelf = Shelf("host", "nvme")
    admission = create_admission("second-touch", shelf.residency, 1)
    parent, child = shelf.chain(0, 1)
    assert not admission.admit(parent, 1)
    shelf.residency.attach(child, 1, shelf.slot(), 1)
    assert admission.admit(parent, 1)


# By worth


def knowing(shelf: Shelf, keep_worth: float = 0.0) -> EvictionPolicy:
    policy = create(CHAIN_HAZARD, shelf.residency, 0, PolicySettings(keep_worth))
    trust_at_once(policy)
    return policy


LATE = 7200 * 1_000_000_000


def test_by_worth_admits_what_is_warm_and_refuses_what_is_cold() -> None:
    shelf = Shelf("host", "nvme")
    policy = knowing(shelf)
    admission = create_admission("worth", shelf.residency, 1, policy)
    row = shelf.chain(0)[0]
    warm, cold = policy.expected_uses_per_hour(row, 1), policy.expected_uses_per_hour(row, LATE)
    assert warm is not None and cold is not None and warm >= WARM_WORTH > cold
    assert admission.admit(row, 1) and not admission.admit(row, LATE)
    shelf.chain(0)
    assert not admission.admit(row, LATE), "used twice, and still nothing to come back for"
    assert admission.judges_by_worth(row, LATE)


def test_by_worth_asks_for_what_the_tier_above_is_kept_by() -> None:
    shelf = Shelf("host", "nvme")
    row = shelf.chain(0)[0]
    for keep_worth, admitted in ((1e6, False), (1e-6, True)):
        again = Shelf("host", "nvme")
        policy = knowing(again, keep_worth)
        row = again.chain(0)[0]
        assert create_admission("worth", again.residency, 1, policy).admit(row, LATE) == admitted


def test_by_worth_keeps_prefixes_whole() -> None:
    shelf = Shelf("host", "nvme")
    admission = create_admission("worth", shelf.residency, 1, knowing(shelf))
    parent, child = shelf.chain(0, 1)
    assert not admission.admit(parent, LATE)
    shelf.residency.attach(child, 1, shelf.slot(), 1)
    assert admission.admit(parent, LATE)


def test_without_a_worth_it_is_second_touch() -> None:
    shelf = Shelf("host", "nvme")
    row = shelf.chain(0)[0]
    lru, learning = create("lru", shelf.residency, 0), create(CHAIN_HAZARD, shelf.residency, 0)
    judges = [create_admission("worth", shelf.residency, 1, above) for above in (None, lru, learning)]
    assert not any(judge.admit(row, 1) or judge.judges_by_worth(row, 1) for judge in judges)
    shelf.chain(0)
    assert all(judge.admit(row, 1) for judge in judges)


def test_a_block_that_has_left_the_tier_above_is_judged_by_its_uses() -> None:
    shelf = Shelf("host", "nvme")
    admission = create_admission("worth", shelf.residency, 1, knowing(shelf))
    row = shelf.chain(0)[0]
    shelf.residency.attach(row, 1, shelf.slot(), 1)
    shelf.residency.detach(row, 0)
    assert not admission.judges_by_worth(row, 1) and not admission.admit(row, 1)


# What has to be written with a block


def none_coming(row: int) -> bool:
    return False


def test_a_path_begins_where_nvme_ends() -> None:
    shelf = Shelf("host", "nvme")
    head, middle, tail = shelf.chain(0, 1, 2)
    assert missing_path(shelf.residency, tail, none_coming) == [head, middle, tail]
    shelf.residency.attach(head, 1, shelf.slot(), 1)
    assert missing_path(shelf.residency, tail, none_coming) == [middle, tail]
    assert missing_path(shelf.residency, head, none_coming) == []


def test_what_is_being_written_already_is_not_written_again() -> None:
    shelf = Shelf("host", "nvme")
    _, middle, tail = shelf.chain(0, 1, 2)
    assert missing_path(shelf.residency, tail, lambda row: row == middle) == [tail]
    assert missing_path(shelf.residency, middle, lambda row: row == middle) == []


def test_a_broken_chain_is_no_reason_to_refuse_what_continues_it() -> None:
    """Blocks of a windowed layer group are of use without those before them."""
    shelf = Shelf("host", "nvme")
    row = shelf.store(7, parent=6)
    assert missing_path(shelf.residency, row, none_coming) == [row]


def test_a_very_long_chain_goes_head_first() -> None:
    shelf = Shelf("host", "nvme")
    rows = shelf.chain(*range(MAX_PATH_BLOCKS + 5))
    assert missing_path(shelf.residency, rows[-1], none_coming) == rows[:MAX_PATH_BLOCKS]
