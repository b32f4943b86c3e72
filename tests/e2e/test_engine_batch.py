"""Many requests over a real model: sharing, preempting, swapping and restoring change the time and never the answer.

An answer in a batch may differ from the same alone by rounding: ggml multiplies few rows with another kernel than many.
So answers are compared up to the first step at which the two likeliest tokens are closer than that rounding reaches,
and the rounding is measured here, on this machine's library.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvstore_engine.batching.engine import BatchEngine
from kvstore_engine.batching.settings import EngineSettings
from kvstore_engine.blocks.host_pool import HostPool, swap_in, swap_out
from kvstore_engine.executors import PoolSetup, StepExecutor, StepSizes
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.graph import SequenceSlice
from kvstore_engine.models.cache import cache_root
from kvstore_engine.models.known import KNOWN_MODELS
from kvstore_engine.models.locate import locate
from kvstore_engine.tokenizer import Tokenizer
from kvstore_restore.learned import LearnedCosts
from tests.reference.assumed_costs import assume
from tests.reference.batch_runs import Outcome, request, run
from tests.reference.examples import each_nth, fewer
from tests.reference.executors import GGML, TORCH, TriedExecutor
from tests.reference.memory_session import MemorySession
from tests.reference.prefill import prefill
from tests.reference.skips import skip_without_ggml
from tests.reference.tiny_llama import CONTEXT, write_tiny_llama

_WORDS = ["The river", "A merchant", "Every morning", "In the old town", "Nobody", "The library", "Without a doubt"]
Floats = npt.NDArray[np.float32]


class Loaded:
    """One model; each engine gets an executor and a pool of its own."""

    def __init__(self, path: Path, stack: ExitStack, tried: TriedExecutor = GGML) -> None:
        self._path, self._stack, self._opens = path, stack, tried.opens
        with GGUFFile.open(path) as file:
            self.tokenizer = Tokenizer.from_metadata(file.metadata)
        self._alone = self.executor(CONTEXT // 16, 1)

    def executor(self, blocks: int, sequences: int = 16) -> StepExecutor:
        sizes = StepSizes(threads=2, max_tokens_per_step=272, max_sequences=sequences, max_context=CONTEXT)
        return self._stack.enter_context(self._opens(self._path, PoolSetup(blocks, 16, "f16"), sizes))

    def payload_bytes(self, engine_blocks: int) -> int:
        return self._alone.pool.payload_bytes(engine_blocks)

    def engine(self, blocks: int = 512, session: MemorySession | None = None, **settings: Any) -> BatchEngine:
        executor = self.executor(blocks)
        costs = LearnedCosts()
        assume(costs)  # computing looks slow: restore and swap all that can be
        engine = BatchEngine(
            executor,
            self.tokenizer,
            settings=EngineSettings(**{"max_queue_s": 1e9, **settings}),
            sessions=(lambda tenant: session) if session is not None else None,
            costs=costs,
        )
        self._stack.callback(engine.close)
        return engine

    def prompt(self, seed: int, count: int) -> list[int]:
        vocabulary = len(self.tokenizer.vocabulary.tokens)
        return np.random.default_rng(seed).integers(3, vocabulary, count).tolist()

    def margins_alone(self, prompt: Sequence[int], answer: Sequence[int]) -> list[tuple[int, float]]:
        """Return for each step of `answer`, teacher-forced and alone, the likeliest token and its margin."""
        rows = [self.logits_alone(prompt)]
        table = np.arange(CONTEXT // 16, dtype=np.int32)
        for position, token in enumerate(answer[:-1], len(prompt)):
            piece = SequenceSlice(np.array([token], np.int32), position, table)
            rows.append(self._alone.forward([piece])[0])
        best = [np.partition(row, -2)[-2:] for row in rows]
        return [(int(row.argmax()), float(two[1] - two[0])) for row, two in zip(rows, best, strict=True)]

    def logits_alone(self, prompt: Sequence[int]) -> Floats:
        table = np.arange(CONTEXT // 16, dtype=np.int32)
        logits: Floats = prefill(self._alone, np.array(prompt, np.int32), 0, table)
        return logits

    def noise(self) -> float:
        """The largest difference that the company of other rows makes to a logit, over some prompts and steps."""
        tokens, worst = self.prompt(1, 120), 0.0
        executor = self.executor(64, 8)
        table = np.arange(CONTEXT // 16, dtype=np.int32)
        everything = executor.forward([SequenceSlice(np.array(tokens, np.int32), 0, table[:8], "all")])
        for position in range(40, 119):
            piece = SequenceSlice(np.array(tokens[position : position + 1], np.int32), position, table[:8])
            worst = max(worst, float(np.abs(executor.forward([piece])[0] - everything[position]).max()))
        return worst

    def assert_as_alone(self, outcome: Outcome, prompts: dict[str, list[int]], floor: float) -> None:
        """Each answer is what the model says alone, up to the first step that rounding may decide."""
        compared = 0
        for name, prompt in prompts.items():
            answer = outcome.tokens[name, 0]
            for token, (best, margin) in zip(answer, self.margins_alone(prompt, answer), strict=True):
                if margin <= floor:
                    break
                assert token == best, f"{name}: {token} instead of {best} with a margin of {margin} over {floor}"
                compared += 1
        assert compared > sum(len(outcome.tokens[name, 0]) for name in prompts) // 4, (
            "rounding decides too much to compare anything"
        )


@pytest.fixture(scope="module", params=[GGML, TORCH], ids=str)
def tried(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    """The tiny model by each executor."""
    request.param.need()
    with ExitStack() as stack:
        yield Loaded(write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf"), stack, request.param)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    """Return the model loaded by ggml's executor: a row's bits do not depend on the other rows of its step."""
    skip_without_ggml()
    with ExitStack() as stack:
        yield Loaded(write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf"), stack)


@pytest.fixture(scope="module")
def real(loaded: Loaded) -> Iterator[Loaded]:
    name = "smollm2-135m-instruct"
    if not (cache_root() / "models" / KNOWN_MODELS[name].file_name).exists():
        pytest.skip(f"{name} is not in the model cache (kvengine fetch {name})")
    with ExitStack() as stack:
        yield Loaded(locate(f"{name}:q4_0"), stack)


def _storm(loaded: Loaded, count: int, blocks: int) -> tuple[Outcome, dict[str, list[int]]]:
    engine = loaded.engine(blocks, swap_bytes=64 << 20)
    outcome, prompts = Outcome(), {}
    for n in range(count):
        head = loaded.prompt(n % 5, 48) if n % 3 == 0 else []
        prompts[str(n)] = head + loaded.prompt(100 + n, 5 + n * 37 % 40)
        engine.add(request(str(n), prompts[str(n)], 30 + n * 13 % 60, tenant=str(n % 2)))
        if n % 3 == 0:
            outcome.take(engine.step())
    run(engine, outcome)
    usages = [finished.usage for finished in outcome.finished.values()]
    assert sum(usage.preemptions for usage in usages) > count // 20
    assert sum(usage.swaps for usage in usages) > 0
    return outcome, prompts


@pytest.mark.slow
@pytest.mark.parametrize("tried", [GGML, pytest.param(TORCH, marks=pytest.mark.slow)], indirect=True, ids=str)
def test_a_preemption_storm_changes_no_answer(tried: Loaded) -> None:
    """Sequences of 35 to 182 tokens in a pool of 26 blocks: about a quarter of what 16 of them want."""
    outcome, prompts = _storm(tried, 24, 26)
    tried.assert_as_alone(outcome, prompts, 2 * tried.noise())


@pytest.mark.slow
def test_a_long_preemption_storm_changes_no_answer(loaded: Loaded) -> None:
    count = fewer(500, 0.3)
    outcome, prompts = _storm(loaded, count, 26)
    assert len(outcome.finished) == count
    loaded.assert_as_alone(outcome, prompts, 2 * loaded.noise())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_long_preemption_storm_changes_no_answer_of_a_real_model(real: Loaded) -> None:
    """Priorities cause the preemptions, in a pool of a quarter of what 16 of them want. Every fifth
    answer is compared.
    """
    engine, count = real.engine(20, swap_bytes=256 << 20, policy="priority"), fewer(500, 0.2)
    prompts = {
        str(n): real.tokenizer.encode(
            f"{_WORDS[n % 7]} number {n} says: {' '.join(_WORDS[n % 5 :] * (1 + n % 5))}"
        ).tolist()
        for n in range(count)
    }
    outcome = Outcome()
    for n, (name, prompt) in enumerate(prompts.items()):
        engine.add(request(name, prompt, 30 + n * 13 % 60, priority=n % 4, tenant=str(n % 2)))
        if n % 3 == 0:
            outcome.take(engine.step())
    run(engine, outcome)
    usages = [finished.usage for finished in outcome.finished.values()]
    assert len(usages) == count and sum(usage.preemptions for usage in usages) > count // 20
    assert sum(usage.swaps for usage in usages) > 0
    some = {name: prompts[name] for name in list(prompts)[::5]}
    real.assert_as_alone(outcome, some, 2 * real.noise())


def test_a_swapped_sequences_state_comes_back_bit_by_bit(tried: Loaded) -> None:
    engine = tried.engine(64)
    space, pool = engine.space, engine.pool
    host = HostPool(pool, 16 * pool.payload_bytes(1))
    prompt = tried.prompt(7, 100)
    engine.add(request("one", prompt, 40))
    outcome = Outcome()
    while len(outcome.tokens["one", 0]) < 20:
        outcome.take(engine.step())
    (sequence,) = engine.scheduler.run_queue.running
    saved = [np.copy(pool.planes[:, block]) for block in sequence.held.blocks]
    swapped = swap_out(space, host, sequence.held, sequence.computed, sequence.exact)
    other = tried.prompt(8, 64 * 16)
    space.release(space.claim("", np.array(other, np.int32)))  # every cached block is given up
    pool.planes[:, pool.free_flags] = 0xFF
    sequence.block_table, copied = swap_in(space, host, swapped, sequence.tokens[: sequence.length])
    assert copied == len(saved)
    for block, bits in zip(sequence.held.blocks, saved, strict=True):
        rows = slice(None)
        if block == sequence.held.blocks[-1]:
            rows = slice(0, (sequence.computed % 16) * pool.row_bytes)
        np.testing.assert_array_equal(pool.planes[:, block][:, rows], bits[:, rows])
    run(engine, outcome)
    plain = tried.engine(64)
    plain.add(request("one", prompt, 40))
    assert outcome.tokens["one", 0] == run(plain).tokens["one", 0]


@pytest.mark.parametrize("count", [1, 15, 16, 64, 65, 112, 200])
def test_alone_a_batch_engine_computes_the_same_bits_however_its_prompt_got_here(loaded: Loaded, count: int) -> None:
    """Cold, from this engine's own blocks, and from the daemon: the first token's logits are equal, and so is all."""
    session = MemorySession(loaded.payload_bytes(4))
    prompt = loaded.prompt(count, count)
    cold = loaded.engine(64, session)
    cold.add(request("cold", prompt, 30, logprobs=5))
    first = run(cold)
    cold.add(request("local", prompt, 30, logprobs=5))
    second = run(cold)
    cold.close()
    warm = loaded.engine(64, session)
    warm.add(request("daemon", prompt, 30, logprobs=5))
    third = run(warm)
    shown = [[(e.token, e.logprob, e.top) for e in o.events[:-1]] for o in (first, second, third)]  # type: ignore[union-attr]
    assert shown[0] == shown[1] == shown[2]
    assert second.finished["local", 0].usage.local_tokens >= (count - 1) // 16 * 16
    assert third.finished["daemon", 0].usage.daemon_tokens == (count - 1) // 64 * 64


@pytest.mark.parametrize("shared", each_nth([0.9, 0.5], 2))
def test_a_shared_prefix_is_evaluated_once(tried: Loaded, shared: float) -> None:
    engine = tried.engine(512)
    common = tried.prompt(1, int(256 * shared) // 16 * 16)
    prompts = {str(n): common + tried.prompt(10 + n, 256 - len(common)) for n in range(12)}
    for name, prompt in prompts.items():
        engine.add(request(name, prompt, 6))
    outcome = run(engine)
    ideal = len(common) + 12 * (256 - len(common))
    computed = sum(finished.usage.computed_tokens for finished in outcome.finished.values())
    assert computed <= 1.05 * ideal
    tried.assert_as_alone(outcome, prompts, 2 * tried.noise())
