"""The credit of prefetch by prediction: what was of use, and what waste leads to."""

from __future__ import annotations

import pytest

from kvstored.store.prefetch.credit import (
    HALF_LIFE_S,
    TRIED_BLOCKS,
    UNJUDGED_BLOCKS,
    Held,
    PrefetchCredit,
    Standing,
)
from kvstored.telemetry import Counters

NBYTES = 1000
CHAIN = b"chain"


def credit_of(most_held_bytes: int = 1 << 40) -> PrefetchCredit:
    return PrefetchCredit(0.2, 0.5, most_held_bytes, Counters())


def bring(
    credit: PrefetchCredit,
    number: int,
    tenant: int = 0,
    now_s: float = 0.0,
    probability: float = 1.0,
    chain: bytes = CHAIN,
) -> bytes:
    key = number.to_bytes(16, "big")
    credit.brought(tenant, key, Held(chain, NBYTES, 0.5, now_s, (), probability), now_s + 60)
    return key


def may_bring(credit: PrefetchCredit, probability: float = 1.0, tenant: int = 0, now_s: float = 0.0) -> bool:
    return credit.may_bring(tenant, probability, NBYTES, 0, now_s)


def judge(
    credit: PrefetchCredit, used: int, wasted: int, tenant: int = 0, now_s: float = 0.0, probability: float = 1.0
) -> None:
    """Judge the given numbers of used and unused blocks, evenly mixed."""
    for number in range(used + wasted):
        key = bring(credit, number, tenant, now_s, probability)
        if (number + 1) * wasted // (used + wasted) > number * wasted // (used + wasted):
            credit.wasted(tenant, key, now_s, is_evicted=False)
        else:
            credit.used(tenant, key, now_s)


def test_figures_say_what_became_of_what_was_brought() -> None:
    credit = credit_of()
    for number in range(4):
        bring(credit, number, now_s=10.0)
    keys = [number.to_bytes(16, "big") for number in range(4)]
    credit.used(0, keys[0], 12.0)
    credit.used(0, keys[1], 16.0)
    credit.wasted(0, keys[2], 30.0, is_evicted=True)
    credit.late(0, NBYTES, 1.0, 30.0)
    found = credit.statistics(0, demanded_blocks=2)
    assert (found.prefetched_blocks, found.used_blocks, found.late_blocks, found.wasted_blocks) == (5, 2, 1, 1)
    assert (found.waiting_blocks, found.evicted_blocks, found.prefetched_bytes) == (1, 1, 5 * NBYTES)
    assert found.precision == pytest.approx(3 / 4)
    assert found.recall == pytest.approx(2 / 4)
    assert found.wasted_share == pytest.approx(1 / 4)
    assert (found.spared_s, found.lead_s) == (1.0, 4.0)
    assert credit.statistics(None, 2) == found, "there is one tenant"
    assert credit.statistics(1, 0).prefetched_blocks == 0


def test_less_likely_chains_are_brought_as_far_as_surer_ones_earn_credit_for_them() -> None:
    credit = credit_of()
    for number in range(1000):  # a half of them will be waste: three in ten blocks above the limit
        if not may_bring(credit, 0.5):
            break
        bring(credit, number, probability=0.5)
    waited = credit.statistics(0, 0).waiting_blocks
    assert waited == min(UNJUDGED_BLOCKS, round(TRIED_BLOCKS / 0.3))
    assert may_bring(credit, 0.4999) is False, "below min_probability nothing is"
    for number in range(waited):
        credit.used(0, number.to_bytes(16, "big"), 1.0)
    judge(credit, 400, 0, probability=0.9)
    assert may_bring(credit, 0.5)


def test_waste_stays_within_the_limit_whatever_a_predictor_says() -> None:
    """One that is always sure, and right in half of the cases."""
    credit = credit_of()
    brought = 0
    for number in range(20_000):
        now_s = number * 0.1
        if may_bring(credit, 0.95, now_s=now_s):
            key = bring(credit, number, now_s=now_s, probability=0.95)
            brought += 1
            if number % 2:
                credit.used(0, key, now_s)
            else:
                credit.wasted(0, key, now_s, is_evicted=False)
    figures = credit.statistics(0, 0)
    assert figures.wasted_bytes <= 0.2 * figures.prefetched_bytes + 5 * TRIED_BLOCKS * NBYTES
    assert brought < 1000 and figures.standing is Standing.OFF


