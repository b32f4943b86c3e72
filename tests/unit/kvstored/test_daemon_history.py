"""The daemon's memory of what happened: rings that wrap around, two resolutions, a bound that holds."""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from kvstored.admin.sampler import NAMED_TENANTS, OTHER_TENANTS, MetricsSampler
from kvstored.clock import ManualClock
from kvstored.telemetry import Flows
from kvstored.telemetry.history import (
    MAX_SERIES,
    RESOLUTIONS,
    History,
    Reading,
    Resolution,
    SeriesKey,
    Window,
)
from kvstored.telemetry.latency import BUCKETS, MAX_VERBS, NO_COUNTS, Latencies, bucket_of, quantile_ns

NS_PER_S = 1_000_000_000
LEVEL = SeriesKey("tier", "host", "used_bytes")
FLOW = SeriesKey("tier", "host", "hits")
SMALL = (Resolution(1, 5), Resolution(60, 3))


def values(window: Window, key: SeriesKey) -> list[float]:
    return next(list(series.values) for series in window.series if series.key == key)


def fill(history: History, seconds: range, *, per_second: int = 10) -> None:
    """One reading a second: the level is the second, the total grows by `per_second`."""
    for second in seconds:
        if history.due(second * NS_PER_S):
            history.add(Reading({LEVEL: float(second)}, {FLOW: per_second * second}), second * NS_PER_S)


def test_nothing_is_due_before_a_period_has_passed() -> None:
    history = History(100 * NS_PER_S, SMALL)
    assert not history.due(101 * NS_PER_S - 1)
    assert history.due(101 * NS_PER_S)
    assert list(history.window(1, -1).at_ns) == []


def test_a_ring_keeps_the_latest_and_forgets_the_oldest() -> None:
    history = History(0, SMALL)
    fill(history, range(1, 13))
    window = history.window(1, -1)
    assert list(window.at_ns) == [second * NS_PER_S for second in range(8, 13)]
    assert values(window, LEVEL) == [8, 9, 10, 11, 12]
    assert values(window, FLOW) == [10] * 5
    assert list(window.span_s) == [1.0] * 5
    assert [series.is_flow for series in window.series] == [False, True]


def test_the_coarse_ring_counts_what_the_fine_one_forgot() -> None:
    history = History(0, SMALL)
    fill(history, range(1, 301))
    window = history.window(60, -1)
    assert list(window.at_ns) == [180 * NS_PER_S, 240 * NS_PER_S, 300 * NS_PER_S]
    assert values(window, FLOW) == [600] * 3
    assert values(window, LEVEL) == [180, 240, 300]
    with pytest.raises(KeyError):
        history.window(7, -1)


def test_only_what_was_requested_is_returned() -> None:
    history = History(0, SMALL)
    fill(history, range(1, 5))
    assert list(history.window(1, 2 * NS_PER_S).at_ns) == [3 * NS_PER_S, 4 * NS_PER_S]


