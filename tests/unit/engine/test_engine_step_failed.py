"""A step that kills worker after worker fails the sequences that are to blame, and no others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvstore_engine.batching.engine import BatchEngine
from kvstore_engine.batching.events import Event, Finished, Token
from kvstore_engine.batching.request import Request, RequestSettings
from kvstore_engine.executor import Executor
from kvstore_engine.executors import StepSizes
from kvstore_engine.executors.logits import StepLogits
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.graph import SequenceSlice
from kvstore_engine.graph.step import StepLimits
from kvstore_engine.model.weights import load_model
from kvstore_engine.pool import BlockPool
from kvstore_engine.tokenizer import Tokenizer
from kvstore_engine.worker import StepFailed
from tests.reference.skips import skip_without_ggml
from tests.reference.tiny_llama import write_tiny_llama

_POISON = 77


class _Poisoned:
    """Computes, but no step with the token 77 in it."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    @property
    def limits(self) -> StepLimits:
        return self._executor.limits

    @property
    def pool(self) -> BlockPool:
        return self._executor.pool

    def step(self, slices: Sequence[SequenceSlice], whole: Sequence[int] | None = None, /) -> StepLogits:
        blamed = tuple(index for index, piece in enumerate(slices) if _POISON in piece.tokens)
        if blamed:
            raise StepFailed("ggml failed: this step ended 3 workers", blamed)
        return self._executor.step(slices, whole)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[BatchEngine]:
    skip_without_ggml()
    file = GGUFFile.open(write_tiny_llama(tmp_path / "tiny.gguf"))
    tokenizer = Tokenizer.from_metadata(file.metadata)
    with load_model(file) as model:
        pool = BlockPool(model.config, 64)
        with Executor(
            model, pool, StepSizes(threads=1, max_tokens_per_step=128, max_sequences=4, max_context=256)
        ) as executor:
            made = BatchEngine(_Poisoned(executor), tokenizer)
            yield made
            made.close()


def _answers(engine: BatchEngine, prompts: dict[str, list[int]]) -> dict[str, list[Event]]:
    settings = RequestSettings(max_tokens=6, ignore_end=True)
    for name, tokens in prompts.items():
        engine.add(Request(name, np.array(tokens, np.int32), settings))
    events: dict[str, list[Event]] = {name: [] for name in prompts}
    while engine.has_work:
        for event in engine.step():
            events[event.request_id].append(event)
    return events


def test_only_the_sequence_that_is_to_blame_fails(engine: BatchEngine) -> None:
    good = {"a": [5, 6, 7], "b": [9, 10, 11, 12]}
    alone = _answers(engine, good)
    free = engine.pool.free_blocks
    events = _answers(engine, {"a": good["a"], "bad": [5, 6, _POISON], "b": good["b"]})
    (end,) = events.pop("bad")
    assert isinstance(end, Finished)
    assert (end.reason, end.usage.generated_tokens) == ("failed", 0)
    assert "3 workers" in end.message
    for name, seen in events.items():
        wanted = [event.token for event in alone[name] if isinstance(event, Token)]
        assert [event.token for event in seen if isinstance(event, Token)] == wanted
    assert engine.pool.free_blocks <= free
    assert _answers(engine, good).keys() == good.keys()
