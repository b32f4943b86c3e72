"""kvctl warm: what a daemon recorded, or a file of requests, is sent to an engine, the most used first."""

from __future__ import annotations

import gzip
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvctl.output import FAILED, UNREACHABLE, USAGE
from tests.reference.conversations import model, payloads_of, tokens_of
from tests.reference.kvctl import Kvctl
from tests.reference.running_daemon import RunningDaemon, running_daemon
from tests.reference.running_server import RunningServer
from tests.reference.skips import skip_without_ggml
from tests.reference.tiny_llama import byte_level_vocabulary, write_tiny_llama

MODEL = model()


class Engine(ThreadingHTTPServer):
    """An OpenAI endpoint that notes what it is asked, and refuses prompts that begin with `refuses`."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.refuses: object = None
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Engine

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "small"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            return self._answer(200, {"tokens": [ord(each) for each in body["prompt"]]})
        is_refused = body.get("prompt", [None])[0] == self.server.refuses is not None
        self.server.asked.append({"path": self.path, **body})
        self._answer(400 if is_refused else 200, {"error": "no"} if is_refused else {"choices": []})

    def _answer(self, status: int, document: dict[str, Any]) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(document).encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def recorded(path: Path, *, tokens: bool) -> None:
    with running_daemon(f"daemon.record={path}", f"daemon.record_tokens={str(tokens).lower()}") as daemon:
        with daemon.connect(MODEL) as session:
            for number, blocks in ((1, 3), (1, 5), (2, 4), (1, 5)):
                ids = tokens_of(number, blocks)
                with session.get(ids) as lease:
                    held = lease.blocks
                if held < blocks:
                    session.put(ids, payloads=payloads_of(number, blocks, MODEL))
        daemon.stop()


@pytest.fixture
def silent() -> Iterator[str]:
    """Return the address of a server that speaks another protocol than HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            with suppress(OSError):
                while True:
                    with listener.accept()[0] as connection:
                        connection.recv(1000)
                        connection.sendall(b"SSH-2.0-other\r\n")

        threading.Thread(target=greet, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def kvctl(capfdbinary: Any) -> Kvctl:
    nobody: Any = type("Nobody", (), {"socket_dir": "/nonexistent"})()
    daemon: RunningDaemon = nobody
    return Kvctl(daemon, capfdbinary)


def test_a_recording_with_token_ids_is_computed_again(tmp_path: Path, engine: Engine, kvctl: Kvctl) -> None:
    path = tmp_path / "today.jsonl.gz"
    recorded(path, tokens=True)
    planned = kvctl.json(["warm", "--from", str(path), "--dry-run"])
    assert (planned["prompts"], planned["incomplete"]) == (2, 0) and not engine.asked
    done = kvctl(["warm", "--from", str(path), "--to", engine.url, "--at-once", "1"])
    assert "sent 2 prompts" in done.out and "2 of 2 prompts sent" in done.err
    assert [body["prompt"] for body in engine.asked] == [tokens_of(1, 5).tolist(), tokens_of(2, 4).tolist()]
    assert {(body["path"], body["model"]) for body in engine.asked} == {("/v1/completions", "small")}
    assert {body["max_tokens"] for body in engine.asked} == {1}
    kvctl(["warm", "--from", str(path), "--to", engine.url, "--limit", "1"])
    assert len(engine.asked) == 3 and engine.asked[2]["prompt"][0] == tokens_of(1, 1)[0]


def test_a_recording_has_no_token_ids_unless_it_is_told(tmp_path: Path, engine: Engine, kvctl: Kvctl) -> None:
    path = tmp_path / "today.jsonl.gz"
    recorded(path, tokens=False)
    assert b'"x"' not in gzip.decompress(path.read_bytes())
    assert "2 more have no token ids" in kvctl(["warm", "--from", str(path), "--to", engine.url], exit_code=1).err


def test_requests_to_an_endpoint_are_sent_once_each(tmp_path: Path, engine: Engine, kvctl: Kvctl) -> None:
    path, chat = tmp_path / "requests.jsonl", {"messages": [{"role": "user", "content": "hello"}]}
    lines = [{"prompt": "once"}, {**chat, "temperature": 2}, chat, {"prompt": [7, 8]}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    engine.refuses = 7
    done = kvctl(["warm", "--from", str(path), "--to", engine.url, "--model", "big"], exit_code=1)
    assert "1 were refused, the first:" in done.out and "400" in done.out
    assert [body["path"] for body in engine.asked].count("/v1/chat/completions") == 1 and len(engine.asked) == 3
    path.write_text('{"prompt": "x"}\n{"no": 1}\n')
    assert "line 2: neither" in kvctl(["warm", "--from", str(path), "--to", engine.url], exit_code=2).err
    path.write_text('{"prompt": "x"}\nnot json\n')
    assert "line 2 is not JSON" in kvctl(["warm", "--from", str(path), "--dry-run"], exit_code=2).err
    unreachable = kvctl(["warm", "--from", str(tmp_path), "--to", "http://127.0.0.1:9", "--model", "m"], exit_code=2)
    assert "Is a directory" in unreachable.err


@pytest.mark.parametrize(
    "row",
    [
        {"op": "get", "p": ""},
        {"op": "put", "k": 5, "p": "", "b": 1},
        {"op": "put", "k": "a" * 16, "b": 0, "x": [1]},
        {"op": "put", "k": ("a" * 16 + "b" * 16) * 2 + "c" * 16, "b": 1, "x": [1, 2, 3, 4, 5]},
    ],
)
def test_a_spoilt_recording_is_one_clear_line(row: dict[str, Any], tmp_path: Path, kvctl: Kvctl) -> None:
    path = tmp_path / "spoilt.jsonl"
    path.write_text(json.dumps({"format": "kvstored"}) + "\n" + json.dumps(row) + "\n")
    said = kvctl(["warm", "--from", str(path), "--dry-run"], exit_code=2).err
    assert "is no recording of a daemon with token ids" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        (b"\x80\x04\x95\xff" * 50 + b"\n", "is not text"),
        (gzip.compress(bytes(range(256))), "is not text"),
        (gzip.compress(b'{"prompt": "x"}\n')[:-8] + bytes(8), "is damaged gzip"),
        (b"\x1f\x8b" + bytes(40), "is damaged gzip"),
        (b"\0\0\0\n", "line 1 is not JSON"),
        (b"[1, 2]\n", "line 1 is no JSON object"),
        (b"[" * 100_000, "line 1 is not JSON"),
        (b"no json, no end", "line 1 is not JSON"),
        (b"\n \n", "has no whole line"),
        (b"", "has no whole line"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_of_another_form_is_said_with_what_to_give(
    content: bytes, wrong: str, tmp_path: Path, kvctl: Kvctl
) -> None:
    (path := tmp_path / "other").write_bytes(content)
    said = kvctl(["warm", "--from", str(path), "--dry-run"], exit_code=2).err
    assert f"{path} {wrong}" in said and "daemon.record_tokens = true" in said and said.count("\n") == 1


def test_a_last_line_without_an_end_counts_if_it_is_whole(tmp_path: Path, kvctl: Kvctl) -> None:
    path = tmp_path / "requests.jsonl"
    for last, prompts in ('{"prompt": "b"}', 2), ('{"prompt": "b', 1):
        path.write_text(f'{{"prompt": "a"}}\n{last}')
        assert f"would send {prompts} prompts" in kvctl(["warm", "--from", str(path), "--dry-run"]).out


@pytest.mark.parametrize("url", ["engine", "file:///etc/passwd", "http://127.0.0.1 x:8000", "http://127.0.0.1:port"])
def test_what_is_no_address_of_an_engine_is_one_clear_line(url: str, tmp_path: Path, kvctl: Kvctl) -> None:
    (tmp_path / "requests").write_text('{"prompt": "a"}\n')
    said = kvctl(["warm", "--from", str(tmp_path / "requests"), "--to", url], exit_code=USAGE).err
    assert said.startswith(f"kvctl: {url}") and "such as http://" in said and said.count("\n") == 1


def test_a_server_that_is_no_engine_is_one_clear_line(silent: str, tmp_path: Path, kvctl: Kvctl) -> None:
    (tmp_path / "requests").write_text('{"prompt": "a"}\n')
    words = ["warm", "--from", str(tmp_path / "requests"), "--to", silent]
    assert f"kvctl: {silent}/v1/models does not answer" in kvctl(words, exit_code=UNREACHABLE).err
    assert "every prompt fails" in kvctl([*words, "--model", "any"], exit_code=FAILED).err


def test_a_prompt_as_text_is_pinned_by_the_engines_tokens(tmp_path: Path, engine: Engine, capfdbinary: Any) -> None:
    (tmp_path / "model.json").write_bytes(MODEL.canonical())
    text = "x" * (2 * MODEL.block_tokens + 5)
    (tmp_path / "system.txt").write_text(text)
    with running_daemon() as daemon:
        kvctl, ids = Kvctl(daemon, capfdbinary), [ord("x")] * (2 * MODEL.block_tokens)
        with daemon.connect(MODEL) as session:
            session.put(ids, payloads=payloads_of(1, 2, MODEL))
        words = ["--text", str(tmp_path / "system.txt"), "--fingerprint", str(tmp_path / "model.json")]
        assert kvctl.json(["pin", "a", *words, "--tokenize", engine.url])["blocks"] == 2
        assert {tuple(block["pinned_by"]) for block in kvctl.json("blocks")["blocks"]} == {("a",)}
        assert "does not answer" in kvctl(["unpin", "a", *words, "--tokenize", "http://127.0.0.1:9"], exit_code=3).err


@pytest.mark.slow
def test_an_engine_computes_and_stores_what_a_daemon_recorded(tmp_path: Path, capfdbinary: Any) -> None:
    """A real engine stores the prompts of yesterday in an empty daemon again, and the next request finds them."""
    skip_without_ggml()
    for needed in ("uvicorn", "httptools"):
        pytest.importorskip(needed, reason="the extra server is not installed")
    weights, path = write_tiny_llama(tmp_path / "tiny.gguf", byte_level_vocabulary()), tmp_path / "today.jsonl.gz"
    prompts = [f"{number} cats sat on the mat and the hat of the rat. " * 8 for number in range(3)]

    def ask(server: RunningServer, prompt: str) -> int:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0}
        status, answer, _ = server.request("POST", "/v1/completions", body)
        assert status == 200, answer
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    @contextmanager
    def serving(daemon: RunningDaemon) -> Iterator[RunningServer]:
        command = ("--served-name", "tiny", "--threads", "1", "--kvstore", str(daemon.socket_dir))
        server = RunningServer(tmp_path, weights, *command)
        try:
            yield server
            assert server.stop() == 0, server.log
        finally:
            server.close()

    with running_daemon(f"daemon.record={path}", "daemon.record_tokens=true") as daemon:
        with serving(daemon) as server:
            assert [ask(server, prompt) for prompt in prompts] == [0, 0, 0]
        daemon.stop()
    with running_daemon() as daemon:
        with serving(daemon) as server:
            done = Kvctl(daemon, capfdbinary)(["warm", "--from", str(path), "--to", server.url])
            assert "sent 3 prompts" in done.out
        with serving(daemon) as server:
            assert all(ask(server, prompt) > 100 for prompt in prompts), "the daemon has them"
