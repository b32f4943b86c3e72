"""`kvengine bench` as its user meets it: figures, files, and one clear line for every mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstore_engine.cli.main import main
from tests.reference.skips import skip_without_ggml
from tests.reference.tiny_llama import write_tiny_llama


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    skip_without_ggml()
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf")


def test_a_quick_look_at_an_engine(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, trace = tmp_path / "out", tmp_path / "trace.json"
    load = [
        "--quick",
        "--requests",
        "4",
        "--load",
        "chat",
        "shared-90",
        "--concurrency",
        "2",
        "--block-sizes",
        "16",
        "32",
    ]
    code = main(["bench", "--model", str(tiny), *load, "--out", str(out), "--trace", str(trace), "--json", "--quiet"])
    output = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 0
    assert [(case["load"], case["block_tokens"]) for case in output["cases"]] == [
        ("chat", 16),
        ("chat", 32),
        ("shared-90", 16),
        ("shared-90", 32),
    ]
    for case in output["cases"]:
        assert case["requests"] == 4 and case["failed"] == 0
        assert case["generated_tokens"] == 4 * 16
        assert case["evaluated_ratio"] == pytest.approx(1.0)
    assert {path.name for path in out.iterdir()} == {"bench.json", "bench.csv", "bench.html"}
    assert any(event["name"].startswith("prefill") for event in json.loads(trace.read_text())["traceEvents"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "nothing to measure"),
        (["--model", "x.gguf"], "no model 'x.gguf'"),
        (["--model", "x.gguf", "--load", "chats"], "load 'chats' is unknown"),
        (["--model", "x.gguf", "--concurrency", "0"], "the concurrency must be 1 to"),
        (["--model", "x.gguf", "--block-sizes", "4"], "a block holds 8 to 256 tokens"),
        (["--url", "http://127.0.0.1:1", "--trace", "t.json"], "--trace"),
    ],
)
def test_a_mistake_gets_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    output = capsys.readouterr().err
    assert said in output and output.count("\n") == 1


def test_a_prompt_longer_than_the_model_allows(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--model", str(tiny), "--prompt-tokens", "2000", "--concurrency", "1", "--quiet"]) == 2
    assert "was trained for" in capsys.readouterr().err


def test_no_server_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--url", "http://127.0.0.1:1", "--quick"]) == 1
    assert "no server answers" in capsys.readouterr().err
