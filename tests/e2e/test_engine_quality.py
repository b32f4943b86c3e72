"""`kvengine quality`: what a codec of the store does to a model's answers, profiles of models, and one clear line for
every mistake.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvstore_engine.cli.main import main
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.quality.measure import Difference, windows_of
from kvstore_engine.quality.stored_form import StoredForm
from kvstore_engine.quality.texts import texts
from kvstore_proto.fingerprint import Fingerprint, LayerGroup
from kvstore_proto.kv_layout import ENGINE_ORDER
from tests.reference.running_daemon import DaemonDied, RunningDaemon, running_daemon
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
    assert 1.5 < fine["ratio"] < 2 < coarse["ratio"] < 4
    monkeypatch.setattr(StoredForm, "through", lambda self: lambda payload: (payload, payload.size))
    same = _report(tiny, text, capsys)["all"]
    assert (same["kl"], same["top1_percent"], same["greedy_percent"], same["ratio"]) == (0, 100, 100, 1)


@pytest.mark.slow
def test_each_layer_can_be_changed_alone(tiny: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = _report(tiny, text, capsys, "int4", "--by-layer")
    alone = [report[f"layer {layer} alone"]["kl"] for layer in range(2)]
    assert all(0 < kl < report["all"]["kl"] * 2 for kl in alone)


@pytest.mark.slow
def test_a_layer_that_bears_no_loss_stays_exact_in_a_daemon_with_the_profile_of_its_model(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    skip_without_ggml()
    gains = (0.001, 1.0, 0.001)  # attention adds next to nothing in the first layer and the last
    model = write_tiny_llama(tmp_path / "m.gguf", llama__context_length=2048, layers=3, attention_gains=gains)
    profile = tmp_path / "profiles/any name.json"
    profile.parent.mkdir()
    report = _report(model, text, capsys, "int4", "--profile", str(profile), "--bound", "2e-7")
    assert {"layer 1 k: exact", "layer 1 v: exact", "layer 0 k: int4", "layer 2 v: int4"} <= report.keys()
    assert report["all, by the profile"]["kl"] < report["all"]["kl"] / 100
    assert 1 < report["all, by the profile"]["ratio"] < report["all"]["ratio"]
    with GGUFFile.open(model) as file:
        weights = file.weights_digest()
    group = LayerGroup(0, layers=(0, 1, 2), bytes_per_token_per_layer=2 * 2 * 16 * 2, heads=2)
    kv = Fingerprint("tiny", f"{weights}+sums", layout=ENGINE_ORDER, groups=(group,))
    config = tmp_path / "kvstored.toml"
    config.write_text(f'[[tenant]]\nname = "chat"\nuids = [{os.getuid()}]\nlossy = true\n')
    settings = ("nvme.codec=int4", "nvme.codec_staging=8MiB", f"daemon.codec_profiles={profile.parent}")
    with running_daemon(*settings, config=config) as daemon:
        assert _is_exact_by_layer(daemon, kv) == [False, True, False]
        assert _is_exact_by_layer(daemon, replace(kv, weights_digest="of another model")) == [False, False, False]
        daemon.stop()
        profile.write_text('{"model": "tiny", "layers": []}')
        with pytest.raises(DaemonDied, match=r"daemon\.codec_profiles: .*any name.json is no profile"):
            daemon.restart()


def _is_exact_by_layer(daemon: RunningDaemon, kv: Fingerprint) -> list[bool]:
    """Put a block, and compare what a lossy session gets of it from NVMe, layer by layer."""
    tokens, chosen = np.arange(64, dtype=np.int32), np.random.default_rng(3)
    put = chosen.standard_normal(kv.payload_bytes() // 2).astype(np.float16).view(np.uint8)
    with daemon.connect(kv, exact=False) as session:
        session.put(tokens, payloads=[put], wait="settled")
        daemon.drop("host")
        with session.get(tokens) as lease:
            assert lease.blocks == 1 and lease.error_bound(0) > 0
            layers = np.array(lease.payload(0)).view(np.uint8).reshape(3, -1)
    return [bool(np.array_equal(*each)) for each in zip(put.reshape(3, -1), layers, strict=True)]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (("--codec", "zip"), "codec 'zip' is unknown; known: "),
        (("--next-tokens", "100"), "--next-tokens must be a multiple of 64, got 100"),
        (("--text", "/nowhere"), "/nowhere: "),
        (("--bound", "0"), "--bound must be more than 0 nats, got 0"),
        (("--profile", "/nowhere/of.json"), "--profile /nowhere/of.json: there is no directory /nowhere"),
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


def test_windows_are_cut_where_they_end() -> None:
    assert [len(each) for each in windows_of(np.zeros(1800, np.int32), 64, 9)] == [576] * 3


def test_every_kind_of_text_is_there() -> None:
    made = texts(20_000)
    assert set(made) == {"english", "licence", "python", "json"}
    assert all(len(text) == 20_000 for text in made.values())
