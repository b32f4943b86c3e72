"""The server's parts that need no engine: keys, frames, messages, tool calls, metrics, sessions, the command line."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from kvstore_engine.batching.events import Event, Finished, Token, Usage
from kvstore_engine.batching.request import Request
from kvstore_engine.cli import serve_arguments
from kvstore_engine.cli.main import main
from kvstore_engine.errors import UsageError
from kvstore_engine.gguf import FileChanged
from kvstore_engine.sampler import SamplingSettings
from kvstore_engine.server import engine_client, messages
from kvstore_engine.server.api_errors import ApiError
from kvstore_engine.server.assembly import MAX_SESSIONS, Serving, TenantSessions, fingerprint_for
from kvstore_engine.server.engine_client import EngineClient, EventQueue
from kvstore_engine.server.engine_process import EngineLoop
from kvstore_engine.server.keys import KeyRing
from kvstore_engine.server.messages import Ask, events_headers, unpack_events
from kvstore_engine.server.metrics import Metrics
from kvstore_engine.server.options import EngineOptions
from kvstore_engine.server.server_process import _bound, _on_signals
from kvstore_proto.fingerprint import Fingerprint
from tests.reference.tiny_llama import write_tiny_llama


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no API keys"),
        ("# nothing\n", "holds no API keys"),
        ("lonely-key\n", "line 1"),
        ("good-key-1 anna\nshort b\n", "line 2: a key needs at least 8"),
        ("good-key-1 anna high\n", "priority must be an integer"),
        ("good-key-1 anna 5000\n", "-1000 to 1000"),
        ("good-key-1 anna 1 2\n", "4 words"),
        ("good-key-1 anna\ngood-key-1 bert\n", "line 2: this key is"),
        (f"good-key-1 {'a' * 65}\n", "at most 64 printable"),
        ("good-key-1 an\x1b[31mna\n", "line 1: a tenant's name"),
    ],
)
def test_a_bad_key_file_is_said_by_line_and_never_shows_a_key(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(UsageError, match=says) as caught:
        KeyRing.read(path)
    assert "good-key" not in str(caught.value)
    assert "lonely" not in str(caught.value)


def test_a_key_may_be_written_by_any_editor_in_any_language(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes("\ufeffkey-of-anna anna\r\nclé-de-bert bert\r\n".encode())
    keys = KeyRing.read(path)
    for key, tenant in (("key-of-anna", "anna"), ("clé-de-bert", "bert")):
        caller = keys.caller(f"Bearer {key}".encode().decode("latin-1"))  # as headers are read
        assert caller is not None
        assert caller.tenant == tenant


@pytest.mark.parametrize("host", ["..", "a" * 100])
def test_a_host_that_cannot_be_is_said(host: str) -> None:
    with pytest.raises(UsageError, match="no address for --host"):
        _bound(host, 0)


def test_a_key_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        KeyRing.read(tmp_path / "keys")


@given(st.lists(st.tuples(st.dictionaries(st.text(max_size=5), st.integers()), st.binary(max_size=50)), max_size=5))
def test_frames_survive_a_socket_in_any_pieces(sent: list[tuple[dict[str, int], bytes]]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        raw = b"".join(messages.encode(header, blob) for header, blob in sent)
        reader, received = messages.FrameReader(theirs), []
        for first in range(0, len(raw), 7):
            ours.sendall(raw[first : first + 7])
            received += reader.receive()
        assert received == sent
        ours.close()
        with pytest.raises(EOFError):
            reader.receive()


def test_a_frame_that_is_absurd_is_refused() -> None:
    with pytest.raises(messages.BrokenFrame):
        messages.lengths(messages.LENGTHS.pack(1 << 31, 0))


def test_events_and_requests_survive_the_way() -> None:
    events: list[Event] = [
        Token("a", 1, 5, "é\ud7ff", -0.5, ((5, -0.5), (6, -1.0))),
        Token("b", 0, 6, ""),
        Finished("a", 1, "stop", Usage(prompt_tokens=3, ttft_s=0.5), "", "tail"),
    ]
    (header,) = events_headers(events)
    assert unpack_events(json.loads(json.dumps(header))) == events


def test_answers_that_come_all_at_once_travel_in_several_frames() -> None:
    events: list[Event] = [Token("a", 0, number, "x") for number in range(10_000)]
    events.append(Finished("a", 0, "end", Usage()))
    headers = events_headers(events)
    assert len(headers) > 2
    assert [event for header in headers for event in unpack_events(json.loads(json.dumps(header)))] == events
    assert events_headers([]) == []
    ask = Ask("a", np.array([1, 2, 70000], np.int32), 5, SamplingSettings(0.5, 3, 0.9, 7), stop=("x",), tenant="t")
    assert json.loads(json.dumps(ask.header()))["sampling"]["seed"] == 7
    assert messages.unpack_tokens(messages.pack_tokens(ask.tokens)).tolist() == [1, 2, 70000]


_STATUS = {
    "counters": {"steps": 7, "step_s": 0.5, "preemptions": 2, "swaps": 1},
    "pool": {"blocks": 64, "free_blocks": 60},
    "worker": {"deaths": 3},
    "sequences": {"running": 2, "waiting": 1},
    "kvstore": "connected",
    "restored": {"by_plan": {"tokens": 4}, "chunks": {"loaded": 9}, "predicted_s": 0.25, "actual_s": 0.5},
}


def test_metrics_are_what_a_prometheus_server_reads() -> None:
    metrics = Metrics()
    for index in (0, 1):  # one prompt, for any number of answers
        usage = Usage(prompt_tokens=5, generated_tokens=2, tpot_s=0.1, ttft_s=0.1)
        metrics.answered(Finished("a", index, "end", usage))
    metrics.responded("/health", 200)
    families = list(
        text_string_to_metric_families(metrics.text(EngineClient(EngineOptions("m.gguf")), _STATUS).decode())
    )
    assert len({family.name for family in families}) == len(families) == 25
    samples = {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}
    assert not any(name.endswith("_created") for name, *_ in samples)
    expected = {
        ("responses_total", "/health", "200"): 1,
        ("answers_total", "end"): 2,
        ("tokens_total", "prompt"): 5,
        ("tokens_total", "generated"): 4,
        ("disconnects_total",): 0,
        ("time_per_output_token_seconds_bucket", "0.075"): 0,
        ("time_per_output_token_seconds_bucket", "0.1"): 2,
        ("queue_seconds_count",): 2,
        ("engine_ready",): 0,
        ("steps_total",): 7,
        ("step_seconds_total",): 0.5,
        ("worker_deaths_total",): 3,
        ("sequences_waiting",): 1,
        ("pool_free_blocks",): 60,
        ("kvstore_connected",): 1,
        ("restorations_total", "tokens"): 4,
        ("restored_chunks_total", "loaded"): 9,
        ("restore_predicted_seconds_total",): 0.25,
        ("restore_seconds_total",): 0.5,
    }
    assert {name: samples[f"kvengine_{name[0]}", *name[1:]] for name in expected} == expected


class _Session:
    state = "connected"

    def close(self) -> None:
        self.state = "closed"


def test_tenants_have_sessions_and_keys_of_their_own(tmp_path: Path) -> None:
    opened: list[tuple[bytes, _Session]] = []

    def connect(folder: Path, *, fingerprint: Fingerprint, client_name: str) -> Any:
        opened.append((fingerprint.digest(), _Session()))
        return opened[-1][1]

    plain = Fingerprint("m", "digest")
    sessions = TenantSessions(tmp_path, plain, connect)
    assert sessions.state() == "none"
    assert sessions("anna") is sessions("anna")
    assert sessions("") is not sessions("anna")
    assert len({digest for digest, _ in opened}) == 2
    assert fingerprint_for(plain, "") == plain
    assert fingerprint_for(plain, "anna").account == "anna"
    assert sessions.state() == "connected"
    opened[0][1].state = "degraded"
    assert sessions.state() == "degraded"
    for number in range(MAX_SESSIONS):
        sessions(f"tenant {number}")
    assert len(opened) == MAX_SESSIONS
    assert sessions("one more") is None
    sessions.close()
    assert all(session.state == "closed" for _, session in opened)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--host", "0.0.0.0"], "--api-keys"),
        (["--api-keys", "/nonexistent/keys"], "cannot read the API keys"),
        (["--pool", "1KiB"], "give --pool"),
        (["--pool", "9999TiB"], "does not fit"),
        (["--context", "100000"], "context"),
    ],
)
def test_a_mistake_in_the_command_is_one_line_and_exit_2(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    pytest.importorskip("uvicorn", reason="the extra server is not installed")
    pytest.importorskip("httptools", reason="the extra server is not installed")
    model = write_tiny_llama(tmp_path / "tiny.gguf")
    assert main(["serve", "--model", str(model), "--port", "0", *arguments]) == 2
    errors = capfd.readouterr().err.strip()
    assert says in errors
    assert errors.count("\n") == 0


def test_a_port_in_use_is_said_before_a_model_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("uvicorn", reason="the extra server is not installed")
    pytest.importorskip("httptools", reason="the extra server is not installed")
    model = write_tiny_llama(tmp_path / "tiny.gguf")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", "--model", str(model), "--port", str(port)]) == 2
    assert f"cannot listen on port {port}" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "size"), [("2GiB", 2 << 30), ("1.5MiB", 3 << 19), ("100", 100), ("64 KiB", 1 << 16)])
def test_sizes_are_read(text: str, size: int) -> None:
    assert serve_arguments.size(text) == size


@pytest.mark.parametrize(
    "option",
    [
        ["--port", "70000"],
        ["--pool", "much"],
        ["--max-sequences", "0"],
        ["--max-sequences", "257"],
        ["--drain-s", "-1"],
        ["--hung-after-s", "0"],
        ["--store-rate", "fast"],
    ],
)
def test_options_out_of_range_are_refused(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--model", "m", *option])
    assert ended.value.code == 2
    assert option[0] in capsys.readouterr().err


def test_an_engine_that_cannot_be_started_again_is_tried_again_for_any_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = EngineClient(EngineOptions("m.gguf"))

    async def nonsense() -> None:
        raise messages.BrokenFrame("a frame of 4 GiB")

    monkeypatch.setattr(client, "_spawn", nonsense)
    assert asyncio.run(client._restarted(0.0)) is False
    assert client.trouble == "a frame of 4 GiB"


@pytest.mark.parametrize("when", ["running", "restarting"])
def test_a_changed_model_file_ends_the_restarts(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client, spawned = EngineClient(EngineOptions("m.gguf")), []

    async def changed(*_: object) -> None:
        spawned.append(client.state)
        raise FileChanged("it was changed")

    async def ended() -> None:
        return None

    async def run() -> ApiError:
        client.state = "ready"
        monkeypatch.setattr(client, "_spawn", changed)
        monkeypatch.setattr(client, "_receive", changed if when == "running" else ended)
        monkeypatch.setattr(engine_client, "_FIRST_PAUSE_S", 0.0)
        client._waiting["a"] = waiting = EventQueue()
        await client._keep_alive()
        with pytest.raises(ApiError) as caught:
            await waiting.next()
        assert (client.state, client.trouble, len(spawned)) == ("stopped", "it was changed", 1)
        if when == "running":
            assert str(caught.value) == "it was changed"
        with pytest.raises(ApiError) as refused:
            client.submit([Ask("b", np.array([1], np.int32), 5, SamplingSettings())])
        await client.close()
        return refused.value

    error = asyncio.run(run())
    assert (error.status, error.code, str(error)) == (503, "engine_unavailable", "it was changed")


class _Broken:
    """An engine, and a maker of constraints, that fail unexpectedly."""

    def add(self, request: Request) -> None:
        raise ZeroDivisionError("of the request's own")


def test_a_request_that_cannot_be_taken_in_leaves_the_others_alone() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        serving = Serving(_Broken(), None, None, None, None, None, None)  # type: ignore[arg-type]  # nothing else is asked
        ask = Ask("a", np.array([1], np.int32), 5, SamplingSettings())
        EngineLoop(ours)._add(serving, ask.header(), messages.pack_tokens(ask.tokens))
        ((header, _),) = messages.FrameReader(theirs).receive()
    assert (header["refused"], header["kind"]) == ("a", "failed")
    assert "own" not in header["message"]  # it might quote a prompt


@pytest.mark.parametrize(("has_started", "says"), [(True, "finishing what runs"), (False, "ending before")])
def test_a_signal_says_what_it_brings_about(has_started: bool, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    async def run() -> None:
        stopping = asyncio.Event()
        _on_signals(stopping, lambda: has_started)
        os.kill(os.getpid(), signal.SIGTERM)
        await stopping.wait()

    asyncio.run(run())
    assert says in capsys.readouterr().err
