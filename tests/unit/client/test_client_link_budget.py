"""Copies of an engine keep to a share of its link while it decodes; nothing is limited otherwise."""

from __future__ import annotations

import threading

import pytest

from kvstore_client.device.budget import (
    ASSUMED_BYTES_S,
    AUTO_SHARE,
    FIRST_SEEN_BYTES,
    LAPSE_S,
    MEMORY_BYTES,
    SLICE_BYTES,
    LinkBudget,
)
from kvstore_client.link_rate import AUTO, Rate, parse_rate
from tests.reference.stepped_time import SteppedTime

MIB = 1 << 20
RATE = 100 * MIB


def budget_of(stores: Rate = RATE, loads: Rate = None) -> tuple[LinkBudget, SteppedTime]:
    time = SteppedTime()
    return LinkBudget(stores, loads, clock=time.clock, wait=time.wait), time


def spend(budget: LinkBudget, time: SteppedTime, nbytes: int, count: int) -> float:
    """Return the seconds that `count` copies wait, by an engine that says before each that it decodes."""
    began_s = time.now_s
    for _ in range(count):
        budget.decoding(True)
        assert budget.wait("stores", nbytes)
    return time.now_s - began_s


def test_while_the_engine_decodes_slices_keep_to_the_rate() -> None:
    budget, time = budget_of()
    took_s = spend(budget, time, SLICE_BYTES, 51)
    assert took_s == pytest.approx(49 * SLICE_BYTES / RATE), "one at once, and the next when it is paid for"
    assert budget.waits == {"stores": 49}


def test_a_block_that_is_larger_than_a_slice_is_paid_for_afterwards() -> None:
    budget, time = budget_of()
    assert spend(budget, time, 10 * SLICE_BYTES, 1) == 0
    assert spend(budget, time, 1, 1) == pytest.approx(9 * SLICE_BYTES / RATE)


def test_nothing_is_limited_without_decode() -> None:
    budget, time = budget_of()
    assert not any(budget.wait("stores", SLICE_BYTES) for _ in range(100))
    budget.decoding(True)
    budget.decoding(False)
    assert not any(budget.wait("stores", SLICE_BYTES) for _ in range(100))
    assert time.now_s == 1000.0 and not budget.waits


def test_what_nobody_limited_does_not_count() -> None:
    budget, time = budget_of()
    for _ in range(100):
        budget.wait("stores", SLICE_BYTES)
    assert spend(budget, time, SLICE_BYTES, 1) == 0


def test_loads_keep_to_no_rate_unless_they_have_one() -> None:
    budget, time = budget_of()
    budget.decoding(True)
    assert not any(budget.wait("loads", SLICE_BYTES) for _ in range(100))
    limited, time = budget_of(None, RATE)
    limited.decoding(True)
    assert not limited.wait("stores", SLICE_BYTES)
    assert all(limited.wait("loads", SLICE_BYTES) for _ in range(3))
    assert time.now_s > 1000.0


def test_an_engine_that_says_no_more_that_it_decodes_has_stopped() -> None:
    budget, time = budget_of()
    budget.decoding(True)
    assert budget.wait("stores", 10 * RATE)
    assert not budget.wait("stores", SLICE_BYTES)
    assert time.now_s == pytest.approx(1000.0 + LAPSE_S), "not ten seconds"


@pytest.mark.parametrize("what", ["decode ends", "a step waits for it", "the means are closed"])
def test_whoever_waits_goes_on_at_once(what: str) -> None:
    waits, goes = threading.Event(), list[bool]()

    def until_told(changed: threading.Condition, timeout_s: float) -> None:
        waits.set()
        changed.wait()

    budget = LinkBudget(RATE, clock=lambda: 0.0, wait=until_told)
    budget.decoding(True)
    assert budget.wait("stores", 2 * SLICE_BYTES)
    thread = threading.Thread(target=lambda: goes.append(budget.wait("stores", MIB)), daemon=True)
    thread.start()
    assert waits.wait(20)
    if what == "decode ends":
        budget.decoding(False)
        thread.join(20)
    elif what == "the means are closed":
        budget.close()
        thread.join(20)
    else:
        with budget.lifted("loads"):
            assert budget.limits("stores"), "of the other flow"
        with budget.lifted("stores"):
            thread.join(20)
    assert goes == [False]


def test_auto_is_a_share_of_what_is_seen_to_move() -> None:
    budget, _ = budget_of(AUTO)
    assert budget.link_bytes_s == ASSUMED_BYTES_S
    budget.seen(FIRST_SEEN_BYTES - MIB, 1e-3)
    assert budget.link_bytes_s == ASSUMED_BYTES_S
    budget.seen(MIB, 1e-3)
    assert budget.link_bytes_s == pytest.approx(FIRST_SEEN_BYTES / 2e-3)
    budget.seen(1000, 1.0)
    assert budget.link_bytes_s == pytest.approx(FIRST_SEEN_BYTES / 2e-3), "a small copy says nothing of the link"
    for _ in range(20):
        budget.seen(MEMORY_BYTES, MEMORY_BYTES / 25e9)
    assert budget.link_bytes_s == pytest.approx(25e9, rel=1e-3)
    time = SteppedTime()
    limited = LinkBudget(AUTO, clock=time.clock, wait=time.wait)
    for _ in range(9):
        limited.seen(FIRST_SEEN_BYTES, FIRST_SEEN_BYTES / 8e9)
    assert spend(limited, time, SLICE_BYTES, 3) == pytest.approx(SLICE_BYTES / (AUTO_SHARE * 8e9), rel=1e-6)


@pytest.mark.parametrize(
    ("text", "rate"), [("auto", AUTO), ("off", None), ("2GiB", 2 << 30), ("1000000", 1_000_000), ("1.5MiB", 3 << 19)]
)
def test_rates_as_users_write_them(text: str, rate: Rate) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "fast", "0", "-1", "25%", "2 GB/s"])
def test_a_rate_that_is_none_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match=r"^a rate is auto, off or bytes a second such as 2GiB, got ") as refused:
        parse_rate(text)
    assert repr(text) in str(refused.value)
