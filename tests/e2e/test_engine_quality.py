"""`kvengine quality`: what a codec of the store does to a model's answers, and one clear line for every mistake."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvstore_engine.cli import quality
from kvstore_engine.cli.main import main
from kvstore_engine.quality.measure import Bytes, Difference, one_layer, windows_of
from kvstore_engine.quality.texts import texts
from tests.reference.skips import skip_without_ggml
from tests.reference.tiny_llama import write_tiny_llama


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    skip_without_ggml()
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", llama__context_length=2048)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(texts(6000)["english"])
    return path


def _report(model: Path, text: Path, capsys: pytest.CaptureFixture[str], codec: str = "int8", *more: str) -> dict:
    words = ["--model", str(model), "--codec", codec, "--text", str(text), "--windows", "1", "--next-tokens", "64"]
    assert main(["quality", *words, "--greedy-tokens", "4", "--threads", "1", "--json", *more]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_a_coarser_codec_changes_more_and_no_codec_nothing(
    tiny: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fine, coarse = (_report(tiny, text, capsys, codec)["all"] for codec in ("int8", "int4"))
    assert fine["positions"] == coarse["positions"] == 64
    assert 0 < fine["kl"] < coarse["kl"] and fine["top1_percent"] >= 95
    monkeypatch.setattr(quality, "codec_of", lambda name, fingerprint: lambda payload: payload)
    same = _report(tiny, text, capsys)["all"]
    assert (same["kl"], same["top1_percent"], same["greedy_percent"]) == (0, 100, 100)


@pytest.mark.slow
def test_each_layer_can_be_changed_alone(tiny: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = _report(tiny, text, capsys, "int4", "--by-layer")
    alone = [report[f"layer {layer} alone"]["kl"] for layer in range(2)]
    assert all(0 < kl < report["all"]["kl"] * 2 for kl in alone)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (("--codec", "zip"), "codec 'zip' is unknown; known: "),
        (("--next-tokens", "100"), "--next-tokens must be a multiple of 64, got 100"),
        (("--text", "/nowhere"), "/nowhere: "),
    ],
)
def test_a_mistake_is_one_line(
    tiny: Path, text: Path, more: tuple[str, str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {"--codec": "int8", "--text": str(text), "--next-tokens": "64"} | dict([more])
    assert main(["quality", "--model", str(tiny), *(word for pair in words.items() for word in pair)]) == 2
    err = capsys.readouterr().err.splitlines()
    assert why in err[-1]


def test_the_figures_of_two_distributions() -> None:
    found, exact = Difference(), np.log(np.array([[0.5, 0.25, 0.25], [0.2, 0.2, 0.6]], np.float32))
    lossy = np.log(np.array([[0.25, 0.5, 0.25], [0.2, 0.2, 0.6]], np.float32)) + 7  # a constant changes nothing
    found.add(exact, lossy)
    assert found.report()["kl"] == pytest.approx(0.25 * np.log(2) / 2, rel=1e-5)
    assert found.report()["top1_percent"] == 50


def test_windows_and_single_layers_are_cut_where_they_end() -> None:
    assert [len(each) for each in windows_of(np.zeros(1800, np.int32), 64, 9)] == [576] * 3

    def flipped(payload: Bytes) -> Bytes:
        return ~payload

    assert one_layer(flipped, 1, 3)(np.zeros(6, np.uint8)).tolist() == [0, 0, 255, 255, 0, 0]


def test_every_kind_of_text_is_there() -> None:
    made = texts(20_000)
    assert set(made) == {"english", "licence", "python", "json"}
    assert all(len(text) == 20_000 for text in made.values())
