"""A chain of layer ranges computes the bits of the whole model, whatever its architecture."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvstore_engine.executor import Executor
from kvstore_engine.executors import StepSizes
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.graph import SequenceSlice
from kvstore_engine.model.architecture import ARCHITECTURES
from kvstore_engine.model.weights import load_model
from kvstore_engine.pool import BlockPool
from tests.reference.make_gguf import TinyModel, write_model
from tests.reference.skips import skip_without_ggml

_WINDOW = {"llama.attention.sliding_window": 40}
_SHAPE = TinyModel(layers=4, width=64, heads=4, kv_heads=2, head_dim=32, feed_forward=96, quantisation="q8_0")
_MODELS = {
    "llama": replace(_SHAPE, rope_factors=True, quantisation="q4_0"),
    "llama-biased": replace(_SHAPE, biases=("attn_q", "attn_output", "ffn_gate"), quantisation="f16"),
    "qwen2": replace(_SHAPE, architecture="qwen2", tied=True, biases=("output",)),
    "qwen3": replace(_SHAPE, architecture="qwen3"),
    "gemma2": replace(_SHAPE, architecture="gemma2", metadata={**_WINDOW, "llama.attn_logit_softcapping": 3.0}),
    "gemma3": replace(_SHAPE, architecture="gemma3", layers=7, metadata=_WINDOW),
    "phi3": replace(_SHAPE, architecture="phi3", kv_heads=4),
}
_CUTS = [(1,), (2,), (1, 3), (1, 2, 3)]


@pytest.fixture(autouse=True)
def ggml() -> None:
    skip_without_ggml()


@contextmanager
def _chain(path: Path, cuts: tuple[int, ...]) -> Iterator[tuple[BlockPool, list[Executor]]]:
    """A pool full of NaN, and executors of the ranges between `cuts`."""
    with ExitStack() as stack:
        model = stack.enter_context(load_model(GGUFFile.open(path)))
        pool = BlockPool(model.config, 16)
        pool.planes.fill(0xFF)
        bounds = (0, *cuts, model.config.layers)
        ranges = [range(*pair) for pair in pairwise(bounds)]
        yield (
            pool,
            [
                stack.enter_context(Executor(model, pool.of_layers(layers), StepSizes(threads=1), layers=layers))
                for layers in ranges
            ],
        )


def _run(executors: list[Executor]) -> npt.NDArray[np.float32]:
    """All logits of a prompt, in two steps, and then of one token more without company."""
    tokens = np.random.default_rng(3).integers(0, _SHAPE.vocabulary, 129).astype(np.int32)
    table, found = np.random.default_rng(4).permutation(16).astype(np.int32), []
    for first, end, outputs in ((0, 64, "none"), (64, 128, "all"), (128, 129, "last")):
        slices, hidden = [SequenceSlice(tokens[first:end], first, table, outputs)], None  # type: ignore[arg-type]
        for executor in executors:
            hidden = executor.forward(slices, hidden=hidden)
        assert hidden is not None
        found.append(hidden)
    return np.concatenate(found)


@pytest.mark.parametrize("name", _MODELS)
def test_a_chain_of_ranges_has_the_bits_of_the_whole(tmp_path: Path, name: str) -> None:
    path = write_model(tmp_path / "m.gguf", _MODELS[name])
    with _chain(path, ()) as (pool, whole):
        wanted, planes = _run(whole), pool.planes.copy()
    assert wanted.shape == (65, _SHAPE.vocabulary) and np.isfinite(wanted).all()
    for cuts in _CUTS:
        with _chain(path, cuts) as (pool, ranges):
            np.testing.assert_array_equal(_run(ranges), wanted)
            np.testing.assert_array_equal(pool.planes, planes)


def test_every_architecture_is_cut() -> None:
    assert {shape.architecture for shape in _MODELS.values()} == set(ARCHITECTURES)


def test_a_range_writes_to_its_own_layers_alone_and_wants_its_own_input(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", _SHAPE)
    piece = SequenceSlice(np.ones(32, np.int32), 0, np.arange(16, dtype=np.int32))
    with _chain(path, (1, 3)) as (pool, (_, middle, _)):
        hidden = middle.forward([piece], hidden=np.ones((32, 64), np.float32))
        assert hidden.shape == (32, 64)
        untouched = (pool.planes == 0xFF).all(axis=(1, 2))
        assert untouched.tolist() == [True, True, False, False, False, False, True, True]
        for wrong in (None, np.ones((31, 64), np.float32), np.ones((32, 64), np.float64)):
            with pytest.raises(ValueError, match="layers from 1 on start from"):
                middle.forward([piece], hidden=wrong)  # type: ignore[arg-type]


def test_ranges_that_the_model_or_the_pool_does_not_have_are_refused(tmp_path: Path) -> None:
    with load_model(GGUFFile.open(write_model(tmp_path / "m.gguf", _SHAPE))) as model:
        pool = BlockPool(model.config, 4)
        for layers in (range(2, 2), range(3, 5), range(-1, 2), range(0, 4, 2)):
            with pytest.raises(ValueError, match="not a range"):
                pool.of_layers(layers)
        with pytest.raises(ValueError, match="another model"):
            Executor(model, pool, layers=range(2))
        with pytest.raises(ValueError, match="not layers of a model"):
            Executor(model, pool, layers=range(1, 5))
        part = pool.of_layers(range(1, 3))
        assert part.payload_bytes(4) == pool.payload_bytes(4) // 2
        pool.free(part.allocate(4))
        assert pool.free_blocks == 4
