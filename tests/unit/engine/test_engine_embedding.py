"""Embeddings from the engine's states: what the model's head makes its logits of, pooled, however they are computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore_engine.embedding import EmbeddingModel, Pooling, pooling_of
from kvstore_engine.gguf import GGUFFile
from tests.reference.make_gguf import TinyModel, write_model
from tests.reference.skips import skip_without_ggml

VOCABULARY, WIDTH = 320, 128


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    skip_without_ggml()
    said = {"llama.pooling_type": 3}
    return write_model(tmp_path_factory.mktemp("e") / "m.gguf", TinyModel(quantisation="f32", metadata=said))


@pytest.fixture(params=["mean", "cls", "last"])
def model(path: Path, request: pytest.FixtureRequest) -> Iterator[EmbeddingModel]:
    opened = EmbeddingModel(GGUFFile.open(path), request.param, threads=1, context=2048)
    yield opened
    opened.close()


def states(path: Path, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the states of a sequence in one step, and the logits that the same executor computes."""
    from kvstore_engine.devices import DeviceName
    from kvstore_engine.executors import PoolSetup, StepSizes
    from kvstore_engine.graph import SequenceSlice
    from kvstore_engine.opening import open_executor

    table = np.arange(-(-len(tokens) // 16), dtype=np.int32)
    sizes = StepSizes(1, 2048, 4, 2048)
    with open_executor(GGUFFile.open(path), DeviceName.parse("cpu"), PoolSetup(200, 16, "f16"), sizes) as executor:
        found = executor.forward([SequenceSlice(tokens, 0, table, "states")])
        with pytest.raises(ValueError, match="all or none"):
            executor.forward([SequenceSlice(tokens[:1], 0, table, "states"), SequenceSlice(tokens[:1], 0, table + 99)])
        return found, executor.forward([SequenceSlice(tokens, 0, table, "all")])


def tokens_of(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, count).astype(np.int32)


def test_states_are_what_logits_are_made_of(path: Path) -> None:
    found, logits = states(path, tokens_of(1, 40))
    with GGUFFile.open(path) as file:
        head = file.tensor_bytes("output.weight").view(np.float32).reshape(VOCABULARY, WIDTH)
    assert found.shape == (40, WIDTH)
    assert np.allclose(found @ head.T, logits, atol=1e-4)


@pytest.fixture(scope="module")
def known(path: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return sequences, each with its states: no pooling changes these."""
    inputs = [tokens_of(seed, count) for seed, count in enumerate([5, 1, 600, 17, 511, 1500, 3])]
    return [(tokens, states(path, tokens)[0].astype(np.float64)) for tokens in inputs]


def test_embeddings_are_pooled_states_of_length_1(
    known: list[tuple[np.ndarray, np.ndarray]], model: EmbeddingModel
) -> None:
    inputs = [tokens for tokens, _ in known]
    computed = model.compute(inputs)
    for (_, whole), found in zip(known, computed, strict=True):
        pooled = {"mean": whole.mean(0), "cls": whole[0], "last": whole[-1]}[model.pooling]
        assert np.allclose(found, pooled / np.linalg.norm(pooled), atol=2e-3)
        assert np.isclose(np.linalg.norm(found), 1, atol=1e-5)
    assert (model.compute(inputs) == computed).all()
    assert np.allclose(model.compute(inputs[2:4]), computed[2:4], atol=2e-3)
    assert model.compute([]).shape == (0, WIDTH)


def test_the_file_says_the_pooling(path: Path, tmp_path: Path) -> None:
    wanted: dict[int, Pooling | None] = {0: None, 1: "mean", 2: "cls", 3: "last", 4: None}
    for number, pooling in wanted.items():
        said = TinyModel(layers=1, metadata={"llama.pooling_type": number})
        with GGUFFile.open(write_model(tmp_path / f"{number}.gguf", said)) as file:
            assert pooling_of(file) == pooling
    with GGUFFile.open(write_model(tmp_path / "silent.gguf", TinyModel(layers=1))) as file:
        assert pooling_of(file) is None
