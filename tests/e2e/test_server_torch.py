"""`kvengine serve` on a device of torch's, for which the processor stands, with a real daemon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstore_engine.cli.main import main
from kvstore_proto.v1 import admin_pb2
from tests.reference.running_daemon import running_daemon
from tests.reference.running_server import RunningServer
from tests.reference.skips import skip_without_ggml
from tests.reference.tiny_llama import byte_level_vocabulary, write_tiny_llama

pytest.importorskip("torch", reason="needs the extra torch")
pytest.importorskip("uvicorn", reason="the extra server is not installed")
pytest.importorskip("httptools", reason="the extra server is not installed")

_PROMPT = {"prompt": list(range(5, 60)) * 8, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "logprobs": 2}
_CLOSE = 0.1  # log probabilities that rounding may bring into another order: a step's bits depend on its rows here
_CHUNKS = 6  # whole blocks of 64 tokens before the prompt's last one


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    skip_without_ggml()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # what servers learn of costs
    return write_tiny_llama(tmp_path / "tiny.gguf", byte_level_vocabulary())


def _asked(folder: Path, model: Path, *arguments: str, device: str = "torch:cpu", times: int = 1) -> list[Any]:
    """The answers of a server that ends in order."""
    folder.mkdir()
    server = RunningServer(folder, model, "--device", device, "--threads", "1", *arguments)
    try:
        assert server.health()["status"] == "ok"
        assert ("in the scheduler's process" in server.log) == (device != "cpu")
        answers = []
        for _ in range(times):
            status, answer, _ = server.request("POST", "/v1/completions", _PROMPT)
            assert status == 200, answer
            answers.append(answer)
        metrics = server.request("GET", "/metrics")[1].splitlines()
        assert "kvengine_worker_deaths_total 0.0" in metrics
        assert server.stop() == 0, server.log
        return answers
    finally:
        server.close()


def _assert_same(one: Any, other: Any) -> None:
    """The same tokens, up to the first step where the two likeliest are too close to call."""
    ours, theirs = one["choices"][0]["logprobs"], other["choices"][0]["logprobs"]
    for token, its, top in zip(ours["tokens"], theirs["tokens"], ours["top_logprobs"], strict=True):
        if token != its:
            best, second = sorted(top.values(), reverse=True)[:2]
            assert best - second < _CLOSE, (token, its, top)
            return


def _cached(answer: Any) -> dict[str, int]:
    cached: dict[str, int] = answer["usage"]["prompt_tokens_details"]
    return cached


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_one_server_stored_another_restores_and_the_answer_is_the_same(tmp_path: Path, model: Path) -> None:
    with running_daemon() as daemon:
        stores = "--kvstore", str(daemon.socket_dir)
        first, again = _asked(tmp_path / "first", model, *stores, times=2)
        daemon.ask("Flush", admin_pb2.FlushRequest())
        (restored,) = _asked(tmp_path / "second", model, *stores)
        (others,) = _asked(tmp_path / "ggml", model, *stores, device="cpu")
    for other in (again, restored):
        _assert_same(first, other)
    assert [_cached(each)["daemon_tokens"] for each in (first, again, others)] == [0, 0, 0]
    assert 0 < _cached(restored)["daemon_tokens"] <= 64 * _CHUNKS
    assert _cached(again)["local_tokens"] > 400, "blocks are shared within a server"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_block_of_one_type_is_served_as_another_of_the_same_size(tmp_path: Path, model: Path) -> None:
    with running_daemon() as daemon:
        stores = "--kvstore", str(daemon.socket_dir)
        found = []
        for number, kv_dtype in enumerate(("int8", "fp8", "fp8")):
            (answer,) = _asked(tmp_path / f"{number}", model, *stores, "--kv-dtype", kv_dtype)
            daemon.ask("Flush", admin_pb2.FlushRequest())
            found.append(_cached(answer)["daemon_tokens"])
    assert found[:2] == [0, 0] and found[2] > 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        pytest.param(["--device", "cuda"], "finds no CUDA device here; use --device cpu", marks=pytest.mark.slow),
        (["--device", "metal"], "choose cpu, cuda, cuda:N or torch:cpu"),
        (["--device", "torch:cpu", "--kv-dtype", "q4_0"], "K/V type q4_0 is not kept on torch:cpu"),
        pytest.param(["--device", "torch:cpu", "--pool", "9999TiB"], "does not fit into", marks=pytest.mark.slow),
    ],
)
def test_what_a_device_cannot_do_is_one_line_before_anything_is_served(
    model: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert main(["serve", "--model", str(model), "--port", "0", *arguments]) == 2
    errors = capfd.readouterr().err.strip()
    assert says in errors and errors.count("\n") == 0
