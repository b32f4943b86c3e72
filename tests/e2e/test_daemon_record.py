"""`serve --record`, then `simulate`: what a daemon did comes back as a trace, without a token in it."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from kvstore_proto.v1.kvstore_pb2 import NextStep
from kvstore_simulator.readers import ReadOptions, read_trace
from kvstore_simulator.replay import Replay, ReplaySettings
from kvstore_simulator.trace import Op, TraceError
from kvstored.cli import main
from tests.reference.conversations import model, payloads_of, tokens_of
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon
from tests.reference.unary_client import by_tokens, unary_client

MODEL = model()


def recorded(path: Path) -> list[dict[str, object]]:
    with gzip.open(path, "rt") as lines:
        return [json.loads(line) for line in lines]


def requests_in(path: Path) -> int:
    try:
        return int((read_trace(path, "kvstored", ReadOptions(), lambda done, total: None).ops != Op.PUT).sum())
    except TraceError:  # nothing in it yet
        return 0


def serve_some(daemon: RunningDaemon) -> None:
    """Two sessions that grow, and one that is asked for and never stored."""
    with daemon.connect() as session:
        for blocks in (4, 6, 9):
            for number in (1, 2):
                tokens = tokens_of(number, blocks)
                with session.get(tokens):
                    pass
                session.put(tokens, payloads=payloads_of(number, blocks, MODEL))
        session.lookup(tokens_of(3, 5))
        session.hint(tokens_of(1, 9), answer_tokens=40, will_continue=0.25)
        session.hint(tokens_of(2, 9), next_step="tool_call", due_in_s=1.5)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recording") / "trace.jsonl.gz"
    with running_daemon(f"daemon.record={path}") as daemon:
        serve_some(daemon)
    return path


def test_it_holds_what_was_asked_for_and_stored(recording: Path) -> None:
    header, *lines = recorded(recording)
    assert header == {"format": "kvstored", "version": 2}
    assert Counter(line["op"] for line in lines)["put"] == 6
    assert all(isinstance(line["t"], float) and line["t"] >= 0 for line in lines)
    assert recording.stat().st_mode & 0o777 == 0o600


def test_a_unary_put_is_written_as_any_other(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    with running_daemon(f"daemon.record={path}") as daemon:
        with unary_client(f"unix:{daemon.socket_dir}/unary.sock") as client:
            client.put(by_tokens(MODEL, tokens_of(1, 3)), payloads_of(1, 3, MODEL))
        with daemon.connect() as session, session.get(tokens_of(1, 3)):
            pass
    put, get = (line for line in recorded(path) if "op" in line)
    assert (put["op"], put["f"], get["op"], get["f"]) == ("put", 3, "get", 3)
    trace = read_trace(path, "kvstored", ReadOptions(), lambda done, total: None)
    assert [len(trace.blocks[trace.starts[at] : trace.starts[at + 1]]) for at in range(trace.requests)] == [3, 3]


def test_a_stream_that_is_left_is_written_with_what_was_there(tmp_path: Path) -> None:
    path, tokens = tmp_path / "trace.jsonl.gz", tokens_of(1, 6)
    slow = "nvme.read=delay:0.05"
    with (
        running_daemon(f"daemon.record={path}", "movement.in_flight=1", failpoints=slow) as daemon,
        daemon.connect() as session,
    ):
        session.put(tokens, payloads=payloads_of(1, 6, MODEL), wait="settled", durability="always")
        daemon.drop("host")
        with session.get_stream(tokens) as stream:
            assert next(stream).lease.blocks < 6
        assert eventually(lambda: daemon.status().leases == 0)
    assert [line["f"] for line in recorded(path) if line.get("op") == "get"] == [6]


def test_a_hint_is_written_as_it_was_given(recording: Path) -> None:
    hints = [line for line in recorded(recording) if line.get("op") == "hint"]
    written = [{name: line[name] for name in ("f", "w", "s", "a", "d") if name in line} for line in hints]
    assert written == [{"f": 9, "w": 0.25, "a": 40}, {"f": 9, "s": NextStep.NEXT_STEP_TOOL_CALL, "d": 1500}]
    assert all("k" not in line for line in hints), "their chains were written before"
    trace = read_trace(recording, "kvstored", ReadOptions(), lambda done, total: None)
    chains = [trace.blocks[trace.starts[at] : trace.starts[at + 1]].tolist() for at in range(trace.requests)]
    ends = [
        max((chain for chain in chains if chain[0] == first), key=len)[-1] for first in (chains[0][0], chains[1][0])
    ]
    assert [each[3:] for each in trace.hints] == [
        (ends[0], 0.25, 0, 40, None),
        (ends[1], None, NextStep.NEXT_STEP_TOOL_CALL, 0, 1_500_000_000),
    ]


def test_a_chain_that_was_written_is_not_written_again(recording: Path) -> None:
    written = "".join(str(line.get("k", "")) for line in recorded(recording))
    assert len(written) // 16 == 9 + 9 + 5


def test_token_ids_are_nowhere(recording: Path) -> None:
    text = gzip.decompress(recording.read_bytes()).decode()
    keys = {"t", "op", "n", "c", "b", "f", "i", "p", "k", "w", "s", "a", "d", "format", "version"}
    assert {key for line in text.splitlines() for key in json.loads(line)} <= keys
    tokens = tokens_of(1, 1)
    assert bytes(int(token) & 0xFF for token in tokens).hex() not in text


def test_replayed_as_recorded_it_hits_what_the_daemon_hit(recording: Path) -> None:
    trace = read_trace(recording, "kvstored", ReadOptions(as_recorded=True), lambda done, total: None)
    assert trace.block_tokens == MODEL.block_tokens
    found = {float(line["t"]): line["f"] for line in recorded(recording)[1:] if line["op"] != "put"}  # type: ignore[arg-type]
    result = Replay(trace, ReplaySettings("lfu-ttl", trace.distinct_blocks)).run()
    hits = [int(hit) for hit, op in zip(result.hits, trace.ops, strict=True) if op == Op.GET]
    assert hits == [0, 0, 4, 4, 6, 6, 0]
    assert set(hits) <= set(found.values())


def test_the_command_reads_it(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--format", "kvstored", "--capacity", "1", "--policy", "lru", "--json"]
    assert main(["simulate", str(recording), *options]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(row["policy"], row["requests"], row["hits"]) for row in rows] == [
        ("unbounded", 7, 20),
        ("clairvoyant", 7, 20),
        ("lru", 7, 20),
    ]


def test_a_recording_survives_kill_9_and_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    directory = tmp_path / "daemon"
    directory.mkdir()
    daemon = RunningDaemon(directory, f"daemon.record={path}")
    daemon.start()
    try:
        serve_some(daemon)
        assert eventually(lambda: requests_in(path) == 7), "a second without an event, and all is on disk"
        daemon.kill9()
        assert requests_in(path) == 7
        found = path.read_bytes()
        with pytest.raises(AssertionError, match="a recording overwrites none"):
            daemon.restart()
        assert path.read_bytes() == found
    finally:
        if daemon.process is not None and daemon.process.poll() is None:
            daemon.kill9()
