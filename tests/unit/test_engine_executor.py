"""The executor on tiny random models: steps, limits, and that restored bytes are as good as computed ones."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvstore_engine import BlockPool, Executor, GGUFFile, SequenceSlice, load_model
from tests.reference.make_gguf import TinyModel, write_model

TokenArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
_SHAPE = TinyModel(layers=3, width=96, heads=6, kv_heads=2, head_dim=32, feed_forward=160)
_BLOCKS = 96
_MODELS = {
    "f16": _SHAPE,
    "q8_0": replace(_SHAPE, quantisation="q8_0"),
    "q4_0": replace(_SHAPE, quantisation="q4_0"),
    "windowed": replace(
        _SHAPE, architecture="gemma2", quantisation="q8_0", metadata={"llama.attention.sliding_window": 50}
    ),
}


@pytest.fixture(scope="module", params=_MODELS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_model(path, _MODELS[request.param])
    with (
        load_model(GGUFFile.open(path)) as model,
        Executor(model, BlockPool(model.config, _BLOCKS), threads=1) as executor,
    ):
        yield executor


def _tokens(count: int, seed: int = 0) -> TokenArray:
    return np.random.default_rng(seed).integers(0, _SHAPE.vocabulary, count).astype(np.int32)


def _table(count: int, seed: int = 0) -> TokenArray:
    return np.random.default_rng(seed).permutation(_BLOCKS)[: -(-count // 16)].astype(np.int32)


def _assert_same(engine: Executor, seen: FloatArray, wanted: FloatArray) -> None:
    """The same bits; for f16 the same to rounding: there ggml multiplies a single row with another kernel."""
    if engine.model.file.tensors["token_embd.weight"].type_name == "f16":
        np.testing.assert_allclose(seen, wanted, atol=0.02)
    else:
        np.testing.assert_array_equal(seen, wanted)


def _greedy(engine: Executor, logits: FloatArray, start: int, table: TokenArray, steps: int) -> list[int]:
    chosen = []
    for step in range(steps):
        chosen.append(int(logits.argmax()))
        logits = engine.forward([SequenceSlice(np.array(chosen[-1:], np.int32), start + step, table)])[0]
    return chosen


@pytest.mark.parametrize("count", [1, 63, 64, 65, 200, 331])
def test_a_restored_prefix_gives_the_same_bits_and_the_same_text(engine: Executor, count: int) -> None:
    """Cold: compute all. Warm: copy the leading storage blocks' bytes into other blocks, compute the rest."""
    tokens, cold_table, warm_table = _tokens(count), _table(count + 40, 1), _table(count + 40, 2)
    pool = engine.pool
    cold = engine.prefill(tokens, 0, cold_table)
    stored = []
    for block in range((count - 1) // 64):
        stored.append(np.empty(pool.payload_bytes(4), np.uint8))
        pool.gather_block(cold_table[4 * block : 4 * block + 4], stored[-1])
    text = _greedy(engine, cold, count, cold_table, 32)
    for restored in {0, len(stored) // 2, len(stored)}:
        pool.planes.fill(0xFF)  # NaN: a row that was not restored would show
        tables = [warm_table[4 * block : 4 * block + 4] for block in range(restored)]
        pool.scatter_blocks(stored[:restored], tables)
        warm = engine.prefill(tokens[64 * restored :], 64 * restored, warm_table)
        np.testing.assert_array_equal(warm, cold)
        assert _greedy(engine, warm, count, warm_table, 32) == text


def test_logits_do_not_depend_on_chunk_size_or_company(engine: Executor) -> None:
    tokens, table, other = _tokens(256), _table(256, 3), _tokens(64, 9)
    whole = engine.forward([SequenceSlice(tokens, 0, table, "all")])
    for chunk in (64, 128, 192):
        parts = [
            engine.forward([SequenceSlice(tokens[first : first + chunk], first, table, "all")])
            for first in range(0, 256, chunk)
        ]
        np.testing.assert_array_equal(np.concatenate(parts), whole)
    tables = np.split(np.random.default_rng(4).permutation(_BLOCKS)[:20].astype(np.int32), [16])
    pair = engine.forward([SequenceSlice(tokens, 0, tables[0], "all"), SequenceSlice(other, 0, tables[1], "last")])
    np.testing.assert_array_equal(pair[:256], whole)
    _assert_same(engine, pair[256:], engine.forward([SequenceSlice(other, 0, table)]))


def test_outputs_are_those_that_were_asked_for(engine: Executor) -> None:
    tokens, table = _tokens(32), _table(32)
    every = engine.forward([SequenceSlice(tokens, 0, table, "all")])
    assert every.shape == (32, _SHAPE.vocabulary) and np.isfinite(every).all()
    _assert_same(engine, engine.forward([SequenceSlice(tokens, 0, table)]), every[-1:])
    assert engine.forward([SequenceSlice(tokens, 0, table, "none")]).shape == (0, _SHAPE.vocabulary)
    again = engine.forward([SequenceSlice(tokens[16:], 16, table, "all")])
    np.testing.assert_array_equal(again, every[16:])


@pytest.mark.parametrize(("kv_dtype", "noise"), [("f16", 2e-3), ("bf16", 2e-2), ("q8_0", 2e-2), ("q4_0", 0.4)])
def test_each_kv_type_restores_to_the_same_bits_and_costs_no_more_than_its_rounding(
    tmp_path: Path, kv_dtype: str, noise: float
) -> None:
    """ggml writes the rows, our kernels read them: against f32, and a restored prefix against a computed one."""
    path, tokens = write_model(tmp_path / "m.gguf", _SHAPE), _tokens(150)
    with load_model(GGUFFile.open(path)) as model:
        with Executor(model, BlockPool(model.config, _BLOCKS, kv_dtype="f32"), threads=1) as executor:
            exact = executor.prefill(tokens, 0, _table(150, 1))
        pool = BlockPool(model.config, _BLOCKS, kv_dtype=kv_dtype)
        with Executor(model, pool, threads=2) as executor:
            cold_table, warm_table = _table(150, 1), _table(150, 2)
            cold = executor.prefill(tokens, 0, cold_table)
            stored = [np.empty(pool.payload_bytes(4), np.uint8) for _ in range(2)]
            for block, payload in enumerate(stored):
                pool.gather_block(cold_table[4 * block : 4 * block + 4], payload)
            pool.planes.fill(0xFF)
            pool.scatter_blocks(stored, [warm_table[:4], warm_table[4:8]])
            warm = executor.prefill(tokens[128:], 128, warm_table)
    np.testing.assert_array_equal(warm, cold)
    scale = exact.std()
    assert 0 < np.abs(cold - exact).max() < noise * 4 * scale


def test_a_kv_type_that_does_not_fit_the_model_is_refused(tmp_path: Path) -> None:
    config = load_model(GGUFFile.open(write_model(tmp_path / "m.gguf", replace(_SHAPE, head_dim=24)))).config
    with pytest.raises(ValueError, match=r"32 values in a block.*48 a token.*choose f16"):
        BlockPool(config, 4, kv_dtype="q8_0")
    with pytest.raises(ValueError, match="supported: f16, bf16, f32, q8_0, q4_0"):
        BlockPool(config, 4, kv_dtype="q5_1")


def test_many_shapes_do_not_grow_the_graph_cache(engine: Executor) -> None:
    tokens, table = _tokens(64), _table(64)
    expected = engine.forward([SequenceSlice(tokens, 0, table)])
    for count in range(1, 65):
        engine.forward([SequenceSlice(tokens[:count], 0, table)])
    assert len(engine._graphs) <= 32
    np.testing.assert_array_equal(engine.forward([SequenceSlice(tokens, 0, table)]), expected)


def test_more_outputs_than_reserved_still_leave_kept_graphs_sound(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", replace(_SHAPE, vocabulary=4096))
    tokens, table = _tokens(128), np.arange(16, dtype=np.int32)
    with (
        load_model(GGUFFile.open(path)) as model,
        Executor(model, BlockPool(model.config, 16), threads=1, max_sequences=1) as executor,
    ):
        before = executor.forward([SequenceSlice(tokens, 0, table)])
        every = executor.forward([SequenceSlice(tokens, 0, table, "all")])
        np.testing.assert_array_equal(executor.forward([SequenceSlice(tokens, 0, table)]), before)
        _assert_same(executor, every[-1:], before)


@pytest.mark.parametrize(
    ("tokens", "start", "table", "reason"),
    [
        ([], 0, [0], "at least one token"),
        ([5], -1, [0], "start"),
        ([320], 0, [0], "token ids"),
        ([-1], 0, [0], "token ids"),
        ([1] * 17, 0, [0], "block table"),
        ([1], 0, [_BLOCKS], "block ids"),
        ([1], 8192, [0] * 600, "context"),
        ([1] * 513, 0, list(range(40)), "at most 512"),
    ],
)
def test_requests_that_would_corrupt_memory_are_refused(
    engine: Executor, tokens: list[int], start: int, table: list[int], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        engine.forward([SequenceSlice(np.array(tokens, np.int32), start, np.array(table, np.int32))])


def test_a_closed_executor_refuses_work(tmp_path: Path) -> None:
    with load_model(GGUFFile.open(write_model(tmp_path / "m.gguf", _SHAPE))) as model:
        executor = Executor(model, BlockPool(model.config, 4), threads=1)
        executor.close()
        executor.close()
        with pytest.raises(RuntimeError, match="closed"):
            executor.forward([SequenceSlice(_tokens(1), 0, np.zeros(1, np.int32))])


def test_two_sequences_may_not_write_the_same_slot(engine: Executor) -> None:
    piece = SequenceSlice(_tokens(8), 0, _table(16))
    with pytest.raises(ValueError, match="same place"):
        engine.forward([piece, piece])
