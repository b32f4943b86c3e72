"""A file's metadata becomes a configuration; and windows where llama.cpp cannot be asked."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvstore_engine.executor import Executor
from kvstore_engine.executors import StepSizes
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.graph import SequenceSlice
from kvstore_engine.model.config import ModelConfig
from kvstore_engine.model.weights import load_model
from kvstore_engine.pool import BlockPool
from tests.reference.make_gguf import TinyModel, write_model

_TINY = TinyModel(layers=1, width=64, heads=4, kv_heads=2, head_dim=16, feed_forward=64, quantisation="f32")


def _config(folder: Path, model: TinyModel) -> ModelConfig:
    with GGUFFile.open(write_model(folder / "m.gguf", model)) as file:
        return ModelConfig.from_gguf(file)


def _last_logits(path: Path, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    with (
        load_model(GGUFFile.open(path)) as model,
        Executor(model, BlockPool(model.config, 16, kv_dtype="f32"), StepSizes(threads=1)) as executor,
    ):
        last = executor.forward([SequenceSlice(tokens, 0, np.arange(16, dtype=np.int32))])[0]
        return np.array(last)


def test_a_mistral_with_a_window_sees_just_that(tmp_path: Path) -> None:
    # llama.cpp ignores the key in this architecture. One layer sees only the window, and rotation is relative:
    # so the same tokens without the ones before must give the same logits.
    plain = write_model(tmp_path / "plain.gguf", _TINY)
    windowed = write_model(tmp_path / "m.gguf", replace(_TINY, metadata={"llama.attention.sliding_window": 40}))
    tokens = np.random.default_rng(3).integers(0, _TINY.vocabulary, 150).astype(np.int32)
    seen = _last_logits(windowed, tokens)
    np.testing.assert_allclose(seen, _last_logits(plain, tokens[-40:]), atol=1e-4)
    assert np.abs(seen - _last_logits(plain, tokens[-39:])).max() > 1e-2
    assert np.abs(seen - _last_logits(plain, tokens)).max() > 1e-2


@pytest.mark.parametrize(
    ("architecture", "metadata", "windows"),
    [
        ("llama", {}, (0,) * 7),
        ("llama", {"llama.attention.sliding_window": 32}, (32,) * 7),
        ("qwen2", {}, (0,) * 7),
        ("gemma2", {}, (4096, 0) * 3 + (4096,)),
        ("gemma2", {"llama.attention.sliding_window": 32}, (32, 0) * 3 + (32,)),
        ("gemma3", {}, (0,) * 7),
        ("gemma3", {"llama.attention.sliding_window": 512}, (512,) * 5 + (0, 512)),
        (
            "gemma3",
            {"llama.attention.sliding_window": 512, "llama.attention.sliding_window_pattern": 2},
            (512, 0) * 3 + (512,),
        ),
        ("phi3", {"llama.attention.sliding_window": 2047}, (0,) * 7),
    ],
)
def test_windows(tmp_path: Path, architecture: str, metadata: dict[str, object], windows: tuple[int, ...]) -> None:
    assert _config(tmp_path, replace(_TINY, architecture=architecture, layers=7, metadata=metadata)).windows == windows


def test_gemmas_defaults(tmp_path: Path) -> None:
    second = _config(tmp_path, replace(_TINY, architecture="gemma2"))
    assert (second.attention_softcap, second.output_softcap, second.tied_embeddings) == (50.0, 30.0, True)
    assert second.local_rope is None
    windowed = {"llama.attention.sliding_window": 512, "llama.rope.freq_base": 1e6, "llama.rope.scaling.factor": 8.0}
    third = _config(tmp_path, replace(_TINY, architecture="gemma3", layers=6, metadata=windowed))
    assert (third.attention_softcap, third.output_softcap) == (0.0, 0.0)
    assert (third.layer_rope(0).frequency_base, third.layer_rope(0).frequency_scale) == (10000.0, 1.0)
    assert (third.layer_rope(5).frequency_base, third.layer_rope(5).frequency_scale) == (1e6, 0.125)


def test_the_largest_gemmas_scale_by_the_width_per_head(tmp_path: Path) -> None:
    narrow = replace(_TINY, architecture="gemma2", head_dim=32)
    assert _config(tmp_path, replace(narrow, layers=46)).attention_scale == pytest.approx(16**-0.5)
    assert _config(tmp_path, replace(narrow, layers=26)).attention_scale == 0.0
