"""`kvengine bench` as its user meets it: figures, files, and one clear line for every mistake."""

from __future__ import annotations

import importlib.util
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
        (["--model", "x.gguf", "--rounds", "3"], "--rounds goes with --against"),
        (["--url", "http://127.0.0.1:1", "--trace", "t.json"], "--trace"),
        (["--url", "http://127.0.0.1:1", "--against", "llama-server"], "give --model, not --url"),
        (["--model", "x.gguf", "--against", "llama-server", "--llama-server", "nowhere"], "no such file"),
        (["--model", "x.gguf", "--against", "llama-server", "--policy", "x"], "--policy is not for --against"),
        (["--model", "x.gguf", "--against", "llama-server", "--kv-dtype", "x"], "--kv-dtype is not for --against"),
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


@pytest.mark.slow
def test_beside_llama_cpps_own_server(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("xllamacpp") is None:
        pytest.skip("no xllamacpp: pip install '.[engine]'")
    load = ["--quick", "--prompt-tokens", "48", "--threads", "1"]
    code = main(["bench", "--model", str(tiny), "--against", "llama-server", *load, "--json"])
    output = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 0
    assert output["same_ggml_build"] is True
    assert output["baseline_cpu_features"]
    assert (
        [row["concurrency"] for row in output["rows"]]
        == [1, 4]
        == [row["concurrency"] for row in output["decode_rows"]]
    )
    for row in output["rows"]:
        for name in ("throughput_ratio_default", "throughput_ratio_best", "ttft_ratio_best", "tpot_ratio_best"):
            assert row[name] > 0
        assert row["throughput_ratio_best"] == pytest.approx(row["throughput_ours"] / row["throughput_best"])
    for row in output["decode_rows"]:
        assert row["throughput_ratio_best"] == pytest.approx(row["throughput_ours"] / row["throughput_best"])
