"""Each of a server's processes killed in the middle of an answer, the daemon too; and how a server ends."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon
from tests.reference.running_server import PATIENCE_S, RunningServer
from tests.reference.skips import skip_without_ggml
from tests.reference.tiny_llama import write_tiny_llama

pytest.importorskip("uvicorn", reason="the extra server is not installed")
pytest.importorskip("httptools", reason="the extra server is not installed")

_TOKENS = 200
_OPTIONS = ("--threads", "1", "--max-sequences", "4")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    skip_without_ggml()
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon() as running:
        yield running


@pytest.fixture(scope="module")
def shared(model: Path, daemon: RunningDaemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("server")
    server = RunningServer(folder, model, "--kvstore", str(daemon.socket_dir), *_OPTIONS)
    yield server
    assert server.stop() == 0, server.log


@pytest.fixture
def own(model: Path, tmp_path: Path) -> Iterator[RunningServer]:
    """A server for a test that ends it."""
    server = RunningServer(tmp_path, model, "--trace", str(tmp_path / "trace.json"), *_OPTIONS)
    yield server
    server.close()


def _fields(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": _TOKENS, "temperature": 0, "ignore_eos": True, **fields}


def _whole(server: RunningServer, prompt: str) -> str:
    status, body, _ = server.request("POST", "/v1/completions", _fields(prompt))
    assert status == 200, body
    text = body["choices"][0]["text"]
    assert isinstance(text, str)
    return text


class _Stream:
    """A streamed answer, read as far as a test wants."""

    def __init__(self, server: RunningServer, prompt: str) -> None:
        self._connection = HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
        self._connection.request("POST", "/v1/completions", json.dumps(_fields(prompt, stream=True)))
        self.response: HTTPResponse = self._connection.getresponse()
        assert self.response.status == 200
        self.text = ""
        self.error: dict[str, Any] | None = None
        self.is_done = False

    def read(self, chunks: int = 1 << 30) -> str:
        """Read `chunks` more chunks, or to the end."""
        while chunks and not self.is_done:
            line = self.response.readline()
            assert line, "the stream ended without saying so"
            if line.startswith(b"data: [DONE]"):
                self.is_done = True
            elif line.startswith(b"data: "):
                event = json.loads(line.removeprefix(b"data: "))
                self.error = event.get("error", self.error)
                self.text += "".join(choice["text"] for choice in event.get("choices", ()))
                chunks -= 1
        return self.text


def _caught(server: RunningServer, prompt: str) -> tuple[_Stream, int]:
    """A stream in the middle of its answer, and the worker of its server, which stands still."""
    worker = server.health()["worker"]["pid"]
    for _ in range(20):
        stream = _Stream(server, prompt)
        stream.read(5)
        os.kill(worker, signal.SIGSTOP)
        if server.health()["engine"]["requests"]:
            return stream, worker
        os.kill(worker, signal.SIGCONT)  # this test was too slow, and the answer complete
        stream.read()
    raise AssertionError("every answer was complete before its worker could be stopped")


def _disturbed(server: RunningServer, prompt: str, disturb: Callable[[], None]) -> _Stream:
    stream, worker = _caught(server, prompt)
    disturb()
    with contextlib.suppress(ProcessLookupError):  # it may be what the test killed
        os.kill(worker, signal.SIGCONT)
    stream.read()
    return stream


def test_a_worker_killed_in_the_middle_of_an_answer(shared: RunningServer) -> None:
    undisturbed = _whole(shared, "the cat sat")
    worker = shared.health()["worker"]["pid"]
    stream = _disturbed(shared, "the cat sat", lambda: os.kill(worker, signal.SIGKILL))
    assert stream.text == undisturbed
    health = shared.health()
    assert (health["worker"]["deaths"], health["worker"]["state"]) == (1, "ready")  # else there were no answer
    assert health["worker"]["pid"] != worker
    assert f"(pid {worker}) died: it was ended by SIGKILL" in shared.log
    assert "kvengine_worker_deaths_total 1" in shared.request("GET", "/metrics")[1]


def test_a_daemon_killed_in_the_middle_of_an_answer(shared: RunningServer, daemon: RunningDaemon) -> None:
    prompt = "the hat of the rat that ran. " * 8
    undisturbed = _whole(shared, prompt)
    assert shared.health()["kvstore"] == "connected"
    assert _disturbed(shared, prompt, daemon.kill9).text == undisturbed
    assert eventually(lambda: shared.health()["kvstore"] == "degraded")
    assert shared.health()["status"] == "degraded"
    assert _whole(shared, prompt) == undisturbed
    daemon.restart()
    assert eventually(lambda: shared.health()["kvstore"] == "connected")
    assert _whole(shared, prompt) == undisturbed


@pytest.mark.slow
def test_a_scheduler_killed_in_the_middle_of_an_answer(shared: RunningServer) -> None:
    undisturbed = _whole(shared, "the mat")
    scheduler, worker = shared.health()["engine"]["pid"], shared.health()["worker"]["pid"]
    gone = os.pidfd_open(worker)
    stream = _disturbed(shared, "the mat", lambda: os.kill(scheduler, signal.SIGKILL))
    assert stream.error is not None
    assert stream.error["code"] == "engine_unavailable"
    assert select.select([gone], [], [], PATIENCE_S)[0], "the worker ends with its scheduler"
    os.close(gone)
    assert eventually(lambda: shared.request("GET", "/health")[0] == 200)
    assert shared.health()["engine"]["restarts"] == 1
    assert _whole(shared, "the mat") == undisturbed


@pytest.mark.slow
def test_sigterm_finishes_what_runs(own: RunningServer, tmp_path: Path) -> None:
    undisturbed = _whole(own, "the cat sat")

    def terminate() -> None:
        own.process.send_signal(signal.SIGTERM)
        assert eventually(lambda: "finishing what runs" in own.log)

    assert _disturbed(own, "the cat sat", terminate).text == undisturbed
    assert own.process.wait(PATIENCE_S) == 0
    with pytest.raises((OSError, HTTPException)):
        own.health()
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"], "the other processes ended in order, too"


@pytest.mark.slow
def test_a_second_interrupt_ends_at_once(own: RunningServer) -> None:
    stream, worker = _caught(own, "the cat sat")
    processes = [os.pidfd_open(own.health()[name]["pid"]) for name in ("engine", "worker")]
    own.process.send_signal(signal.SIGINT)
    assert eventually(lambda: "finishing what runs" in own.log)
    assert own.process.poll() is None
    own.process.send_signal(signal.SIGINT)
    assert own.process.wait(PATIENCE_S) == 130
    os.kill(worker, signal.SIGCONT)
    for process in processes:
        assert select.select([process], [], [], PATIENCE_S)[0], "the other processes end too"
        os.close(process)
    assert not stream.is_done


def test_an_interrupt_while_the_engine_loads_its_modules_is_one_line(model: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "kvstore_engine.cli", "serve", "--model", str(model), "--port", "0", *_OPTIONS]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children")
    assert eventually(lambda: children.read_text() != "")
    mapped = Path(f"/proc/{children.read_text().split()[0]}/maps")
    assert eventually(lambda: "_multiarray" in mapped.read_text())  # NumPy; most modules come after it
    os.killpg(server.pid, signal.SIGINT)  # as a terminal does
    assert server.wait(PATIENCE_S) == 0
    assert (tmp_path / "log").read_text() == "kvengine: ending before it has served\n"
