"""A pipeline of stages computes what one executor does, with several pieces of a step under way at once."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_engine.executor import Executor
from kvstore_engine.executors import StepSizes
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.graph import SequenceSlice
from kvstore_engine.model.weights import Model, load_model
from kvstore_engine.pool import BlockPool
from kvstore_engine.stages.pipeline import Pipeline, micro_batches, open_pipeline, stage_layers
from tests.reference.make_gguf import TinyModel, write_model
from tests.reference.skips import skip_without_ggml

_SHAPE = TinyModel(layers=5, width=96, heads=6, kv_heads=2, head_dim=32, feed_forward=160)
_TABLES = np.arange(64, dtype=np.int32).reshape(4, 16)
_SIZES = StepSizes(threads=1, max_tokens_per_step=512, max_sequences=8, max_context=512)


@pytest.fixture(scope="module", params=["f16", "q8_0", "q4_0"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    skip_without_ggml()
    shape = TinyModel(**{**vars(_SHAPE), "quantisation": request.param})
    with load_model(GGUFFile.open(write_model(tmp_path_factory.mktemp("model") / "m.gguf", shape))) as model:
        yield model


def _slice(count: int, start: int, row: int, outputs: Literal["last", "all", "none"] = "last") -> SequenceSlice:
    tokens = np.random.default_rng(count + row).integers(0, _SHAPE.vocabulary, count).astype(np.int32)
    return SequenceSlice(tokens, start, _TABLES[row], outputs)


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_steps_have_the_bits_of_one_executor(model: Model, stages: int) -> None:
    """A prompt in one step, with a tail; then a prompt beside decodes; then decodes alone."""
    steps = [
        [_slice(64, 0, 1), _slice(20, 0, 2, "none"), _slice(199, 0, 0)],
        [_slice(1, 64, 1), _slice(1, 20, 2), _slice(126, 0, 3), _slice(1, 199, 0)],
        [_slice(1, 65, 1), _slice(1, 21, 2), _slice(1, 200, 0)],
        [_slice(55, 201, 0, "all")],
    ]
    pools = [BlockPool(model.config, 64) for _ in range(2)]
    for pool in pools:
        pool.planes.fill(0)
    with (
        Executor(model, pools[0], _SIZES) as executor,
        open_pipeline(model, pools[1], stages, _SIZES) as pipeline,
    ):
        for step in steps:
            np.testing.assert_array_equal(pipeline.forward(step), executor.forward(step))
            np.testing.assert_array_equal(pools[1].planes, pools[0].planes)
        rows = np.zeros((8, _SHAPE.vocabulary), np.float32)
        seen = pipeline.forward(steps[2], rows)
        assert seen.base is rows and np.array_equal(seen, executor.forward(steps[2]))


class _Gated(Executor):
    """Says when it begins a step, and waits to be let through."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.begun, self.may_go = threading.Semaphore(0), threading.Semaphore(0)

    def forward(self, slices: Any, out: Any = None, *, hidden: Any = None) -> Any:
        self.begun.release()
        assert self.may_go.acquire(timeout=60)
        return super().forward(slices, out, hidden=hidden)


def _gated(model: Model, stages: int) -> Pipeline:
    pool = BlockPool(model.config, 64)
    parts = stage_layers(model.config.layers, stages)
    return Pipeline([_Gated(model, pool.of_layers(part), _SIZES, layers=part) for part in parts], pool)


def test_a_stage_computes_while_the_next_one_does(model: Model) -> None:
    with _gated(model, 2) as pipeline, ThreadPoolExecutor(1) as caller:
        first, second = (stage.executor for stage in pipeline.stages)
        assert isinstance(first, _Gated) and isinstance(second, _Gated)
        step = caller.submit(pipeline.forward, [_slice(192, 0, 0)])  # three pieces
        first.may_go.release()
        for _ in range(2):
            assert first.begun.acquire(timeout=60)
        assert second.begun.acquire(timeout=60)  # both are in a step now, of different pieces
        assert not step.done()
        first.may_go.release(2)
        second.may_go.release(3)
        assert np.isfinite(step.result(timeout=60)).all()


class _Failing(Executor):
    """Fails once, in its second step."""

    calls = 0

    def forward(self, slices: Any, out: Any = None, *, hidden: Any = None) -> Any:
        self.calls += 1
        if self.calls == 2:
            raise RuntimeError("out of order")
        return super().forward(slices, out, hidden=hidden)


def test_a_step_that_failed_in_a_stage_can_be_computed_again(model: Model) -> None:
    pools, parts = [BlockPool(model.config, 64) for _ in range(2)], stage_layers(model.config.layers, 2)
    stages = [
        kind(model, pools[0].of_layers(part), _SIZES, layers=part)
        for kind, part in zip((Executor, _Failing), parts, strict=True)
    ]
    step = [_slice(200, 0, 0)]
    with Pipeline(stages, pools[0]) as pipeline, Executor(model, pools[1], _SIZES) as executor:
        with pytest.raises(RuntimeError, match="out of order"):
            pipeline.forward(step)
        np.testing.assert_array_equal(pipeline.forward(step), executor.forward(step))
        with pytest.raises(ValueError, match="token ids"):
            pipeline.forward([SequenceSlice(np.array([9999], np.int32), 0, _TABLES[0])])


def test_stages_follow_one_another(model: Model) -> None:
    assert stage_layers(30, 4) == [range(7), range(7, 15), range(15, 22), range(22, 30)]
    for stages in (0, 6):
        with pytest.raises(ValueError, match="1 to 5 stages"):
            stage_layers(5, stages)
    pool = BlockPool(model.config, 4)
    parts = [Executor(model, pool.of_layers(part), layers=part) for part in (range(2), range(3, 5))]
    for wrong in (parts, parts[:1], parts[1:], []):
        with pytest.raises(ValueError, match="do not follow"):
            Pipeline(wrong, pool)
    for part in parts:
        part.close()


@given(st.lists(st.tuples(st.integers(1, 300), st.sampled_from(["last", "all", "none"])), min_size=1, max_size=6))
def test_pieces_have_every_row_once_and_the_last_one_all_outputs(counts: list[tuple[int, Any]]) -> None:
    slices = [_slice(count, 7, row % 4, outputs) for row, (count, outputs) in enumerate(counts)]
    *pieces, rest = micro_batches(slices, 64)
    assert [piece.outputs for piece in rest] == [piece.outputs for piece in slices]
    assert all(len(part.tokens) == 64 and part.outputs == "none" for (part,) in pieces)
    left = [part for (part,) in pieces]
    for whole, tail in zip(slices, rest, strict=True):
        assert len(tail.tokens) < 128 or whole.outputs == "all"
        own: list[SequenceSlice] = []
        while sum(len(part.tokens) for part in (*own, tail)) < len(whole.tokens):
            own.append(left.pop(0))
        own.append(tail)
        assert [part.start for part in own] == [7 + 64 * at for at in range(len(own))]
        np.testing.assert_array_equal(np.concatenate([part.tokens for part in own]), whole.tokens)
        assert all(part.block_table is whole.block_table for part in own)
    assert not left
