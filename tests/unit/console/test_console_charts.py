"""Charts: ticks at round places, values where they belong, gaps kept, every foreign text escaped."""

from __future__ import annotations

import math
import re
import time
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstore_console import axes, page
from kvstore_console.axes import Unit, time_axis
from kvstore_console.charts import HEIGHT, WIDTH, Curve, bar_chart, line_chart
from kvstore_console.history import MAX_POINTS, ChartSeries, history_chart

NAN = math.nan
NOON = time.mktime((2026, 3, 4, 12, 0, 0, 0, 0, 0))


def labels(unit: Unit, values: list[float]) -> list[str]:
    axis = unit.axis(values)
    return [axis.show(mark) for mark in axis.marks]


def test_axes_end_at_round_numbers_of_their_unit() -> None:
    assert labels(axes.BYTES, [0.0, 250 * 1024**2]) == ["0", "64 MiB", "128 MiB", "192 MiB", "256 MiB"]
    assert labels(axes.BYTES_A_SECOND, [1500.0]) == ["0 B/s", "512 B/s", "1 KiB/s", "1.5 KiB/s"]
    assert labels(axes.COUNT, [3.0]) == ["0", "1", "2", "3"]
    assert labels(axes.COUNT_A_SECOND, [1234.0]) == ["0/s", "500/s", "1,000/s", "1,500/s"]
    assert labels(axes.PERCENT, [0.03]) == ["0 %", "25 %", "50 %", "75 %", "100 %"]
    assert labels(axes.LATENCY, [40e-6, 3e-3]) == ["10 µs", "30 µs", "100 µs", "300 µs", "1 ms", "3 ms", "10 ms"]
    assert labels(axes.LATENCY, [2e-3, 9e-3]) == ["1 ms", "2 ms", "5 ms", "10 ms"]


@given(
    st.sampled_from([axes.BYTES, axes.COUNT, axes.COUNT_A_SECOND, axes.LATENCY, axes.PERCENT]),
    st.lists(st.floats(0, 1e12) | st.just(NAN), max_size=5),
)
@example(axes.BYTES, [1e-9])  # far less than a mark
def test_every_value_is_on_its_axis(unit: Unit, values: list[float]) -> None:
    if unit is axes.PERCENT:
        values = [value % 1 for value in values]
    if unit is axes.LATENCY:
        values = [value / 1e6 for value in values]
    axis = unit.axis(values)
    marks = list(axis.marks)
    assert all(early < late for early, late in pairwise(marks))
    assert len({axis.show(mark) for mark in marks}) == len(marks) <= 17
    for value in [*marks, *values]:
        assert math.isnan(value) or value < 1e-9 or axis.low * (1 - 1e-9) <= value <= axis.high * (1 + 1e-9)
        assert math.isnan(value) or 0 <= axis.at(value) <= 1


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (60, ["12:00:00", "12:00:10", "12:00:20", "12:00:30", "12:00:40", "12:00:50", "12:01:00"]),
        (600, ["12:00", "12:02", "12:04", "12:06", "12:08", "12:10"]),
        (86400, ["12:00", "16:00", "20:00", "00:00", "04:00", "08:00", "12:00"]),
    ],
)
def test_times_are_marked_where_a_clock_has_marks(seconds: int, expected: list[str]) -> None:
    axis = time_axis(NOON, NOON + seconds)
    shown = [axis.show(mark) for mark in axis.marks]
    if seconds == 86400:
        assert len(shown) >= 4 and all(label.endswith(":00") for label in shown)
    else:
        assert shown == expected


def svg_of(text: str) -> ElementTree.Element:
    """Well-formed, by an XML parser."""
    found = re.search(r"<svg viewBox.*?</svg>", text, re.DOTALL)
    assert found is not None, text
    return ElementTree.fromstring(found[0])


def over_time(*series: ChartSeries, unit: Unit = axes.COUNT, is_stacked: bool = False) -> str:
    at_s = [NOON + second for second in range(len(series[0].values))]
    return history_chart("Rate", "", unit, at_s, list(series), is_stacked=is_stacked)


def one_line(*values: float) -> str:
    return over_time(ChartSeries("a", list(values)))


def path_of(text: str, style: str) -> str:
    path = next(element for element in svg_of(text).iter("path") if element.get("class") == style)
    return path.get("d") or ""