@pytest.mark.parametrize("taken", range(12))
@pytest.mark.parametrize("since", [-1, 0, 3, 7, 99])
def test_a_window_is_the_same_wherever_the_ring_stands(taken: int, since: int) -> None:
    history = History(0, SMALL)
    fill(history, range(1, taken + 1))
    window = history.window(1, since * NS_PER_S)
    expected = [second for second in range(max(1, taken - 4), taken + 1) if second > since]
    assert [at_ns // NS_PER_S for at_ns in window.at_ns] == expected
    assert all(len(series.values) == len(window.span_s) == len(expected) for series in window.series)
    assert not taken or values(window, LEVEL) == expected


def test_a_daemon_that_was_stopped_has_one_long_sample_and_keeps_its_grid() -> None:
    history = History(0, SMALL)
    fill(history, range(1, 3))
    history.add(Reading({}, {FLOW: 100}), 30 * NS_PER_S + NS_PER_S // 4)
    assert history.window(1, -1).span_s[-1] == pytest.approx(28.25)
    assert values(history.window(1, -1), FLOW)[-1] == 80
    assert not history.due(31 * NS_PER_S - 1)
    assert history.due(31 * NS_PER_S)


def test_a_series_that_comes_late_or_stays_away_is_not_a_number_there() -> None:
    history = History(0, SMALL)
    fill(history, range(1, 3))
    late = SeriesKey("tenant", "chat", "hit_blocks")
    history.add(Reading({LEVEL: 1.0}, {late: 7}), 3 * NS_PER_S)
    window = history.window(1, -1)
    assert math.isnan(values(window, late)[0])
    assert values(window, late)[2] == 7
    assert math.isnan(values(window, FLOW)[2])


def test_memory_is_bounded_for_any_input() -> None:
    history = History(0)
    for second in range(1, 4):
        levels = {SeriesKey("tenant", f"{second}-{number}", "host_bytes"): 1.0 for number in range(100)}
        history.add(Reading(levels, {}), second * NS_PER_S)
    history.add(Reading({}, {}), 60 * NS_PER_S)
    assert len(history.window(1, -1).series) == MAX_SERIES
    full = sum((12 + 4 * MAX_SERIES) * resolution.samples for resolution in RESOLUTIONS)
    assert history.nbytes <= full < 1_000_000


def test_quantiles_are_of_what_ran_during_the_sample() -> None:
    latencies, history = Latencies(), History(0, SMALL)
    for second, slow_ns in enumerate((1_000_000, 8_000), start=1):
        for _ in range(98):
            latencies.add("lookup", 2_000)
        latencies.add("lookup", slow_ns)
        latencies.add("lookup", slow_ns)
        history.add(Reading({}, {}, latencies.snapshot()), second * NS_PER_S)
    history.add(Reading({}, {}, latencies.snapshot()), 3 * NS_PER_S)
    window = history.window(1, -1)
    assert values(window, SeriesKey("verb", "lookup", "requests")) == [100, 100, 0]
    median, high = (
        values(window, SeriesKey("verb", "lookup", "p50_us")),
        values(window, SeriesKey("verb", "lookup", "p99_us")),
    )
    assert median[:2] == pytest.approx([2, 2], rel=0.15) and math.isnan(median[2])
    assert high[:2] == pytest.approx([1000, 8], rel=0.15)


@pytest.mark.parametrize("elapsed_ns", [0, 3, 4, 5, 999, 123_456, 10**9, 3 * 10**12, 10**18])
def test_a_time_is_found_again_within_an_eighth(elapsed_ns: int) -> None:
    counts = list(NO_COUNTS)
    counts[bucket_of(elapsed_ns)] += 1
    found = quantile_ns(counts, 0.5)
    assert found is not None
    if 4 <= elapsed_ns < 1 << 44:
        assert found == pytest.approx(elapsed_ns, rel=0.13)


def test_longer_times_are_never_in_an_earlier_bucket() -> None:
    times = [0, *(round(1.1**power) for power in range(400))]
    buckets = [bucket_of(time_ns) for time_ns in times]
    assert all(early <= late for early, late in pairwise(buckets))
    assert max(buckets) == BUCKETS - 1
    assert quantile_ns(NO_COUNTS, 0.99) is None


def test_verbs_without_end_do_not_fill_the_memory() -> None:
    latencies = Latencies()
    for number in range(1000):
        latencies.add(f"verb {number}", 1)
    assert len(latencies.snapshot()) == MAX_VERBS


def test_tenants_beyond_the_first_few_are_summed_up() -> None:
    tenants = [SimpleNamespace(name=f"{number:02x}") for number in range(NAMED_TENANTS + 3)]
    flows = Flows(1)
    for number in range(len(tenants)):
        flows.tenants[number].hit_blocks = 10
    residency = SimpleNamespace(tenants=tenants, mapped=0, durable=-1, tenant_bytes=lambda number, tier: 100 + number)
    parts: Any = SimpleNamespace(
        store=SimpleNamespace(clock=ManualClock(), tiers=[object()], flows=flows, residency=residency),
        tenants=SimpleNamespace(name_of_index=lambda name: f"tenant {name}"),
    )
    found: dict[SeriesKey, int] = {}
    for key, value in MetricsSampler(parts, Latencies())._tenants():
        found[key] = found.get(key, 0) + value
    assert len({key.subject for key in found}) == NAMED_TENANTS + 1
    assert found[SeriesKey("tenant", "tenant 00", "host_bytes")] == 100
    assert found[SeriesKey("tenant", OTHER_TENANTS, "host_bytes")] == 107 + 108 + 109
    assert found[SeriesKey("tenant", OTHER_TENANTS, "hit_blocks")] == 30
