"""Our logits against llama.cpp's, on the same shared library: no further off than llama.cpp is from itself.

llama.cpp computes attention in two ways (with and without flash attention) that differ by rounding; that
difference is the yardstick, measured here for each model. llama.cpp runs in a child process: one ggml a
process.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvstore_engine import BlockPool, Executor, GGUFFile, SequenceSlice, load_model
from kvstore_engine.ggml import find_library
from tests.reference.make_gguf import TinyModel, write_model

FloatArray = npt.NDArray[np.float32]
TokenArray = npt.NDArray[np.int32]
_CHILD = Path(__file__).parents[1] / "reference" / "llama_decode.py"
_REAL_MODEL_VARIABLE = "KVENGINE_TEST_MODEL"

pytestmark = pytest.mark.skipif("xllamacpp" not in find_library().name, reason="this ggml brings no llama.cpp")

_MODELS = {
    "f32": TinyModel(quantisation="f32"),
    "f16": TinyModel(),
    "bf16": TinyModel(quantisation="bf16"),
    "q8_0": TinyModel(quantisation="q8_0"),
    "q4_0": TinyModel(quantisation="q4_0"),
    "q4_1": TinyModel(quantisation="q4_1"),
    "tied-llama3-rope": TinyModel(tied=True, rope_factors=True),
    "odd-heads": TinyModel(heads=3, kv_heads=1, head_dim=48),
    "no-gqa-128": TinyModel(heads=2, kv_heads=2, head_dim=128),
    "linear-rope": TinyModel(metadata={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}),
    "yarn": TinyModel(
        metadata={
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.original_context_length": 512,
        }
    ),
}


def _llama(model: Path, tokens: TokenArray, folder: Path, *, flash: bool) -> FloatArray:
    """llama.cpp's logits, float32 [tokens, vocabulary]."""
    np.save(folder / "tokens.npy", tokens)
    output = folder / f"logits-{flash}.npy"
    command = [sys.executable, str(_CHILD), "--model", str(model), "--tokens", str(folder / "tokens.npy")]
    command += ["--threads", "1", "--logits", str(output)] + (["--flash"] if flash else [])
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    logits: FloatArray = np.load(output)
    return logits


def _ours(model_path: Path, tokens: TokenArray) -> FloatArray:
    """Our logits, computed in two steps over shuffled blocks."""
    with (
        load_model(GGUFFile.open(model_path)) as model,
        Executor(model, BlockPool(model.config, 32)) as executor,
    ):
        table = np.random.default_rng(7).permutation(32).astype(np.int32)
        first = executor.forward([SequenceSlice(tokens[:64], 0, table, "all")])
        return np.concatenate([first, executor.forward([SequenceSlice(tokens[64:], 64, table, "all")])])


def _rms(difference: FloatArray) -> float:
    return float(np.sqrt(np.mean(np.square(difference, dtype=np.float64))))


def _assert_as_close_as_llama_is_to_itself(path: Path, vocabulary: int, folder: Path) -> None:
    tokens = np.random.default_rng(1).integers(0, vocabulary, 150).astype(np.int32)
    plain, flash = (_llama(path, tokens, folder, flash=on) for on in (False, True))
    ours = _ours(path, tokens)
    yardstick = _rms(plain - flash)
    assert 0 < yardstick < 0.2 * plain.std()
    off = min(_rms(ours - plain), _rms(ours - flash))
    assert off <= 1.1 * yardstick, f"off by {off:.3g}, llama.cpp from itself by {yardstick:.3g}"


@pytest.mark.parametrize("name", _MODELS)
def test_tiny_models(name: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", _MODELS[name])
    _assert_as_close_as_llama_is_to_itself(path, _MODELS[name].vocabulary, tmp_path)


def test_a_real_model(tmp_path: Path) -> None:
    named = os.environ.get(_REAL_MODEL_VARIABLE)
    if not named:
        pytest.skip(f"{_REAL_MODEL_VARIABLE} names no GGUF file")
    with GGUFFile.open(named) as file:
        vocabulary = file.tensors["token_embd.weight"].shape[1]
    _assert_as_close_as_llama_is_to_itself(Path(named), vocabulary, tmp_path)
