"""Trace formats: what a line becomes, and what is said of one that does not fit."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import pytest

from kvstore_simulator.engine_reports import hints_before
from kvstore_simulator.readers import ReadOptions, read_trace
from kvstore_simulator.trace import RecordedHint, Trace, TraceBuilder, TraceError
from tests.reference.traces import sessions, trace_of, write_claude_code, write_mooncake

A, B, C = "a" * 16, "b" * 16, "c" * 16  # keys, as a recording writes them
FACTS = {"n": 0, "c": 1, "b": 64, "f": 0}


def read(path: Path, format_name: str, **options: object) -> Trace:
    return read_trace(path, format_name, ReadOptions(**options), lambda done, total: None)  # type: ignore[arg-type]


def lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def mooncake_line(**different: object) -> str:
    return json.dumps({"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [1], **different}) + "\n"


def recording(path: Path, version: int, *rows: dict[str, object]) -> Path:
    """Each row with the facts that it does not give."""
    return lines(path, {"format": "kvstored", "version": version}, *({**FACTS, **row} for row in rows))


def recorded_line(**different: object) -> str:
    header = {"format": "kvstored", "version": 2}
    row = {"t": 1, "op": "get", **FACTS, "k": A, **different}
    return json.dumps(header) + "\n" + json.dumps(row) + "\n"


def test_mooncake_requests_are_read_in_order_of_time(tmp_path: Path) -> None:
    write_mooncake(tmp_path / "t.gz", [[0, 1], [0, 2], [0, 1, 3]])
    trace = read(tmp_path / "t.gz", "mooncake")
    assert trace.blocks.tolist() == [0, 1, 0, 2, 0, 1, 3]
    assert trace.starts.tolist() == [0, 2, 4, 7]
    assert trace.parents.tolist() == [-1, 0, 0, 1]
    assert trace.depths.tolist() == [0, 1, 1, 2]
    assert trace.times_ns.tolist() == [0, 10**9, 2 * 10**9]
    assert trace.input_tokens.tolist() == [1017, 1017, 1529]
    assert trace.continued.tolist() == [False, False, True]
    assert (trace.requests, trace.accesses, trace.distinct_blocks, trace.block_tokens) == (3, 7, 4, 512)


def test_requests_out_of_order_are_sorted_and_renumbered(tmp_path: Path) -> None:
    rows = [
        {"timestamp": at, "input_length": 1, "output_length": 1, "hash_ids": ids}
        for at, ids in ((50, [7, 8]), (20, [3]), (20, [7]))
    ]
    trace = read(lines(tmp_path / "t", *rows), "mooncake")
    assert trace.times_ns.tolist() == [20_000_000, 20_000_000, 50_000_000]
    assert trace.blocks.tolist() == [0, 1, 1, 2]
    assert trace.parents.tolist() == [-1, -1, 1]


def test_claude_code_groups_whole_blocks_and_draws_starts_with_a_seed(tmp_path: Path) -> None:
    session = {"reqs": [[0.0, 1100, 5, "n", 1.0, [1, 17]], [9.0, 1300, 5, "s", 1.0, [1, 16, 90, 8]]]}
    path = lines(tmp_path / "t", session, session)
    trace = read(path, "claude-code", group_tokens=512, window_s=100.0, seed=3)
    assert trace.kind_names == ("n", "s")
    assert sorted(trace.continued.tolist()) == [False, False, True, True]
    assert trace.distinct_blocks == 6, "two sessions of three blocks: ids are a session's own"
    assert sorted((trace.starts[1:] - trace.starts[:-1]).tolist()) == [2, 2, 3, 3]
    again = read(path, "claude-code", group_tokens=512, window_s=100.0, seed=3)
    assert trace.times_ns.tolist() == again.times_ns.tolist()
    other = read(path, "claude-code", group_tokens=512, window_s=100.0, seed=4)
    assert trace.times_ns.tolist() != other.times_ns.tolist()
    assert read(path, "claude-code", group_tokens=64).distinct_blocks == 50


def test_some_sessions_are_drawn(tmp_path: Path) -> None:
    write_claude_code(tmp_path / "t.gz", 20)
    some = read(tmp_path / "t.gz", "claude-code", sessions=5, group_tokens=64)
    assert 5 <= some.requests < read(tmp_path / "t.gz", "claude-code", group_tokens=64).requests
    for wrong in (21, 0, -1):
        with pytest.raises(TraceError, match=rf"--sessions {wrong}: t\.gz has 20"):
            read(tmp_path / "t.gz", "claude-code", sessions=wrong)


def test_a_part_is_a_trace_of_its_own() -> None:
    requests = sessions(1, 40)
    trace = trace_of(requests)
    part = trace.part(10, 30)
    expected = trace_of(requests[10:30])
    assert part.blocks.tolist() == expected.blocks.tolist()
    assert part.parents.tolist() == expected.parents.tolist()
    assert part.times_ns.tolist() == trace.times_ns[10:30].tolist()


@pytest.mark.parametrize(
    ("format_name", "text", "message"),
    [
        ("mooncake", "nonsense\n", "line 1: not JSON"),
        ("mooncake", '{"timestamp": 1}\n', "line 1: not a Mooncake request.*hash_ids"),
        ("mooncake", "7\n", "line 1: a line is an object in braces"),
        ("mooncake", mooncake_line(timestamp=math.nan), "line 1: timestamp is NaN, no number"),
        ("mooncake", mooncake_line(timestamp=math.inf), "line 1: timestamp is Infinity, no number"),
        ("mooncake", mooncake_line(timestamp=1e30), "line 1: its time is 1e.27 seconds, beyond"),
        ("mooncake", mooncake_line(input_length="many"), 'line 1: input_length is "many", no number'),
        ("mooncake", mooncake_line(hash_ids="abc"), "line 1: hash_ids is no list"),
        ("mooncake", mooncake_line(hash_ids={"a": 1}), "line 1: hash_ids is no list"),
        ("mooncake", mooncake_line() + "[" * 100_000 + "\n", "line 2: not JSON"),
        ("mooncake", "", "no request"),
        ("mooncake", "\n\n", "no request"),
        ("claude-code", '{"id": 1}\n', "line 1: not a Claude Code session.*reqs"),
        ("claude-code", '{"reqs": [[1, 2]]}\n', "line 1: request 0: a list of 6: time"),
        (
            "claude-code",
            '{"reqs": [[1e400, 1, 2, "n", 0, [1, 16]]]}\n',
            "line 1: request 0: its time is Infinity, no number",
        ),
        ("claude-code", '{"reqs": [[0, 1, 2, "n", 0, [1]]]}\n', "line 1: request 0: runs are pairs.*got 1 numbers"),
        ("claude-code", '{"reqs": [[0, 1, 2, "n", 0, [1, -4]]]}\n', "line 1: request 0: a run of -4 blocks"),
        (
            "claude-code",
            '{"reqs": [[0, 1, 2, "n", 0, [1, 1000000000000]]]}\n',
            "line 1: request 0: a run of 1000000000000",
        ),
        ("mooncake", mooncake_line(input_length=-5), "line 1: lengths are -5 and"),
        ("mooncake", mooncake_line(timestamp=9e12), "line 1: its time is 9e.09 seconds, beyond"),
        ("kvstored", '{"format": "other"}\n', "not written by kvstored serve --record"),
        ("kvstored", '{"format": "kvstored", "version": 1}\n', "no request in it"),
        ("kvstored", '{"format": "kvstored", "version": 1}\n[]\n', "line 2: a line is an object in braces"),
        (
            "kvstored",
            '{"format": "kvstored", "version": 1}\n{"t": 1, "op": "fly", "n": 0, "c": 1, "b": 64, "f": 0}\n',
            "line 2: operation 'fly' is unknown",
        ),
        (
            "kvstored",
            '{"format": "kvstored", "version": 1}\n{"t": 1, "op": "get", "n": 0, "c": 1, "b": -64, "f": 0}\n',
            "line 2: b, the tokens of a block, is -64",
        ),
        (
            "kvstored",
            '{"format": "kvstored", "version": 1}\n{"t": 1, "op": "get", "n": 0, "c": 1, "b": 1, "f": 0, "k": "abc"}\n',
            "line 2: keys are 16 digits",
        ),
        ("kvstored", recorded_line(op="hint", w=1.5), "line 2: w, the chance that a chain goes on, is 1.5"),
        ("kvstored", recorded_line(op="hint", a=-1), "line 2: a is -1, no whole number from 0 to"),
        ("kvstored", recorded_line(op="hint", d="soon"), 'line 2: d is "soon", no whole number'),
        ("kvstored", recorded_line(n=-5), "line 2: n is -5, no whole number from 0 to 65,535"),
        ("kvstored", recorded_line(c=[1]), r"line 2: c, the client's number is \[1\]"),
        ("kvstored", recorded_line(t="noon"), 'line 2: t is "noon", no number'),
        ("kvstored", recorded_line(k=7), "line 2: p and k are keys in hex digits"),
        ("mooncake", mooncake_line(timestamp=True), "line 1: timestamp is true, no number"),
        ("mooncake", mooncake_line(input_length=3.7), "line 1: input_length is 3.7, no whole number"),
        ("mooncake", mooncake_line(input_length=10**30), "line 1: lengths are 1e.30 and 1 tokens; 0 to"),
        ("mooncake", mooncake_line(hash_ids=[None, 1.5]), "line 1: hash_ids is no list of numbers"),
        ("mooncake", mooncake_line(hash_ids=[[1]]), "line 1: hash_ids is no list of numbers"),
        ("kvstored", '{"format": "kvstored", "version": 3}\n', "version 1 or 2"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, format_name: str, text: str, message: str) -> None:
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(TraceError, match=message) as raised:
        read(path, format_name)
    assert "\n" not in str(raised.value)


def test_ids_that_do_not_name_prefixes_are_refused(tmp_path: Path) -> None:
    write_mooncake(tmp_path / "t.gz", [[0, 1], [2, 1]])
    with pytest.raises(TraceError, match="line 2: block 1 follows two different blocks"):
        read(tmp_path / "t.gz", "mooncake")


def test_a_cut_file_is_refused_but_for_a_recording(tmp_path: Path) -> None:
    write_mooncake(tmp_path / "t.gz", sessions(1, 400))
    whole = (tmp_path / "t.gz").read_bytes()
    (tmp_path / "t.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceError, match="damaged or cut off"):
        read(tmp_path / "t.gz", "mooncake")
    rows = [{"format": "kvstored", "version": 1}] + [
        {"t": at, "op": "get", "n": 0, "c": 1, "b": 64, "f": 0, "k": f"{at * 0x9E3779B97F4A7C15 % 2**64:016x}"}
        for at in range(2000)
    ]
    packed = gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode())
    (tmp_path / "r.gz").write_bytes(packed[: len(packed) // 2])
    assert 100 < read(tmp_path / "r.gz", "kvstored").requests < 2000


def test_a_recorded_key_stands_for_its_chain_and_a_second_look_is_no_second_request(tmp_path: Path) -> None:
    path = recording(
        tmp_path / "t",
        1,
        {"t": 0.0, "op": "lookup", "k": A + B},
        {"t": 0.1, "op": "get", "p": B},
        {"t": 0.2, "op": "put", "p": B},
        {"t": 0.3, "op": "get", "p": B, "k": C},
        {"t": 0.4, "op": "get", "p": C, "n": 1, "c": 2},
        {"t": 0.5, "op": "peek", "p": C},
        {"t": 0.6, "op": "get", "p": B},
        {"t": 0.7, "op": "get", "p": B},
    )
    trace = read(path, "kvstored")
    assert trace.blocks.tolist() == [0, 1, 0, 1, 2, 3, 4, 5, 0, 1, 2, 0, 1], "another tenant's blocks are others"
    assert trace.ops.tolist() == [0] * 5, "a request stores what it missed: the put is its own"
    assert trace.times_ns.tolist() == [tenths * 100_000_000 for tenths in (0, 3, 4, 5, 7)]
    as_recorded = read(path, "kvstored", as_recorded=True)
    assert as_recorded.ops.tolist() == [1, 2, 1, 1, 1, 1]


def test_a_put_of_more_than_was_asked_for_counts(tmp_path: Path) -> None:
    path = recording(
        tmp_path / "t",
        2,
        {"t": 0.0, "op": "get", "k": A},
        {"t": 0.1, "op": "put", "p": A, "c": 2},
        {"t": 0.2, "op": "put", "p": A, "k": B + C, "c": 2},
    )
    trace = read(path, "kvstored")
    assert (trace.ops.tolist(), trace.blocks.tolist()) == ([0, 2], [0, 0, 1, 2])


def test_a_recorded_hint_keeps_its_place_between_the_requests(tmp_path: Path) -> None:
    path = recording(
        tmp_path / "t",
        2,
        {"t": 0.0, "op": "get", "k": A + B},
        {"t": 0.1, "op": "hint", "p": B, "a": 17},
        {"t": 0.2, "op": "hint", "k": C, "w": 0.5},
        {"t": 0.3, "op": "get", "k": C},
        {"t": 0.3, "op": "hint", "p": C, "w": 0.0, "s": 2, "d": 5},
        {"t": 0.4, "op": "hint", "p": B, "k": "d" * 16, "a": 3, "d": 7},
    )
    trace = read(path, "kvstored")
    hints = (
        RecordedHint(1, 100_000_000, 0, 1, answer_tokens=17),
        RecordedHint(2, 300_000_000, 0, 2, will_continue=0.0, next_step=2, due_in_ns=5_000_000),
        RecordedHint(2, 400_000_000, 0, 1, due_in_ns=7_000_000),
    )
    assert trace.hints == hints, "of a chain without a request, a hint only says when its stored blocks are due"
    assert trace.requests == 2 and trace.distinct_blocks == 3
    assert [list(hints_before(trace, at)) for at in range(3)] == [[], [hints[0]], [*hints[1:]]]
    assert trace.part(0, 1).hints == hints[:1]
    assert trace.part(1, 2).hints == (hints[1]._replace(before=1, block=0),), "its blocks are not in that part"


def test_a_hint_that_names_the_end_of_a_chain_alone_says_nothing_of_the_chain(tmp_path: Path) -> None:
    path = recording(
        tmp_path / "t",
        2,
        {"t": 0.0, "op": "hint", "k": B + C, "a": 3},
        {"t": 0.1, "op": "get", "k": A + B + C},
        {"t": 0.2, "op": "hint", "p": C, "s": 99, "a": 4},
        {"t": 0.3, "op": "get", "p": C},
    )
    trace = read(path, "kvstored")
    assert trace.blocks.tolist() == [0, 1, 2, 0, 1, 2]
    assert trace.hints == (RecordedHint(1, 200_000_000, 0, 2, answer_tokens=4),), "a newer engine's word is none"


def test_a_part_of_a_cut_file_is_cut(tmp_path: Path) -> None:
    (tmp_path / "t").write_text((recorded_line() + recorded_line().splitlines()[1] + "\n")[:-5])
    trace = read(tmp_path / "t", "kvstored")
    assert (trace.cut_after, trace.part(0, 1).cut_after) == (2, 2)


def test_a_hint_stays_with_its_block_where_requests_are_sorted() -> None:
    builder = TraceBuilder("t", "kvstored", 64)
    builder.add(3, ["x", "y"])
    builder.add_hint(RecordedHint(1, 3, 0, -1, answer_tokens=9), ["x", "y"])
    builder.add(1, ["z"])
    trace = builder.build()
    assert trace.blocks.tolist() == [0, 1, 2]
    assert trace.hints == (RecordedHint(2, 3, 0, 2, answer_tokens=9),)


def test_blocks_have_keys_of_their_own() -> None:
    builder = TraceBuilder("t", "t", 512)
    builder.add(0, ["x", "y"])
    trace = builder.build()
    assert len({trace.key(block) for block in range(2)} | {bytes(16)}) == 3
