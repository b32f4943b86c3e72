"""Charts: ticks at round places, values where they belong, gaps kept, every foreign text escaped."""

from __future__ import annotations

import math
import re
import time
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_client.cli import report_page, scales
from kvstore_client.cli.charts import HEIGHT, MAX_POINTS, WIDTH, Chart, Curve, draw
from kvstore_client.cli.scales import Unit, time_scale

NAN = math.nan
NOON = time.mktime((2026, 3, 4, 12, 0, 0, 0, 0, 0))


def labels(unit: Unit, values: list[float]) -> list[str]:
    return [tick.label for tick in unit.scale(values).ticks]


def test_axes_end_at_round_numbers_of_their_unit() -> None:
    assert labels(scales.BYTES, [0.0, 250 * 1024**2]) == ["0", "64 MiB", "128 MiB", "192 MiB", "256 MiB"]
    assert labels(scales.BYTES_A_SECOND, [1500.0]) == ["0 B/s", "512 B/s", "1 KiB/s", "1.5 KiB/s"]
    assert labels(scales.COUNT, [3.0]) == ["0", "1", "2", "3"]
    assert labels(scales.BLOCKS_A_SECOND, [1234.0]) == ["0/s", "500/s", "1,000/s", "1,500/s"]
    assert labels(scales.SHARE, [3.0]) == ["0 %", "25 %", "50 %", "75 %", "100 %"]
    assert labels(scales.LATENCY, [40.0, 3000.0]) == ["10 µs", "100 µs", "1 ms", "10 ms"]
    assert labels(scales.LATENCY, [2000.0, 9000.0]) == ["1 ms", "2 ms", "5 ms", "10 ms"]


@given(
    st.sampled_from([scales.BYTES, scales.COUNT, scales.BLOCKS_A_SECOND, scales.LATENCY, scales.SHARE]),
    st.lists(st.floats(0, 1e12) | st.just(NAN), max_size=5),
)
def test_every_value_lies_on_its_axis(unit: Unit, values: list[float]) -> None:
    if unit is scales.SHARE:
        values = [value % 100 for value in values]
    scale = unit.scale(values)
    marks = [tick.value for tick in scale.ticks]
    assert all(early < late for early, late in pairwise(marks))
    assert len({tick.label for tick in scale.ticks}) == len(marks) <= 17
    assert scale.share(marks[0]) >= -1e-9 and scale.share(marks[-1]) <= 1 + 1e-9
    for value in values:
        assert math.isnan(value) or -1e-9 <= scale.share(value) <= 1 + 1e-9


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (60, ["12:00:00", "12:00:10", "12:00:20", "12:00:30", "12:00:40", "12:00:50", "12:01:00"]),
        (600, ["12:00", "12:02", "12:04", "12:06", "12:08", "12:10"]),
        (86400, ["12:00", "16:00", "20:00", "00:00", "04:00", "08:00", "12:00"]),
    ],
)
def test_times_are_marked_where_a_clock_has_marks(seconds: int, expected: list[str]) -> None:
    shown = [tick.label for tick in time_scale(NOON, NOON + seconds).ticks]
    if seconds == 86400:
        assert len(shown) >= 4 and all(label.endswith(":00") for label in shown)
    else:
        assert shown == expected


def svg_of(text: str) -> ElementTree.Element:
    """Well-formed, by an XML parser."""
    found = re.search(r"<svg.*</svg>", text, re.DOTALL)
    assert found is not None, text
    return ElementTree.fromstring(found[0])


def line_chart(*values: float, **options: object) -> Chart:
    at_s = [NOON + second for second in range(len(values))]
    return Chart("Rate", scales.COUNT, at_s, [Curve("a", list(values))], **options)  # type: ignore[arg-type]


def path_of(text: str, style: str) -> str:
    path = next(element for element in svg_of(text).iter("path") if element.get("class") == style)
    return path.get("d") or ""


