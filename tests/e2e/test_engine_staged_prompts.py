"""A generator whose model is computed in stages, over stores in memory: what it restores, stores and leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvstore_engine.batching.request import RequestSettings
from kvstore_engine.executors import StepSizes
from kvstore_engine.generate import Generator
from kvstore_engine.generation import Generation, Prompt
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.model.weights import load_model
from kvstore_engine.pool import BlockPool
from kvstore_engine.stages.pipeline import open_pipeline
from kvstore_engine.stages.prompts import StagedPrompts
from kvstore_engine.stages.stores import StageStore
from kvstore_engine.tokenizer import Tokenizer
from kvstore_restore.learned import LearnedCosts
from tests.reference.assumed_costs import assume
from tests.reference.memory_session import MemorySession
from tests.reference.skips import skip_without_ggml
from tests.reference.tiny_llama import CONTEXT, write_tiny_llama

LONG = Prompt("the cat sat on the mat and the hat of the rat that ran. " * 16)
STATES_BYTES = 64 * 64 * 4


class Staged:
    """A generator of two stages, and their sessions."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        file = GGUFFile.open(path)
        model = stack.enter_context(load_model(file))
        pool = BlockPool(model.config, CONTEXT // 16)
        pipeline = stack.enter_context(
            open_pipeline(
                model, pool, 2, StepSizes(threads=1, max_tokens_per_step=128, max_sequences=1, max_context=CONTEXT)
            )
        )
        self.kv = [MemorySession(stage.pool.payload_bytes(4)) for stage in pipeline.stages]
        self.states = MemorySession(STATES_BYTES)
        self.pipeline, self.costs = pipeline, [LearnedCosts() for _ in pipeline.stages]
        stores = [StageStore(self.kv[0]), StageStore(self.kv[1], self.states)]
        prompts = stack.enter_context(StagedPrompts(pipeline, stores, self.costs))
        self.generator = Generator(
            tokenizer=Tokenizer.from_metadata(file.metadata),
            executor=pipeline,
            context=CONTEXT,
            stages=prompts,
        )
        stack.callback(self.generator.close)

    def answer(self, settings: RequestSettings, prompt: Prompt = LONG, **more: Any) -> Generation:
        """Answer by stages to which computing looks slow, and loading so slow that none counts as
        stalled: they load.
        """
        for each in self.costs:
            assume(each, [1000.0, 1000.0, 0.0])
            each.links.clear()
            each.expect_load("host", self.kv[0].block_bytes, 5.0)
        return self.generator.generate(prompt, settings, **more)

    @property
    def sessions(self) -> list[MemorySession]:
        return [*self.kv, self.states]


@pytest.fixture
def staged(tmp_path: Path) -> Iterator[Staged]:
    skip_without_ggml()
    with ExitStack() as stack:
        yield Staged(write_tiny_llama(tmp_path / "tiny.gguf"), stack)


def _settings(max_tokens: int = 12, **changes: Any) -> RequestSettings:
    return RequestSettings(max_tokens=max_tokens, ignore_end=True, **changes)


def test_each_answer_has_what_the_store_provides_and_leaves_no_blocks(staged: Staged) -> None:
    free = staged.generator.pool.free_blocks
    cold = staged.answer(_settings())
    assert (cold.tokens_restored, staged.generator.pool.free_blocks) == (0, free)
    warm = staged.answer(_settings())
    assert warm.tokens == cold.tokens and warm.tokens_restored == (warm.prompt_tokens - 1) // 64 * 64
    for session in staged.sessions:
        session.blocks.clear()
    again = staged.answer(_settings())
    assert again.tokens == cold.tokens and again.tokens_restored == 0
    assert staged.generator.pool.free_blocks == free


def test_an_interrupted_answer_gives_its_blocks_back(staged: Staged) -> None:
    free = staged.generator.pool.free_blocks

    def interrupt(text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        staged.answer(_settings(), on_text=interrupt)
    assert staged.generator.pool.free_blocks == free
    answer = staged.answer(_settings())
    assert answer.tokens_restored == 0 and answer.store.stored > 4


def test_a_stage_that_fails_leaves_no_blocks(staged: Staged, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **named: object) -> None:
        raise RuntimeError("out of order")

    free = staged.generator.pool.free_blocks
    with monkeypatch.context() as patched:
        patched.setattr(staged.pipeline.stages[1].executor, "forward", broken)
        with pytest.raises(RuntimeError, match="out of order"):
            staged.answer(_settings())
    assert staged.generator.pool.free_blocks == free
    assert staged.answer(_settings()).tokens_restored == 0


def test_no_store_restores_and_stores_nothing(staged: Staged) -> None:
    cold = staged.answer(_settings(store=False))
    assert not any(session.blocks for session in staged.sessions)
    staged.answer(_settings())
    puts = [len(session.puts) for session in staged.sessions]
    warm = staged.answer(_settings(store=False))
    assert warm.tokens == cold.tokens and warm.tokens_restored > 100
    assert [len(session.puts) for session in staged.sessions] == puts


def test_a_longer_prompt_stores_the_states_that_follow_those_stored(staged: Staged) -> None:
    longer = Prompt(LONG.text + "and then the dog came and sat on the cat. " * 4)
    first = staged.answer(_settings(1))
    blocks = len(staged.states.blocks)
    assert blocks == (first.prompt_tokens - 1) // 64
    second = staged.answer(_settings(1), longer)
    assert second.prompt_tokens // 64 > first.prompt_tokens // 64
    later = (second.prompt_tokens - 1) // 64 - blocks
    assert staged.states.puts[-1] == (blocks, later) and len(staged.states.blocks) == blocks + later


def test_stores_that_cannot_be_reached_are_not_asked(staged: Staged) -> None:
    for session in staged.sessions:
        session.state = "degraded"
    answer = staged.answer(_settings())
    assert answer.restore.reason == "the store cannot be reached"
    assert not any(session.leases or session.puts for session in staged.sessions)
    assert staged.answer(_settings(), Prompt("the cat")).restorations == ()


def test_a_failing_store_costs_nothing_but_its_savings(staged: Staged) -> None:
    cold = staged.answer(_settings())
    for session in staged.sessions:
        session.fail_with = ConnectionResetError("gone")
    answer = staged.answer(_settings(), next_turn_in_s=30.0)
    assert answer.tokens == cold.tokens and answer.tokens_restored == 0
    for stage in range(2):
        assert f"stage {stage}: storing failed: ConnectionResetError" in answer.store.reason


def test_the_next_turn_is_announced_to_all_stages(staged: Staged) -> None:
    answer = staged.answer(_settings(100), next_turn_in_s=30.0)
    whole = (answer.prompt_tokens + len(answer.tokens)) // 64
    assert [session.due for session in staged.sessions] == [[(whole, 30.0)]] * 3
    assert [[tokens for _, tokens in session.answer_hints] for session in staged.sessions] == [[100]] * 3
    assert staged.kv[1].next_steps == [None, "end_of_turn"]


def test_warm_up_teaches_each_stage_and_leaves_the_pool_free(staged: Staged) -> None:
    free = staged.generator.pool.free_blocks
    staged.generator.warm_up()
    assert staged.generator.pool.free_blocks == free
    assert [each.steps.samples for each in staged.costs] == [1, 1]


def test_the_timings_add_up(staged: Staged) -> None:
    for _ in range(2):
        answer = staged.answer(_settings())
        timings = answer.timings
        parts = timings.tokenize_s + timings.lookup_s + timings.restore_s + timings.prefill_s
        assert 0 < parts <= timings.ttft_s and 0 < timings.store_s <= timings.flush_s
        assert (timings.restore_s > 0) == (answer.tokens_restored > 0)
        assert len(answer.as_json()["restorations"]) == 2
