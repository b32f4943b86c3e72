"""A lane over a simulated device in virtual time: what demand loses to background work, and that none
starves.
"""

import random
from typing import Any

import pytest

from kvstored.store.transfer.lane import Lane, LaneSettings, Limits, Priority
from tests.reference.device import NS, Device, drive
from tests.reference.examples import quick_are

MIB = 1 << 20
RATE = 1e9


def gets(seed: int, blocks: int, load: float, count: int) -> list[tuple[int, int]]:
    """Poisson arrivals of gets that keep the device busy for `load` of the time."""
    chance = random.Random(seed)
    gap_s = blocks * MIB / RATE / load
    at, made = 0.0, []
    for _ in range(count):
        at += chance.expovariate(1 / gap_s)
        made.append((round(at * NS), blocks))
    return made


def latencies(
    arrivals: list[tuple[int, int]], background: dict[Priority, int], **knobs: Any
) -> tuple[list[int], Lane[int]]:
    lane: Lane[int] = Lane("nvme→host", LaneSettings(**knobs))
    found = drive(
        lane,
        Device(RATE, 100_000),
        arrivals,
        block_bytes=MIB,
        background=background,
        until_ns=arrivals[-1][0] + NS,
    )
    return sorted(found.values()), lane


@pytest.mark.parametrize(
    ("blocks", "count"), quick_are([(1, 400), (4, 200), (16, 120), (64, 60)], [False, False, True, False])
)
@pytest.mark.parametrize("load", [0.1, 0.6])
def test_saturated_prefetch_costs_demand_at_most_a_tenth_at_p99(blocks: int, count: int, load: float) -> None:
    arrivals = gets(3, blocks, load, count)
    alone, _ = latencies(arrivals, {})
    beside, lane = latencies(arrivals, {Priority.PREFETCH: 20})
    assert len(alone) == len(beside) == count
    p99 = int(0.99 * count)
    assert beside[p99] <= 1.10 * alone[p99]
    assert sum(beside) <= 1.10 * sum(alone), "nor on average"
    if blocks >= 16:
        moved = lane.statistics(arrivals[-1][0]).moved_blocks
        idle_blocks = (1 - load) * arrivals[-1][0] / NS * RATE / MIB
        assert moved[Priority.PREFETCH] >= 0.4 * idle_blocks, "prefetch uses the time that demand leaves"


def test_without_the_rule_prefetch_would_cost_more() -> None:
    """The bound is the rule's doing: with as many prefetches in flight as demands, demand loses beyond it."""
    arrivals = gets(3, 16, 0.1, 100)
    alone, _ = latencies(arrivals, {})
    limits = {p: Limits(queued_items=1000, in_flight=8) for p in Priority}
    beside, _ = latencies(arrivals, {Priority.PREFETCH: 20}, limits=limits, quiet_max_s=0)
    assert beside[50] > 1.10 * alone[50]


def test_prefetch_runs_freely_when_demand_has_stopped() -> None:
    _, lane = latencies(gets(3, 1, 0.1, 50), {Priority.PREFETCH: 20})
    assert lane.statistics(0).moved_blocks[Priority.PREFETCH] >= 0.4 * RATE / MIB, "within the second that follows"