def test_a_line_goes_through_its_values() -> None:
    points = re.findall(r"([\d.]+),([\d.]+)", path_of(draw(line_chart(0, 5, 10)), "s0"))
    heights = [float(y) for _, y in points]
    assert heights[0] > heights[1] > heights[2]
    assert heights[1] == pytest.approx((heights[0] + heights[2]) / 2, abs=0.2)
    assert all(0 <= float(x) <= WIDTH and 0 <= float(y) <= HEIGHT for x, y in points)


def test_a_gap_is_not_drawn_over() -> None:
    assert path_of(draw(line_chart(1, 2, NAN, 3, 4)), "s0").count("M") == 2
    assert path_of(draw(line_chart(1, NAN, 3, 3)), "s0").count("M") == 2


def test_areas_lie_upon_each_other() -> None:
    at_s = [NOON, NOON + 1]
    curves = [Curve("a", [10, 10]), Curve("b", [5, 5]), Curve("limit", [40, 40], mark="limit")]
    text = draw(Chart("Held", scales.COUNT, at_s, curves, is_stacked=True))

    def heights(style: str) -> list[float]:
        return [float(y) for y in re.findall(r",([\d.]+)", path_of(text, style))]

    assert min(heights("a0")) == max(heights("a1")), "the second area begins where the first ends"
    assert max(heights("limit")) < min(heights("a1"))
    assert re.findall(r"</i>(\w+)<", text) == ["a", "b", "limit"]


def test_long_series_are_thinned_and_keep_their_peaks() -> None:
    values = [1.0] * 3000
    values[1234] = 99.0
    at_s = [NOON + second for second in range(3000)]
    means, peaks = Curve("mean", values), Curve("peak", values, is_peak=True)
    text = draw(Chart("Spike", scales.COUNT, at_s, [means, peaks]))
    assert path_of(text, "s1").count(",") <= MAX_POINTS
    assert min(float(y) for y in re.findall(r",([\d.]+)", path_of(text, "s1"))) == pytest.approx(10, abs=3)
    assert min(float(y) for y in re.findall(r",([\d.]+)", path_of(text, "s0 wide"))) > 150


def test_names_from_outside_are_text_and_never_markup() -> None:
    chart = Chart('<b>"&', scales.COUNT, [NOON, NOON + 1], [Curve("<script>alert(1)</script>", [1, 2])])
    text = draw(chart)
    assert "<script" not in text and "<b>" not in text
    svg = svg_of(text)
    assert svg.get("aria-label") == '<b>"&'
    assert any("<script>" in (title.text or "") for title in svg.iter("title"))


@pytest.mark.parametrize("chart", [line_chart(), line_chart(1), line_chart(NAN, NAN, NAN)])
def test_nothing_is_said_not_drawn(chart: Chart) -> None:
    assert "nothing to show yet" in draw(chart)
    assert "<svg" not in draw(chart)


def test_a_line_below_another_one_is_seen() -> None:
    at_s = [float(second) for second in range(10)]
    same, other = [5.0] * 10, [float(second) for second in range(10)]
    text = draw(
        Chart("Movement", scales.BYTES_A_SECOND, at_s, [Curve("stored", same), Curve("lane", same), Curve("x", other)])
    )
    assert 'class="s0 wide"' in text and 'class="s1"' in text and 'class="s2"' in text
    apart = draw(Chart("Movement", scales.BYTES_A_SECOND, at_s, [Curve("stored", other), Curve("lane", same)]))
    assert "wide" not in apart


def test_a_long_list_of_models_leaves_room_for_the_numbers() -> None:
    text = report_page.table("Tenants", ["tenant", "models", "blocks"], [["a", "first:1\nsecond:2", "9"]], words=2)
    assert '<td class="t">first:1\nsecond:2</td><td class="n">9</td>' in text
    assert re.search(r"td\.t\{white-space:pre-line;[^}]*max-width", report_page.page("", "", [], ""))
