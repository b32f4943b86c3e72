"""kvstored predictor, and kvctl's way to it; simulate's --predictor."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvstore_simulator import training
from kvstored.cli import EXIT_OK, EXIT_USAGE, main
from kvstored.store.prefetch.model_file import read_model, write_model
from tests.reference.recordings import write_sessions
from tests.reference.return_model import small_arrays

needs_scikit_learn = pytest.mark.skipif(
    find_spec("sklearn") is None, reason=f"needs the extra [{training.EXTRA}]: scikit-learn"
)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sessions(tmp_path_factory.mktemp("trace") / "sessions.jsonl", 1500)


def run(capsys: Any, *words: str | Path, status: int = EXIT_OK) -> Any:
    assert main(["predictor", *map(str, words)]) == status
    return capsys.readouterr()


@pytest.mark.slow
@needs_scikit_learn
def test_train_writes_a_model_that_evaluate_and_simulate_take(
    recording: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "m.npz"
    facts = json.loads(run(capsys, "train", recording, "--format", "mooncake", "--out", out, "--json").out)
    assert facts == json.loads((tmp_path / "m.card.json").read_text())
    assert facts["trees"] == read_model(out).trees
    assert facts["recordings"][0]["requests"] >= 1500
    assert facts["rows"]["of them requested again"] > 100
    losses = {row["predictor"]: row["log_loss"] for row in facts["held_out"] if row["horizon_s"] == 60.0}
    assert losses["learned"] < losses["session-return"] + 0.01
    monkeypatch.setattr(training, "find_spec", lambda name: None)  # what follows needs no scikit-learn
    found = json.loads(
        run(
            capsys, "evaluate", recording, "--format", "mooncake", "--model", out, "--questions", "10", "--json"
        ).out
    )  # fmt: skip
    assert {row["predictor"] for row in found["rows"]} == {"session-return", "learned"}


def test_evaluate_shows_predictors_side_by_side(recording: Path, capsys: Any) -> None:
    words = ("evaluate", recording, "--format", "mooncake", "--questions", "6", "--predictor", "session-return,markov")
    lines = run(capsys, *words).out.splitlines()
    assert "LOG LOSS" in lines[0] and "BRIER" in lines[0] and "ECE" in lines[0]
    assert [line.split()[0] for line in lines[1:]] == ["session-return"] * 3 + ["markov"] * 3


def test_evaluate_takes_a_model_by_hand(recording: Path, tmp_path: Path, capsys: Any) -> None:
    write_model(tmp_path / "m.npz", small_arrays())
    words = ("evaluate", recording, "--format", "mooncake", "--questions", "6", "--model", tmp_path / "m.npz")
    assert "learned" in run(capsys, *words).out


@needs_scikit_learn
def test_too_few_returns_and_wrong_names_are_said_in_one_line(tmp_path: Path, capsys: Any) -> None:
    few = write_sessions(tmp_path / "few.jsonl", 30)
    out = tmp_path / "m.npz"
    said = run(capsys, "train", few, "--format", "mooncake", "--out", out, status=EXIT_USAGE).err
    assert "too few returns" in said and said.count("\n") == 1
    said = run(capsys, "train", few, "--format", "mooncake", "--out", tmp_path / "m.txt", status=EXIT_USAGE).err
    assert "ends in .npz" in said
    said = run(capsys, "train", few, "--format", "mooncake", "--out", tmp_path / "no" / "m.npz", status=EXIT_USAGE).err
    assert "there is no directory" in said
    assert list(tmp_path.iterdir()) == [few]


def test_without_scikit_learn_the_extra_is_named(
    recording: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "find_spec", lambda name: None)
    said = run(capsys, "train", recording, "--out", tmp_path / "m.npz", status=EXIT_USAGE).err
    assert ".[learned]" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--format", "kvstored"], "was not written by kvstored serve --record"),
        (["--format", "mooncake", "--predictor", "learned"], "needs --model"),
        (["--format", "mooncake", "--predictor", "markof"], "did you mean markov"),
        (["--format", "mooncake", "--model", "/nowhere.npz"], "does not exist"),
        (["--format", "mooncake", "--learn", "1"], "--learn"),
    ],
)
def test_mistakes_of_evaluate(recording: Path, capsys: Any, words: list[str], said: str) -> None:
    found = run(capsys, "evaluate", recording, *words, status=EXIT_USAGE).err
    assert said in found and found.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "before",
    [["predictor"], ["--json", "predictor"], ["--socket-dir", "/tmp/kv", "--timeout=3", "predictor", "--json"]],
)
def test_kvctl_lets_kvstored_do_it(recording: Path, before: list[str]) -> None:
    words = [*before, "evaluate", str(recording), "--format", "mooncake", "--questions", "2"]
    words += [] if "--json" in before else ["--json"]
    done = subprocess.run(
        [Path(sys.executable).with_name("kvctl"), *words], capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"][0]["predictor"] == "session-return"


@pytest.mark.slow
def test_simulate_serves_with_prefetch_by_prediction(recording: Path, tmp_path: Path, capsys: Any) -> None:
    write_model(tmp_path / "m.npz", small_arrays())
    words = [
        "simulate", str(recording), "--format", "mooncake", "--mode", "timing", "--part", "0:0.08", "--speed", "0.3",
        "--tiers", "dram=2GiB,nvme", "--predictor", "oracle,learned",
    ]  # fmt: skip
    assert main(words) == EXIT_USAGE
    assert "belong together" in capsys.readouterr().err
    words += ["--predictor-model", str(tmp_path / "m.npz")]
    assert main([*words, "--json"]) == EXIT_OK
    rows = {row["plan"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert "without prefetch" in rows
    oracle, learned = rows["predicted: oracle"]["prefetch"], rows["predicted: learned"]["prefetch"]
    assert oracle["prefetched_bytes"] >= oracle["used_bytes"] + oracle["wasted_bytes"] > 0
    assert learned["failure"] == "" and learned["ttft_against_without"] > 0
    assert main(words) == EXIT_OK
    assert "WASTED SHARE" in capsys.readouterr().out
    assert main(["simulate", str(recording), "--format", "mooncake", "--predictor", "oracle"]) == EXIT_USAGE
    assert "no meaning in mode replay" in capsys.readouterr().err
