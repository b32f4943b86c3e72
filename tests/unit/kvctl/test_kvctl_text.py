"""Tables line up, units read well, and messages become plain values under every protobuf."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.output import plain
from kvstore_console.table import render_facts, render_table
from kvstore_console.units import human_bytes, human_count, human_seconds, human_share
from kvstore_proto.v1 import kvstore_pb2 as pb

CELL = st.text(alphabet="abc 1", min_size=1, max_size=9).map(str.strip).filter(bool)


@given(st.lists(st.tuples(CELL, CELL), min_size=1, max_size=6))
def test_every_column_starts_or_ends_at_one_place(rows: list[tuple[str, str]]) -> None:
    lines = render_table(["NAME", ">NUMBER"], rows).split("\n")
    assert len(lines) == len(rows) + 1
    assert len({len(line) for line in lines}) == 1
    for line, (name, number) in zip(lines[1:], rows, strict=True):
        assert line.startswith(name)
        assert line.endswith(number)


def test_no_rows_say_so() -> None:
    assert render_table(["NAME"], [], empty="nothing here") == "nothing here"


def test_facts_are_aligned() -> None:
    assert render_facts([("a", "1"), ("long", "2")]) == "a     1\nlong  2"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (1 << 30, "1.0 GiB"),
        (300 << 20, "300 MiB"),
        ((1 << 20) - 1, "1.0 MiB"),
        (1 << 60, "1024 PiB"),
    ],
)
def test_bytes(count: int, text: str) -> None:
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.00019, "190 µs"),
        (0, "0 s"),
        (0.0031, "3.1 ms"),
        (0.99996, "1 s"),
        (59.94, "59.9 s"),
        (61, "1 min 1 s"),
        (7384, "2 h 3 min"),
        (200_000, "2 d 7 h"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text


def test_shares_and_counts() -> None:
    assert (human_share(3, 4), human_share(0, 0), human_count(1234567)) == ("75 %", "-", "1,234,567")


def test_messages_become_plain_values() -> None:
    reply = pb.AcquireReply(lease_id=1 << 60, arena_ids=[1, 2], offsets=[1 << 40])
    document = json.loads(json.dumps(plain(reply)))
    assert document["lease_id"] == 1 << 60
    assert document["arena_ids"] == [1, 2]
    assert document["offsets"] == [1 << 40]
    assert document["expires_in_ms"] == 0
    assert plain(pb.Request(ping=pb.Ping(payload=b"\x01\xff")))["ping"] == {"payload": "01ff"}
