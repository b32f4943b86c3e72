"""The parts that only ggml's executor has: its types of K and V, its graphs and the buffer that they share. The rest:
tests/contract/test_executor_contract.py.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvstore_engine.executor import Executor
from kvstore_engine.executors import StepSizes
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.graph import SequenceSlice
from kvstore_engine.model.weights import load_model
from kvstore_engine.pool import BlockPool
from tests.reference.make_gguf import TinyModel, write_model

TokenArray = npt.NDArray[np.int32]
_SHAPE = TinyModel(layers=3, width=96, heads=6, kv_heads=2, head_dim=32, feed_forward=160)


def _tokens(count: int, seed: int = 0) -> TokenArray:
    return np.random.default_rng(seed).integers(0, _SHAPE.vocabulary, count).astype(np.int32)


def test_a_kv_type_that_does_not_fit_the_model_is_refused(tmp_path: Path) -> None:
    config = load_model(GGUFFile.open(write_model(tmp_path / "m.gguf", replace(_SHAPE, head_dim=24)))).config
    with pytest.raises(ValueError, match=r"32 values in a block.*48 a token.*choose f16"):
        BlockPool(config, 4, kv_dtype="q8_0")
    with pytest.raises(ValueError, match="supported: f16, bf16, f32, q8_0, q4_0"):
        BlockPool(config, 4, kv_dtype="q5_1")


def test_a_pool_of_a_type_that_ggml_does_not_write_is_refused(tmp_path: Path) -> None:
    with load_model(GGUFFile.open(write_model(tmp_path / "m.gguf", _SHAPE))) as model:
        pool = BlockPool(model.config, 4, kv_dtype="int8")
        with pytest.raises(ValueError, match="ggml writes no K and V of type int8"):
            Executor(model, pool)


@pytest.mark.parametrize("quantisation", ["f16", "q8_0", "q4_0"])
def test_many_shapes_do_not_grow_the_graph_cache(tmp_path: Path, quantisation: str) -> None:
    path = write_model(tmp_path / "m.gguf", replace(_SHAPE, quantisation=quantisation))
    tokens, table = _tokens(64), np.arange(4, dtype=np.int32)
    with (
        load_model(GGUFFile.open(path)) as model,
        Executor(model, BlockPool(model.config, 4), StepSizes(threads=1)) as executor,
    ):
        expected = executor.forward([SequenceSlice(tokens, 0, table)])
        for count in range(1, 65):
            executor.forward([SequenceSlice(tokens[:count], 0, table)])
        assert len(executor._graphs) <= 32
        np.testing.assert_array_equal(executor.forward([SequenceSlice(tokens, 0, table)]), expected)


def test_more_outputs_than_reserved_still_leave_kept_graphs_sound(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", replace(_SHAPE, vocabulary=4096))
    tokens, table = _tokens(128), np.arange(16, dtype=np.int32)
    with (
        load_model(GGUFFile.open(path)) as model,
        Executor(model, BlockPool(model.config, 16), StepSizes(threads=1, max_sequences=1)) as executor,
    ):
        before = executor.forward([SequenceSlice(tokens, 0, table)])
        every = executor.forward([SequenceSlice(tokens, 0, table, "all")])
        np.testing.assert_array_equal(executor.forward([SequenceSlice(tokens, 0, table)]), before)
        np.testing.assert_allclose(every[-1:], before, atol=0.02)  # another kernel multiplies a single row of f16