def test_demotion_gets_its_share_under_demand_without_end() -> None:
    arrivals = [(number * NS // 20, 64) for number in range(60)]  # 1.3x of what the device can do
    _, lane = latencies(arrivals, {Priority.DEMOTION: 50, Priority.MAINTENANCE: 50}, aged_s=0.2, aged_share=0.05)
    moved = lane.statistics(arrivals[-1][0]).moved_bytes
    demoted = moved[Priority.DEMOTION] + moved[Priority.MAINTENANCE]
    assert 0.02 * moved[Priority.DEMAND] <= demoted <= 0.07 * moved[Priority.DEMAND]


def test_the_service_model_learns_the_device() -> None:
    arrivals = gets(5, 32, 0.7, 60)
    _, lane = latencies(arrivals, {}, prior_bytes_per_s=10e9)
    assert lane.statistics(arrivals[-1][0]).service_bytes_per_s == pytest.approx(RATE, rel=0.15)
    assert lane.estimate_us(64 * MIB) == pytest.approx(64 * MIB / RATE * 1e6, rel=0.2)


# A budget for what is not demand

BACKGROUND = {Priority.PREFETCH: 5, Priority.DEMOTION: 20, Priority.MAINTENANCE: 5}
BURST = {"spare_burst_bytes": 4 * MIB}


def moved_beside_demand(lane: Lane[int]) -> int:
    return sum(lane.statistics(0).moved_bytes[1:])


@pytest.mark.parametrize("knobs", [{"spare_share": 0.25}, {"spare_bytes_per_s": 0.25 * RATE}], ids=["share", "rate"])
def test_all_that_is_not_demand_keeps_to_one_budget(knobs: dict[str, float]) -> None:
    seconds = 4
    _, lane = latencies([(0, 1), ((seconds - 1) * NS, 1)], BACKGROUND, **knobs, **BURST)
    budget = 0.25 * RATE * seconds + BURST["spare_burst_bytes"]
    assert 0.8 * budget < moved_beside_demand(lane) < 1.05 * budget
    _, free = latencies([(0, 1), ((seconds - 1) * NS, 1)], BACKGROUND)
    assert moved_beside_demand(free) > 3 * budget, "it is the budget that holds it back"


def test_a_share_follows_what_the_device_is_seen_to_move() -> None:
    """The prior is ten times too high, and too low."""
    arrivals = gets(4, 16, 0.3, 200)
    (moved, high), (_, low) = (
        (moved_beside_demand(lane), lane)
        for _, lane in (
            latencies(arrivals, BACKGROUND, spare_share=0.1, prior_bytes_per_s=prior, **BURST) for prior in (1e10, 1e8)
        )
    )
    assert moved == pytest.approx(moved_beside_demand(low), rel=0.2)
    assert moved == pytest.approx(0.1 * RATE * (arrivals[-1][0] / NS + 1), rel=0.2)
    assert high.statistics(0).service_bytes_per_s == pytest.approx(RATE, rel=0.2)


def test_demand_neither_waits_for_the_budget_nor_spends_it() -> None:
    arrivals = gets(3, 16, 0.6, 100)
    plain, _ = latencies(arrivals, {})
    beside, lane = latencies(arrivals, {}, spare_bytes_per_s=1.0)
    assert beside == plain
    assert lane.spare_at_ns(arrivals[-1][0] + NS) == arrivals[-1][0] + NS, "nothing of it is spent"


def test_what_demand_loses_to_background_is_less_with_a_budget() -> None:
    arrivals = gets(3, 16, 0.3, 150)
    alone, _ = latencies(arrivals, {})
    free, _ = latencies(arrivals, BACKGROUND)
    beside, _ = latencies(arrivals, BACKGROUND, spare_share=0.1, **BURST)
    lost = sum(beside) - sum(alone)
    assert 0 <= lost < 0.5 * (sum(free) - sum(alone))


def test_a_prefetch_that_becomes_demand_waits_for_no_budget() -> None:
    lane: Lane[int] = Lane("host→gpu", LaneSettings(spare_bytes_per_s=1.0, spare_burst_bytes=1))
    first, second = (lane.submit(Priority.PREFETCH, MIB, at, 0) for at in range(2))
    assert isinstance(first, int) and isinstance(second, int)
    assert [item.ticket for item in lane.next(0)] == [first]
    lane.completed(first, NS)
    assert lane.next(NS) == [] and (lane.wake_at(NS) or 0) > 1000 * NS
    assert lane.promote(second, Priority.DEMAND, NS)
    assert [item.ticket for item in lane.next(NS)] == [second]