def test_a_tenant_that_was_denied_is_tried_again_later_the_more_it_wasted() -> None:
    waited_s = []
    for wasted in (64, 256):
        credit = credit_of()
        judge(credit, 0, wasted)
        assert credit.statistics(0, 0).standing is Standing.OFF and not may_bring(credit)
        waited_s.append(next(now_s for now_s in range(0, 36_000, 10) if may_bring(credit, now_s=now_s)))
    assert HALF_LIFE_S / 2 < waited_s[0] < waited_s[1] < 6 * HALF_LIFE_S


def test_what_guesses_are_worth_is_learned_by_their_probability() -> None:
    credit = credit_of()
    judge(credit, 2000, 0, probability=0.95)
    judge(credit, 50, 350, probability=0.65)
    assert may_bring(credit, 0.95)
    assert not may_bring(credit, 0.65) and may_bring(credit, 0.55), "another bin's"
    assert may_bring(credit, 0.65, now_s=4 * HALF_LIFE_S), "it may be right again"


def test_as_much_waste_as_is_allowed_changes_nothing() -> None:
    credit = credit_of()
    judge(credit, 170, 30)
    assert credit.statistics(0, 0).standing is Standing.FULL


def test_one_tenant_s_waste_does_not_end_it_for_another_one_that_has_none() -> None:
    credit = credit_of()
    judge(credit, 4000, 0, tenant=1)
    judge(credit, 0, 64, tenant=0)
    assert not may_bring(credit) and may_bring(credit, tenant=1)
    assert credit.statistics(None, 0).standing is Standing.OFF, "that of the tenant turned down furthest"
    assert credit.statistics(None, 0).used_blocks == 4000 and credit.statistics(None, 0).wasted_blocks == 64


@pytest.mark.parametrize(
    ("most_held_bytes", "blocks"),
    [(1 << 40, UNJUDGED_BLOCKS), (3 * NBYTES, 3)],
    ids=["unjudged", "held"],
)
def test_what_waits_for_its_use_is_bounded_and_each_use_makes_room(most_held_bytes: int, blocks: int) -> None:
    credit = credit_of(most_held_bytes)
    for number in range(blocks):
        assert may_bring(credit)
        bring(credit, number)
    assert not may_bring(credit)
    credit.used(0, (0).to_bytes(16, "big"), 1.0)
    assert may_bring(credit)


def test_blocks_wait_as_long_as_their_chain_is_held() -> None:
    credit = credit_of()
    bring(credit, 1)
    ((_, _, held),) = credit.to_look_at(10)
    hold = credit.hold(0, CHAIN)
    assert hold is not None and not credit.is_over(0, held, 59.0) and credit.is_over(0, held, 60.0)
    hold.until_s = 90.0
    assert not credit.is_over(0, held, 60.0) and credit.is_over(0, held, 90.0)
    credit.wasted(0, (1).to_bytes(16, "big"), 90.0, is_evicted=False)
    assert credit.hold(0, CHAIN) is None


def test_blocks_that_wait_are_looked_at_in_turn_each_once() -> None:
    credit = credit_of()
    key = bring(credit, 1)
    credit.used(0, key, 1.0)
    bring(credit, 1, now_s=2.0)
    bring(credit, 2, now_s=2.0)
    assert [seen[1] for seen in credit.to_look_at(10)] == [key, (2).to_bytes(16, "big")]


def test_a_block_that_left_and_is_brought_again_is_held_once() -> None:
    credit = credit_of(most_held_bytes=2 * NBYTES)
    for _ in range(3):
        key = bring(credit, 1)
    figures = credit.statistics(0, 0)
    assert (figures.waiting_blocks, figures.wasted_blocks, figures.evicted_blocks) == (1, 2, 2)
    assert may_bring(credit)
    credit.used(0, key, 1.0)
    assert credit.statistics(None, 0).waiting_blocks == 0 and credit.held_of(0) == {}
