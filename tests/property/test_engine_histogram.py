"""The profiler's histogram against sorted samples: near at every quantile, never clipped, and mergeable."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_engine.profiler.histogram import ERROR, Histogram

DURATIONS = st.lists(st.one_of(st.just(0.0), st.floats(1e-9, 1e9)), min_size=1, max_size=200)
SHARES = st.floats(0, 1)
ROUNDING = 1e-9


def nearest_rank(values: list[float], share: float) -> float:
    return sorted(values)[max(1, math.ceil(share * len(values))) - 1]


@given(DURATIONS, SHARES)
def test_a_quantile_is_within_the_error_of_the_sample_of_its_rank(values: list[float], share: float) -> None:
    wanted = nearest_rank(values, share)
    assert Histogram(values).quantile(share) == pytest.approx(wanted, rel=ERROR + ROUNDING, abs=0.0)


@given(DURATIONS, st.floats(1e9, 1e300))
def test_no_value_is_too_long_to_be_reported(values: list[float], longest: float) -> None:
    histogram = Histogram([*values, longest])
    assert histogram.quantile(1.0) == histogram.greatest == longest
    assert histogram.as_json()["max"] == longest


@given(DURATIONS, SHARES, SHARES)
def test_quantiles_never_fall(values: list[float], one: float, other: float) -> None:
    histogram = Histogram(values)
    assert histogram.quantile(min(one, other)) <= histogram.quantile(max(one, other))


@given(DURATIONS)
def test_the_curve_rises_to_one(values: list[float]) -> None:
    points = Histogram(values).cumulative()
    assert points == sorted(points)
    assert points[-1] == (max(values), 1.0)


@pytest.mark.parametrize("value", [-1e-9, math.inf, math.nan])
def test_what_is_no_duration_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="is no duration"):
        Histogram([value])
