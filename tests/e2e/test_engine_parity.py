"""Our logits against llama.cpp's for models in Llama's architecture, tiny ones and, where one is named, a real one.

See `tests.reference.parity` for the yardstick; other architectures are in test_engine_architectures.
"""

import os
from pathlib import Path

import numpy as np
import pytest

from kvstore_engine.ggml import find_library
from kvstore_engine.gguf import GGUFFile
from tests.reference.make_gguf import TinyModel, write_model
from tests.reference.parity import Comparison, compare

_REAL_MODEL_VARIABLE = "KVENGINE_TEST_MODEL"
_TOKENS, _CHUNKS = 150, [64, 86]

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


@pytest.fixture(scope="module")
def comparisons(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Comparison]:
    folder = tmp_path_factory.mktemp("models")
    models = {name: write_model(folder / f"{name}.gguf", model) for name, model in _MODELS.items()}
    tokens = np.random.default_rng(1).integers(0, TinyModel().vocabulary, _TOKENS).astype(np.int32)
    return compare(models, tokens, folder, _CHUNKS)


@pytest.mark.parametrize("name", _MODELS)
def test_tiny_models(comparisons: dict[str, Comparison], name: str) -> None:
    comparisons[name].check()


def test_a_real_model(tmp_path: Path) -> None:
    named = os.environ.get(_REAL_MODEL_VARIABLE)
    if not named:
        pytest.skip(f"{_REAL_MODEL_VARIABLE} names no GGUF file")
    with GGUFFile.open(named) as file:
        vocabulary = file.tensors["token_embd.weight"].shape[1]
    tokens = np.random.default_rng(1).integers(0, vocabulary, _TOKENS).astype(np.int32)
    compare({"real": Path(named)}, tokens, tmp_path, _CHUNKS)["real"].check()
