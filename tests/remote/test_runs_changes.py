"""Changes as bytes, what is damaged is refused, and spans of values."""

from __future__ import annotations

import secrets

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("xxhash")

from kvstore_tiers.remote.drivers.runs.reading import GAP_BYTES, SPAN_BYTES, WantedValue, spans_of
from kvstore_tiers.remote.drivers.runs.values import (
    NAME_BYTES,
    AddedRun,
    DamagedChange,
    RunChange,
    ValuePlace,
    Values,
    rows_of,
)

NAMES = st.binary(min_size=NAME_BYTES, max_size=NAME_BYTES)
RUNS = st.lists(st.tuples(NAMES, st.integers(1, 1 << 30)), min_size=1, max_size=5, unique_by=lambda row: row[0])


def run_of(rows: list[tuple[bytes, int]]) -> AddedRun:
    return AddedRun(secrets.token_hex(16), rows_of([name for name, _ in rows], [length for _, length in rows]))


@given(st.lists(NAMES, max_size=5), st.lists(RUNS, max_size=4))
def test_a_change_comes_back(dropped: list[bytes], runs: list[list[tuple[bytes, int]]]) -> None:
    change = RunChange(dropped, [run_of(rows) for rows in runs])
    back = RunChange.unpack(change.pack())
    assert back.dropped == dropped
    assert [(run.run_id, run.rows.tolist()) for run in back.added] == [
        (run.run_id, run.rows.tolist()) for run in change.added
    ]


@given(st.data())
def test_damage_is_found(data: st.DataObject) -> None:
    raw = RunChange([bytes(NAME_BYTES)], [run_of([(b"n" * NAME_BYTES, 77)])]).pack()
    at = data.draw(st.integers(0, len(raw) * 8 - 1))
    flipped = bytearray(raw)
    flipped[at // 8] ^= 1 << at % 8
    for damaged in (bytes(flipped), raw[: data.draw(st.integers(0, len(raw) - 1))], raw + b"x"):
        with pytest.raises(DamagedChange):
            RunChange.unpack(damaged)


@given(st.binary(max_size=200))
def test_no_bytes_with_a_right_checksum_break_the_reader(body: bytes) -> None:
    forged = b"KVRUNS1\n" + body
    try:
        change = RunChange.unpack(forged + xxhash.xxh3_128_digest(forged))
    except DamagedChange:
        return
    Values().apply(change)


def test_a_run_that_names_a_value_twice_has_it_once() -> None:
    values, name = Values(), b"n" * NAME_BYTES
    run = run_of([(name, 5), (name, 6)])
    values.apply(RunChange((), [run]))
    assert values.find(name) == ValuePlace(run.run_id, 0, 5)
    assert values.apply(RunChange([name])) == [run.run_id]
    assert len(values) == 0


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 1 << 25), st.integers(1, 1 << 24)), max_size=30))
def test_spans_hold_every_value_once_and_are_short(places: list[tuple[str, int, int]]) -> None:
    wanted = [WantedValue(ValuePlace(*place), memoryview(b"")) for place in places]
    spans = spans_of(wanted)
    assert sorted(each.place for span in spans for each in span.values) == sorted(each.place for each in wanted)
    for span in spans:
        assert all(
            place.run_id == span.run_id and span.start <= place.offset and place.offset + place.length <= span.end
            for place, _ in span.values
        )
        assert span.end - span.start <= SPAN_BYTES or len({place for place, _ in span.values}) == 1


def test_neighbours_are_one_request() -> None:
    step = 1 << 20
    near = [WantedValue(ValuePlace("a", n * step, step), memoryview(b"")) for n in range(SPAN_BYTES // step)]
    assert len(spans_of(near)) == 1
    apart = [WantedValue(ValuePlace("a", n * (10 + GAP_BYTES + 1), 10), memoryview(b"")) for n in range(5)]
    assert len(spans_of(apart)) == 5
