"""Generation from prompt to answer with a tiny model: restoring changes the time and never the tokens."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from kvstore_engine.batching.request import RequestSettings
from kvstore_engine.errors import OperationError, UsageError
from kvstore_engine.executor import Executor
from kvstore_engine.executors import StepSizes
from kvstore_engine.generate import Generator
from kvstore_engine.generation import Prompt
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.model.weights import load_model
from kvstore_engine.pool import BlockPool
from kvstore_engine.sampler import SamplingSettings
from kvstore_engine.tokenizer import Tokenizer
from kvstore_restore.learned import LearnedCosts
from tests.reference.assumed_costs import assume
from tests.reference.memory_session import MemorySession
from tests.reference.skips import skip_without_ggml
from tests.reference.tiny_llama import CONTEXT, write_tiny_llama

LONG = "the cat sat on the mat and the hat of the rat that ran. " * 16


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    skip_without_ggml()
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf")


class Bench:
    """One loaded model; each generator gets a pool of its own, so that nothing but the store is shared."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._stack = stack
        file = GGUFFile.open(path)
        self.tokenizer = Tokenizer.from_metadata(file.metadata)
        self.model = stack.enter_context(load_model(file))

    def generator(self, session: MemorySession | None = None, context: int = CONTEXT) -> Generator:
        pool = BlockPool(self.model.config, CONTEXT // 16)
        executor = self._stack.enter_context(
            Executor(
                self.model, pool, StepSizes(threads=1, max_tokens_per_step=128, max_sequences=1, max_context=CONTEXT)
            )
        )
        costs = LearnedCosts()
        assume(costs, [1.0, 1.0, 0.0])  # computing looks slow: restore all that is stored
        generator = Generator(
            tokenizer=self.tokenizer,
            executor=executor,
            context=context,
            session=session,
            costs=costs,
        )
        self._stack.callback(generator.close)
        return generator

    def session(self) -> MemorySession:
        pool = BlockPool(self.model.config, 4)
        return MemorySession(pool.payload_bytes(4))


@pytest.fixture
def bench(model_path: Path) -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(model_path, stack)


def _settings(max_tokens: int = 12, **changes: object) -> RequestSettings:
    return RequestSettings(max_tokens=max_tokens, ignore_end=True, **changes)  # type: ignore[arg-type]


def test_a_warm_answer_equals_a_cold_one(bench: Bench) -> None:
    session = bench.session()
    plain = bench.generator().generate(Prompt(LONG), _settings(40))
    cold = bench.generator(session).generate(Prompt(LONG), _settings(40))
    warm = bench.generator(session).generate(Prompt(LONG), _settings(40))
    assert cold.tokens == plain.tokens == warm.tokens
    assert len(set(plain.tokens)) > 5  # the model does say something
    assert cold.tokens_restored == 0
    assert cold.store.stored == (cold.prompt_tokens + 39) // 64
    assert warm.tokens_restored == (warm.prompt_tokens - 1) // 64 * 64 > 100
    assert warm.tokens_computed == warm.prompt_tokens - warm.tokens_restored
    assert warm.restore.bytes == warm.tokens_restored // 64 * session.block_bytes


def test_a_continued_conversation_restores_what_was_generated(bench: Bench) -> None:
    session = bench.session()
    first = bench.generator(session).generate(Prompt(LONG), _settings(100))
    ids = [*bench.tokenizer.encode(LONG).tolist(), *first.tokens]
    text = bench.tokenizer.decode(ids) + " and then"
    again = bench.tokenizer.encode(text).tolist()
    common = next((i for i, (a, b) in enumerate(zip(ids, again, strict=False)) if a != b), len(ids))
    second = bench.generator(session).generate(Prompt(text), _settings(4))
    computed = min(common, len(ids) - 1)
    assert second.tokens_restored == min(computed, second.prompt_tokens - 1) // 64 * 64


def test_the_next_turn_is_announced_for_whole_blocks_of_prompt_and_answer(bench: Bench) -> None:
    session = bench.session()
    first = bench.generator(session).generate(Prompt(LONG), _settings(100), next_turn_in_s=30.0)
    assert session.due == [((first.prompt_tokens + len(first.tokens)) // 64, 30.0)]
    assert session.next_steps[-1] == "end_of_turn"
    bench.generator(session).generate(Prompt(LONG), _settings(1))
    assert len(session.due) == 1
    session.fail_with = ConnectionResetError("gone")
    again = bench.generator(session).generate(Prompt(LONG), _settings(100), next_turn_in_s=30.0)
    assert again.tokens == first.tokens


def test_a_failing_store_costs_nothing_but_its_savings(bench: Bench) -> None:
    plain = bench.generator().generate(Prompt(LONG), _settings())
    session = bench.session()
    session.fail_with = ConnectionResetError("gone")
    answer = bench.generator(session).generate(Prompt(LONG), _settings())
    assert answer.tokens == plain.tokens
    assert "restoring failed: ConnectionResetError" in answer.restore.reason
    assert "storing failed: ConnectionResetError" in answer.store.reason


def test_a_store_that_cannot_be_reached_is_not_asked(bench: Bench) -> None:
    session = bench.session()
    session.state = "degraded"
    answer = bench.generator(session).generate(Prompt(LONG), _settings())
    assert (answer.restore.reason, session.leases, session.puts) == ("the store cannot be reached", [], [])


def test_an_answer_is_one(bench: Bench) -> None:
    with pytest.raises(UsageError, match="one answer"):
        bench.generator().generate(Prompt("x"), _settings(n=2))


def test_an_answer_that_cannot_be_computed_says_so(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = bench.generator()
    free, forward = generator.pool.free_blocks, generator.executor.forward

    def broken(*arguments: object) -> object:
        logits = forward(*arguments)  # type: ignore[arg-type]
        logits[:] = np.nan
        return logits

    monkeypatch.setattr(generator.executor, "forward", broken)
    with pytest.raises(OperationError, match="the answer failed"):
        generator.generate(Prompt("the cat"), _settings())
    assert generator.pool.free_blocks == free


def test_no_store_reads_but_does_not_write(bench: Bench) -> None:
    session = bench.session()
    bench.generator(session).generate(Prompt(LONG), _settings(store=False))
    assert not session.puts
    bench.generator(session).generate(Prompt(LONG), _settings())
    puts = len(session.puts)
    warm = bench.generator(session).generate(Prompt(LONG), _settings(store=False))
    assert warm.tokens_restored > 0
    assert len(session.puts) == puts


def test_the_streamed_text_is_the_answer(bench: Bench) -> None:
    parts: list[str] = []
    answer = bench.generator().generate(Prompt("the cat"), _settings(60), parts.append)
    assert "".join(parts) == answer.text == bench.tokenizer.decode(answer.tokens)
    assert len(answer.tokens) == 60
    assert answer.stop == "length"


def test_an_end_token_stops_and_is_not_part_of_the_answer(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = bench.generator()
    free = generator.generate(Prompt("the cat"), _settings(60))
    last = free.tokens[20]
    first_use = free.tokens.index(last)
    monkeypatch.setattr(bench.tokenizer, "end_ids", frozenset([last]))
    stopped = generator.generate(Prompt("the cat"), RequestSettings(max_tokens=60))
    assert stopped.stop == "end"
    assert stopped.tokens == free.tokens[:first_use]


def test_a_prompt_is_stored_although_its_answer_ends_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    session = bench.session()
    generator = bench.generator(session)
    first = generator.generate(Prompt(LONG), RequestSettings(max_tokens=1, store=False)).tokens[0]
    monkeypatch.setattr(bench.tokenizer, "end_ids", frozenset({first}))
    answer = generator.generate(Prompt(LONG), RequestSettings(max_tokens=4))
    assert (list(answer.tokens), answer.stop) == ([], "end")
    assert answer.store.stored == answer.prompt_tokens // 64 > 0


def test_the_context_ends_an_answer_and_refuses_a_prompt(bench: Bench) -> None:
    generator = bench.generator(context=100)
    count = len(bench.tokenizer.encode("the cat sat"))
    answer = generator.generate(Prompt("the cat sat"), _settings(500))
    assert answer.stop == "context"
    assert count + len(answer.tokens) == 100 + 1  # the last token was chosen and needs no place
    with pytest.raises(UsageError, match=r"prompt has \d+ tokens and the context holds 100.*larger context"):
        generator.generate(Prompt(LONG), _settings())
    with pytest.raises(UsageError, match="prompt is empty"):
        generator.generate(Prompt(""), _settings())
    with pytest.raises(UsageError, match="max_tokens"):
        generator.generate(Prompt("x"), _settings(0))


def test_an_interrupted_answer_gives_its_blocks_back(bench: Bench) -> None:
    session = bench.session()
    generator = bench.generator(session)
    free = generator.pool.free_blocks

    def interrupt(text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generator.generate(Prompt(LONG), _settings(), interrupt)
    assert generator.pool.free_blocks == free
    assert generator.generate(Prompt(LONG), _settings()).stop == "length"


def test_sampling_is_repeatable_by_seed(bench: Bench) -> None:
    generator = bench.generator()

    def tokens(seed: int) -> list[int]:
        sampling = SamplingSettings(temperature=1.5, top_k=50, top_p=0.95, seed=seed)
        return list(generator.generate(Prompt("the cat"), _settings(30, sampling=sampling)).tokens)

    assert tokens(1) == tokens(1) != tokens(2)


def test_warm_up_teaches_costs_and_leaves_the_pool_free(bench: Bench) -> None:
    generator = bench.generator()
    free = generator.pool.free_blocks
    generator.warm_up()
    assert generator.pool.free_blocks == free
    assert generator.costs.steps.count > 1


def test_the_timings_add_up(bench: Bench) -> None:
    session = bench.session()
    bench.generator(session).generate(Prompt(LONG), _settings())
    answer = bench.generator(session).generate(Prompt(LONG), _settings())
    timings = answer.timings
    parts = timings.tokenize_s + timings.lookup_s + timings.restore_s + timings.prefill_s
    assert 0 < parts <= timings.ttft_s
    assert timings.decode_s > 0
    assert timings.tpot_s == pytest.approx(timings.decode_s / 11)
    assert answer.as_json()["tokens_restored"] == answer.tokens_restored
