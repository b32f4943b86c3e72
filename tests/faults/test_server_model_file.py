"""The model's file is replaced, written to or cut while a server has it, and the server's processes are killed."""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore_engine.batching.request import RequestSettings
from kvstore_engine.generation import Prompt
from kvstore_engine.gguf import FileChanged
from kvstore_engine.loaded_model import LoadOptions, open_model
from tests.reference.assumed_costs import assume
from tests.reference.make_gguf import TinyModel, write_model
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon
from tests.reference.running_server import RunningServer
from tests.reference.skips import skip_without_ggml
from tests.tidy.tree import ROOT

pytest.importorskip("uvicorn", reason="the extra server is not installed")
pytest.importorskip("httptools", reason="the extra server is not installed")

_MODEL = TinyModel(layers=2, width=64, heads=2, kv_heads=1, head_dim=32, feed_forward=128, seed=1)
_SAME_SHAPE = replace(_MODEL, seed=2)
_OTHER_SHAPE = replace(_MODEL, layers=4, seed=3)
_OTHER_TEMPLATE = replace(_MODEL, metadata={"tokenizer.chat_template": "{{ messages[0]['content'] * 3 }}"})
_OPTIONS = ("--threads", "1", "--max-sequences", "2", "--context", "512")
_PROMPTS = [f"number {number}: " + "the and is in " * 20 for number in range(3)]
_CHAT = {"messages": [{"role": "user", "content": "what is in there"}], "max_tokens": 1}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    skip_without_ggml()
    return write_model(tmp_path_factory.mktemp("original") / "original.gguf", _MODEL)


@pytest.fixture(scope="module")
def answers(original: Path) -> list[str]:
    """Return the answers of the untouched file, from an engine without a daemon."""
    with open_model(original, LoadOptions(context=512, threads=1, warm_up=False)) as model:
        return [model.generator.generate(Prompt(prompt), _settings()).text for prompt in _PROMPTS]


@pytest.fixture
def path(original: Path, tmp_path: Path) -> Path:
    (tmp_path / "live.gguf").write_bytes(original.read_bytes())
    return tmp_path / "live.gguf"


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon() as running:
        yield running


@pytest.fixture
def server(path: Path, tmp_path: Path, daemon: RunningDaemon) -> Iterator[RunningServer]:
    running = RunningServer(tmp_path, path, "--kvstore", str(daemon.socket_dir), *_OPTIONS)
    yield running
    running.close()


def _settings() -> RequestSettings:
    return RequestSettings(max_tokens=70, ignore_end=True)


def _ask(server: RunningServer, prompt: str) -> tuple[int, Any]:
    fields = {"prompt": prompt, "max_tokens": 70, "temperature": 0, "ignore_eos": True}
    status, body, _ = server.request("POST", "/v1/completions", fields)
    return status, body["choices"][0]["text"] if status == 200 else body["error"]


def _answers(server: RunningServer) -> list[tuple[int, Any]]:
    return [_ask(server, prompt) for prompt in _PROMPTS]


def _with_untouched_file(original: Path, daemon: RunningDaemon) -> tuple[list[str], list[int]]:
    """The answers of an engine that restores what is stored, and how many tokens it restored for each."""
    options = LoadOptions(context=512, threads=1, kvstore=daemon.socket_dir, warm_up=False)
    with open_model(original, options) as model:
        assume(model.generator.costs)  # computing looks slow: all that is stored is loaded
        made = [model.generator.generate(Prompt(prompt), _settings()) for prompt in _PROMPTS]
    return [each.text for each in made], [each.restore.tokens for each in made]


def _kill(server: RunningServer, what: str) -> None:
    """Kill the worker or the scheduler, and wait for the next one."""
    before = server.health()[what]["pid"]
    os.kill(before, signal.SIGKILL)
    assert eventually(lambda: server.request("GET", "/health")[0] == 200 and server.health()[what]["pid"] != before)


@pytest.mark.parametrize(
    "model", [pytest.param(_SAME_SHAPE, marks=pytest.mark.slow), pytest.param(_OTHER_SHAPE, marks=pytest.mark.slow)]
)
def test_another_model_renamed_over_the_file_is_not_served_until_the_next_start(
    model: TinyModel, server: RunningServer, path: Path, original: Path, daemon: RunningDaemon, answers: list[str]
) -> None:
    template = {"tokenizer.chat_template": "{{ messages[0]['content'] * 3 }}"}
    prompt_tokens = server.request("POST", "/v1/chat/completions", _CHAT)[1]["usage"]["prompt_tokens"]
    write_model(path.with_name("new.gguf"), replace(model, metadata=template)).rename(path)
    for killed in ("nothing", "worker", "engine", "worker"):
        if killed != "nothing":
            _kill(server, killed)
        assert _answers(server) == [(200, answer) for answer in answers], killed
        assert server.request("POST", "/v1/chat/completions", _CHAT)[1]["usage"]["prompt_tokens"] == prompt_tokens
    assert server.health()["engine"]["restarts"] == 1
    server.stop()
    restored, tokens = _with_untouched_file(original, daemon)
    assert restored == answers
    assert all(tokens)


@pytest.mark.slow
def test_a_worker_started_after_a_rename_has_the_weights_of_the_old_file(
    server: RunningServer, path: Path, original: Path, daemon: RunningDaemon, answers: list[str]
) -> None:
    write_model(path.with_name("new.gguf"), _SAME_SHAPE).rename(path)
    _kill(server, "worker")
    assert _answers(server) == [(200, answer) for answer in answers]
    server.stop()
    assert _with_untouched_file(original, daemon)[0] == answers