def heights(text: str, style: str) -> list[float]:
    return [float(down) for down in re.findall(r",([\d.]+)", path_of(text, style))]


def test_a_line_goes_through_its_values() -> None:
    points = re.findall(r"([\d.]+),([\d.]+)", path_of(one_line(0, 5, 10), "curve c0"))
    first, second, third = (float(down) for _, down in points)
    assert first > second > third
    assert second == pytest.approx((first + third) / 2, abs=0.2)
    assert all(0 <= float(across) <= WIDTH and 0 <= float(down) <= HEIGHT for across, down in points)


def test_a_gap_is_not_drawn_over() -> None:
    assert path_of(one_line(1, 2, NAN, 3, 4), "curve c0").count("M") == 2
    assert path_of(one_line(1, NAN, 3, 3), "curve c0").count("M") == 2


def test_areas_are_stacked() -> None:
    text = over_time(
        ChartSeries("a", [10, 10]),
        ChartSeries("b", [5, 5]),
        ChartSeries("limit", [40, 40], mark="limit"),
        is_stacked=True,
    )
    assert min(heights(text, "area k0")) == max(heights(text, "area k1")), "the second area begins where the first ends"
    assert max(heights(text, "curve limit")) < min(heights(text, "area k1"))
    assert re.findall(r">(\w+)</span>", text) == ["a", "b", "limit"]


def test_an_area_with_a_gap_carries_those_above_it() -> None:
    text = over_time(ChartSeries("a", [10, NAN, 10]), ChartSeries("b", [5, 5, 5]), is_stacked=True)
    assert path_of(text, "area k0").count("M") == 2 and path_of(text, "area k1").count("M") == 1
    assert "nan" not in text


def test_long_series_are_thinned_and_keep_their_peaks() -> None:
    values = [1.0] * 3000
    values[1234] = 99.0
    text = over_time(ChartSeries("mean", values), ChartSeries("peak", values, is_peak=True))
    assert path_of(text, "curve c1").count(",") <= MAX_POINTS
    assert min(heights(text, "curve c1")) == pytest.approx(12, abs=3)
    assert min(heights(text, "curve c0 wide")) > 150


def test_names_from_outside_are_text_and_never_markup() -> None:
    curve = Curve("<script>alert(1)</script>", [(0, 1), (1, 2)], has_dots=True)
    x = axes.linear_axis(0, 1, str)
    text = line_chart('<b>"&', "<i>", [curve], x, axes.COUNT.axis([2])) + bar_chart(
        "<b>", "", [("<b>", [1])], ["<b>"], str
    )
    assert "<script" not in text and "<b>" not in text and "<i>" not in text
    svg = svg_of(text)
    assert svg.get("aria-label") == '<b>"&'
    assert any("<script>" in (title.text or "") for title in svg.iter("title"))


@pytest.mark.parametrize("values", [(), (1,), (NAN, NAN, NAN)])
def test_nothing_is_said_not_drawn(values: tuple[float, ...]) -> None:
    assert "nothing to show yet" in one_line(*values)
    assert "<svg" not in one_line(*values)


def test_a_line_below_another_one_is_seen() -> None:
    same, other = [5.0] * 10, [float(second) for second in range(10)]
    text = over_time(
        ChartSeries("stored", same), ChartSeries("lane", same), ChartSeries("x", other), unit=axes.BYTES_A_SECOND
    )
    assert 'class="curve c0 wide"' in text and 'class="curve c1"' in text and 'class="curve c2"' in text
    assert "wide" not in over_time(ChartSeries("stored", other), ChartSeries("lane", same))


def test_no_two_curves_look_alike() -> None:
    curves = [Curve(str(number), [(0, number), (1, number + 1)]) for number in range(40)]
    text = line_chart("Many", "", curves, axes.linear_axis(0, 1, str), axes.COUNT.axis([40]))
    assert len(set(re.findall(r'<path class="(curve [^"]+)"', text))) == 40


def test_a_long_list_of_models_leaves_room_for_the_numbers() -> None:
    text = page.html_table(["tenant", "models", ">blocks"], [["a", "first:1\nsecond:2", "9"]])
    assert '<td class="t">first:1\nsecond:2</td><td class="n">9</td>' in text
    assert re.search(r"td\.t\{white-space:pre-line;[^}]*max-width", page.page("", "", []))
