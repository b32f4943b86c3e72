"""The accounts of prefetch by prediction: what was of use, and what waste leads to."""

from __future__ import annotations

import pytest

from kvstored.store.prefetch.accounts import (
    CALM_MIN,
    JUDGED_MIN,
    PAUSE_S,
    TRIAL_BLOCKS,
    Accounts,
    Held,
    Standing,
)
from kvstored.telemetry import Counters

NBYTES = 1000


def accounts_of(most_held_bytes: int = 1 << 40) -> Accounts:
    return Accounts(0.2, 0.5, most_held_bytes, Counters())


def bring(accounts: Accounts, number: int, tenant: int = 0, now_s: float = 0.0) -> bytes:
    key = number.to_bytes(16, "big")
    accounts.brought(tenant, key, Held(NBYTES, 0.5, now_s + 60, now_s, ()))
    return key


def judge(accounts: Accounts, used: int, wasted: int, tenant: int = 0, now_s: float = 0.0) -> None:
    """So many of each, evenly mixed."""
    for number in range(used + wasted):
        key = bring(accounts, number, tenant, now_s)
        if (number + 1) * wasted // (used + wasted) > number * wasted // (used + wasted):
            accounts.wasted(tenant, key, now_s, is_evicted=False)
        else:
            accounts.used(tenant, key, now_s)


def test_figures_say_what_became_of_what_was_brought() -> None:
    accounts = accounts_of()
    for number in range(4):
        bring(accounts, number, now_s=10.0)
    keys = [number.to_bytes(16, "big") for number in range(4)]
    accounts.used(0, keys[0], 12.0)
    accounts.used(0, keys[1], 16.0)
    accounts.wasted(0, keys[2], 30.0, is_evicted=True)
    accounts.late(0, NBYTES, 30.0)
    found = accounts.statistics(0, demanded_blocks=2)
    assert (found.prefetched_blocks, found.used_blocks, found.late_blocks, found.wasted_blocks) == (5, 2, 1, 1)
    assert (found.waiting_blocks, found.evicted_blocks, found.prefetched_bytes) == (1, 1, 5 * NBYTES)
    assert found.precision == pytest.approx(3 / 4)
    assert found.recall == pytest.approx(2 / 4)
    assert found.wasted_share == pytest.approx(1 / 4)
    assert (found.spared_s, found.lead_s) == (1.0, 4.0)
    assert accounts.statistics(None, 2) == found, "there is one tenant"
    assert accounts.statistics(1, 0).prefetched_blocks == 0


def test_waste_raises_the_bar_then_ends_it_then_it_is_tried_again() -> None:
    accounts = accounts_of()
    assert accounts.least_probability(0, 0.0) == 0.5
    judge(accounts, JUDGED_MIN // 2, JUDGED_MIN // 2)
    assert accounts.statistics(0, 0).standing is Standing.REDUCED
    assert accounts.least_probability(0, 0.0) == 0.8
    judge(accounts, JUDGED_MIN // 2, JUDGED_MIN // 2)
    assert accounts.statistics(0, 0).standing is Standing.OFF
    assert accounts.least_probability(0, PAUSE_S - 1) > 1
    assert accounts.least_probability(0, PAUSE_S) == 0.8
    assert accounts.may_bring(0, TRIAL_BLOCKS - 1) and not accounts.may_bring(0, TRIAL_BLOCKS)
    judge(accounts, JUDGED_MIN // 2, JUDGED_MIN // 2, now_s=PAUSE_S)
    assert accounts.least_probability(0, 2 * PAUSE_S) > 1, "the second pause is twice as long"
    assert accounts.least_probability(0, 3 * PAUSE_S) == 0.8


def test_little_waste_lowers_the_bar_again() -> None:
    accounts = accounts_of()
    judge(accounts, JUDGED_MIN // 2, JUDGED_MIN // 2)
    judge(accounts, 2 * CALM_MIN, 0)
    assert accounts.statistics(0, 0).standing is Standing.FULL


def test_as_much_waste_as_is_allowed_changes_nothing() -> None:
    accounts = accounts_of()
    judge(accounts, 170, 30)
    assert accounts.statistics(0, 0).standing is Standing.FULL


def test_one_tenant_s_waste_does_not_end_it_for_another_one_that_has_none() -> None:
    accounts = accounts_of()
    judge(accounts, 4000, 0, tenant=1)
    judge(accounts, 0, 2 * JUDGED_MIN, tenant=0)
    assert accounts.least_probability(0, 0.0) > 1
    assert accounts.least_probability(1, 0.0) == 0.5 and accounts.may_bring(1, 0)
    assert accounts.statistics(None, 0).standing is Standing.OFF, "that of the tenant turned down furthest"
    assert accounts.statistics(None, 0).used_blocks == 4000 and accounts.statistics(None, 0).wasted_blocks == 64


def test_what_waits_for_its_use_is_bounded() -> None:
    accounts = accounts_of(most_held_bytes=3 * NBYTES)
    for number in range(3):
        assert accounts.may_bring(0, 0)
        bring(accounts, number)
    assert not accounts.may_bring(0, 0)
    accounts.used(0, (0).to_bytes(16, "big"), 1.0)
    assert accounts.may_bring(0, 0)


def test_blocks_that_wait_are_looked_at_in_turn_each_once() -> None:
    accounts = accounts_of()
    key = bring(accounts, 1)
    accounts.used(0, key, 1.0)
    bring(accounts, 1, now_s=2.0)
    bring(accounts, 2, now_s=2.0)
    assert [seen[1] for seen in accounts.to_look_at(10)] == [key, (2).to_bytes(16, "big")]


def test_a_block_that_left_and_is_brought_again_is_held_once() -> None:
    accounts = accounts_of(most_held_bytes=2 * NBYTES)
    for _ in range(3):
        key = bring(accounts, 1)
    figures = accounts.statistics(0, 0)
    assert (figures.waiting_blocks, figures.wasted_blocks, figures.evicted_blocks) == (1, 2, 2)
    assert accounts.may_bring(0, 0)
    accounts.used(0, key, 1.0)
    assert accounts.statistics(None, 0).waiting_blocks == 0 and accounts.held_of(0) == {}
