"""`serve --record`, then `simulate`: what a daemon did comes back as a trace, without a token in it."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from kvstored.cli import main
from kvstored.simulator.readers import ReadOptions, read_trace
from kvstored.simulator.replay import Replay, ReplaySettings
from kvstored.simulator.trace import Op, TraceError
from tests.reference.running_daemon import RunningDaemon, eventually, model, payloads_of, running_daemon, tokens_of

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


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recording") / "trace.jsonl.gz"
    with running_daemon(f"daemon.record={path}") as daemon:
        serve_some(daemon)
    return path


def test_it_holds_what_was_asked_for_and_stored(recording: Path) -> None:
    header, *lines = recorded(recording)
    assert header == {"format": "kvstored", "version": 1}
    assert Counter(line["op"] for line in lines)["put"] == 6
    assert all(isinstance(line["t"], float) and line["t"] >= 0 for line in lines)
    assert recording.stat().st_mode & 0o777 == 0o600


def test_a_chain_that_was_written_is_not_written_again(recording: Path) -> None:
    written = "".join(str(line.get("k", "")) for line in recorded(recording))
    assert len(written) // 16 == 9 + 9 + 5


def test_token_ids_are_nowhere(recording: Path) -> None:
    text = gzip.decompress(recording.read_bytes()).decode()
    keys = {"t", "op", "n", "c", "b", "f", "i", "p", "k", "format", "version"}
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