def _overwritten(path: Path, model: TinyModel = _SAME_SHAPE) -> None:
    before = path.stat()
    path.write_bytes(write_model(path.with_name("new.gguf"), model).read_bytes())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _of_another_shape(path: Path) -> None:
    _overwritten(path, _OTHER_SHAPE)


def _with_another_template(path: Path) -> None:
    _overwritten(path, _OTHER_TEMPLATE)


def _cut(path: Path) -> None:
    os.truncate(path, 20_000)


def _by_a_map(path: Path) -> None:
    data = write_model(path.with_name("new.gguf"), _SAME_SHAPE).read_bytes()
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[:] = data


def _refused(server: RunningServer) -> dict[str, Any]:
    status, error = _ask(server, _PROMPTS[0])
    assert status == 503
    assert isinstance(error, dict)
    return error


@pytest.mark.parametrize(
    "change",
    [
        _overwritten,
        pytest.param(_cut, marks=pytest.mark.slow),
        pytest.param(_of_another_shape, marks=pytest.mark.slow),
        pytest.param(_with_another_template, marks=pytest.mark.slow),
        pytest.param(_by_a_map, marks=pytest.mark.slow),
    ],
)
def test_a_file_that_was_written_to_ends_answers_and_stores_nothing(
    change: Callable[[Path], None],
    server: RunningServer,
    path: Path,
    original: Path,
    daemon: RunningDaemon,
    answers: list[str],
) -> None:
    assert _ask(server, _PROMPTS[1]) == (200, answers[1])
    change(path)
    error = _refused(server)
    assert (error["type"], error["code"]) == ("server_error", "engine_unavailable")
    assert error["message"].startswith(f"the model file {path} was changed while it was in use")
    status, health, _ = server.request("GET", "/health")
    assert (status, health["status"], health["engine"]["state"]) == (503, "unavailable", "stopped")
    assert health["engine"]["trouble"] == error["message"]
    assert eventually(lambda: not server.health()["engine"]["pid"]), "what was computed before is stored, then it ends"
    assert _refused(server) == error
    assert server.health()["engine"]["restarts"] == 0
    assert server.log.count("was changed while it was in use") == 1
    assert "Traceback" not in server.log
    assert server.stop() == 0
    restored, tokens = _with_untouched_file(original, daemon)
    assert restored == answers
    assert tokens[1] and not tokens[0], "of the refused prompt nothing is stored"


@pytest.mark.slow
def test_a_change_is_noticed_without_a_request(server: RunningServer, path: Path) -> None:
    _overwritten(path)
    assert eventually(lambda: server.request("GET", "/health")[0] == 503)


@pytest.mark.slow
def test_a_scheduler_that_dies_after_a_change_is_not_started_with_it(server: RunningServer, path: Path) -> None:
    scheduler = server.health()["engine"]["pid"]
    os.kill(scheduler, signal.SIGSTOP)  # so that it cannot notice
    _of_another_shape(path)
    os.kill(scheduler, signal.SIGKILL)
    assert eventually(lambda: server.health()["engine"]["state"] == "stopped")
    assert server.health()["engine"]["restarts"] == 1
    assert "was changed" in _refused(server)["message"]


@pytest.mark.slow
def test_without_a_daemon_it_is_the_same(path: Path, tmp_path: Path, answers: list[str]) -> None:
    server = RunningServer(tmp_path, path, *_OPTIONS)
    try:
        write_model(path.with_name("new.gguf"), _SAME_SHAPE).rename(path.with_name("other.gguf"))
        path.rename(path.with_name("moved.gguf"))
        assert _answers(server) == [(200, answer) for answer in answers]
        _overwritten(path.with_name("moved.gguf"))
        assert "was changed" in _refused(server)["message"]
    finally:
        server.close()


@pytest.mark.slow
def test_a_device_of_torch(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    server = RunningServer(tmp_path, path, "--device", "torch:cpu", *_OPTIONS)
    try:
        before = _answers(server)
        write_model(path.with_name("new.gguf"), _SAME_SHAPE).rename(path)
        _kill(server, "engine")
        assert _answers(server) == before
    finally:
        server.close()


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
def test_a_generator_stores_and_answers_nothing_of_a_changed_file(
    stages: int, path: Path, original: Path, daemon: RunningDaemon, answers: list[str]
) -> None:
    options = LoadOptions(context=512, threads=1, kvstore=daemon.socket_dir, warm_up=False, stages=stages)
    with open_model(path, options) as model:
        assert model.generator.generate(Prompt(_PROMPTS[1]), _settings()).text == answers[1]
        path.with_name("link").hardlink_to(path)
        assert model.generator.generate(Prompt(_PROMPTS[2]), _settings()).text == answers[2]
        _overwritten(path.with_name("link"))
        with pytest.raises(FileChanged, match="was changed while it was in use"):
            model.generator.generate(Prompt(_PROMPTS[0]), _settings())
    with open_model(original, replace(options)) as model:
        made = [model.generator.generate(Prompt(prompt), _settings()) for prompt in _PROMPTS]
    assert [each.text for each in made] == answers
    assert made[0].restore.tokens == 0


@pytest.mark.slow
def test_the_benchmark_compares_blocks_and_finds_nothing_wrong() -> None:
    options = ["--rounds", "4", "--ways", "renamed over,overwritten", "--seed", "5", "--json"]
    command = [sys.executable, str(ROOT / "benchmarks" / "model_replaced.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert row["rounds"] == 4
    assert not any(row[name] for name in ("blocks_different", "blocks_of_no_asked_prompt", "answers_wrong"))
    assert row["blocks_compared"] > 0
