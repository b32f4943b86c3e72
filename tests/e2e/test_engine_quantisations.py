"""Every tensor type that the library can multiply with: logits against llama.cpp's, and the same bits however cut."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvstore_engine.executor import Executor
from kvstore_engine.executors import StepSizes
from kvstore_engine.ggml import find_library, load_library
from kvstore_engine.gguf import TENSOR_TYPES, GGUFFile
from kvstore_engine.graph import SequenceSlice
from kvstore_engine.model.quantisation import multipliable_types
from kvstore_engine.model.weights import load_model
from kvstore_engine.pool import BlockPool
from tests.reference.ggml_quantise import TYPE_NUMBERS
from tests.reference.make_gguf import TinyModel, write_model
from tests.reference.parity import Comparison, compare

_SHAPE = TinyModel(layers=1, width=256, heads=4, kv_heads=2, head_dim=64, feed_forward=256)
_TYPES = ("f32", "f16", "bf16", "q4_0", "q4_1", "q8_0", *TYPE_NUMBERS)
_TOKENS = np.random.default_rng(1).integers(0, _SHAPE.vocabulary, 128).astype(np.int32)
_REPORT_VARIABLE = "KVENGINE_TEST_PARITY_REPORT"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        name: write_model(folder / f"{name}.gguf", replace(_SHAPE, quantisation=name, tied=name in ("f16", "q6_k")))
        for name in _TYPES
    }


@pytest.fixture(scope="module")
def comparisons(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Comparison]:
    if "xllamacpp" not in find_library().name:
        pytest.skip("this ggml brings no llama.cpp")
    found = compare(models, _TOKENS, tmp_path_factory.mktemp("logits"), [64, 61, 1, 1, 1])
    if report := os.environ.get(_REPORT_VARIABLE):
        with Path(report).open("a") as out:
            out.writelines(f"{name} {c.itself:.3g} {c.ours:.3g} {c.logits:.3g}\n" for name, c in found.items())
    return found


def test_the_types_compared_are_those_that_the_library_multiplies() -> None:
    assert {TENSOR_TYPES[number].name for number in multipliable_types(load_library())} == set(_TYPES)


@pytest.mark.parametrize("name", _TYPES)
def test_logits_are_as_close_as_llama_is_to_itself(comparisons: dict[str, Comparison], name: str) -> None:
    comparisons[name].check()


@pytest.mark.parametrize("name", _TYPES)
def test_a_prompt_has_the_same_bits_however_it_is_cut(models: dict[str, Path], name: str) -> None:
    table = np.arange(8, dtype=np.int32)
    with (
        load_model(GGUFFile.open(models[name])) as model,
        Executor(model, BlockPool(model.config, 8), StepSizes(threads=1)) as executor,
    ):
        whole = executor.forward([SequenceSlice(_TOKENS, 0, table, "all")])
        state = executor.pool.planes.copy()
        executor.pool.planes.fill(0xFF)
        first = executor.forward([SequenceSlice(_TOKENS[:64], 0, table, "all")])
        second = executor.forward([SequenceSlice(_TOKENS[64:], 64, table, "all")])
        np.testing.assert_array_equal(np.concatenate([first, second]), whole)
        np.testing.assert_array_equal(executor.pool.planes, state)
