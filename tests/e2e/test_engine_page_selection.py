"""New tokens of answers that read some pages of a context: what is stored, shared, restored and refused then."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvstore_engine.batching.engine import BatchEngine
from kvstore_engine.batching.settings import EngineSettings
from kvstore_engine.cli.main import main
from kvstore_engine.errors import UsageError
from kvstore_engine.executors import DeviceName, PoolSetup, StepExecutor, StepSizes
from kvstore_engine.gguf import FileWatch, GGUFFile
from kvstore_engine.graph import SequenceSlice
from kvstore_engine.loaded_model import LoadOptions, open_model
from kvstore_engine.model.config import ModelConfig
from kvstore_engine.opening import open_executor
from kvstore_engine.page_selection import LEAST_PAGES, PageSelection
from kvstore_engine.pool import BlockPool, selecting_pool
from kvstore_engine.tokenizer import Tokenizer
from kvstore_engine.worker import RemoteExecutor
from kvstore_engine.worker.memory import SharedMemory
from kvstore_restore.learned import LearnedCosts
from tests.reference.assumed_costs import assume
from tests.reference.batch_runs import Outcome, request, run
from tests.reference.memory_session import MemorySession
from tests.reference.skips import skip_without_ggml
from tests.reference.tiny_llama import CONTEXT, write_tiny_llama

FEW = PageSelection(pages=LEAST_PAGES)
LONG = 400  # tokens: 13 pages


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    skip_without_ggml()
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf")


class _Engines:
    """Engines of one model, each with a pool of its own."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._path, self._stack = path, stack
        with GGUFFile.open(path) as file:
            self.config, self._tokenizer = ModelConfig.from_gguf(file), Tokenizer.from_metadata(file.metadata)

    def executor(self, selection: PageSelection | None, blocks: int = CONTEXT // 16) -> StepExecutor:
        sizes = StepSizes(threads=1, max_tokens_per_step=CONTEXT, max_sequences=4, max_context=CONTEXT)
        setup = PoolSetup(blocks, 16, "f16", selection=selection)
        opened = open_executor(GGUFFile.open(self._path), DeviceName.parse("cpu"), setup, sizes)
        return self._stack.enter_context(opened)

    def engine(
        self, selection: PageSelection | None, session: MemorySession, blocks: int = CONTEXT // 16, swap_bytes: int = 0
    ) -> BatchEngine:
        costs = LearnedCosts()
        assume(costs)  # computing looks slow: restore all that is stored, and swap what may be
        engine = BatchEngine(
            self.executor(selection, blocks),
            self._tokenizer,
            settings=EngineSettings(max_queue_s=1e9, swap_bytes=swap_bytes),
            sessions=lambda tenant: session,
            costs=costs,
        )
        self._stack.callback(engine.close)
        return engine

    def session(self) -> MemorySession:
        return MemorySession(BlockPool(self.config, 4).payload_bytes(4))

    def computed(self, tokens: list[int]) -> MemorySession:
        """Return a store with the blocks of `tokens` as a prompt, without a selection."""
        session = self.session()
        answered(self.engine(None, session), "plain", tokens, 1)
        return session


@pytest.fixture
def engines(path: Path) -> Iterator[_Engines]:
    with ExitStack() as stack:
        yield _Engines(path, stack)


def _prompt(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 250, count).tolist()


def answered(engine: BatchEngine, name: str, tokens: list[int], count: int) -> Outcome:
    engine.add(request(name, tokens, count, logprobs=3))
    outcome = run(engine)
    engine.drain()
    return outcome


def _shown(outcome: Outcome) -> list[tuple[object, ...]]:
    return [(each.token, each.logprob, each.top) for each in outcome.events[:-1]]  # type: ignore[union-attr]


def test_prompts_are_stored_as_without_a_selection_and_tokens_that_selected_are_not(engines: _Engines) -> None:
    session, plain = engines.session(), engines.session()
    engine, tokens = engines.engine(FEW, session), _prompt(1, LONG)
    answer = answered(engine, "a", tokens, 80)
    assert _shown(answered(engines.engine(None, plain), "a", tokens, 80)) != _shown(answer)
    assert len(session.blocks) == LONG // 64 and len(plain.blocks) == (LONG + 79) // 64
    for key, payload in session.blocks.items():
        np.testing.assert_array_equal(payload, plain.blocks[key])
    turn = [*tokens, *answer.tokens["a", 0]][: LONG + 70]
    usage = answered(engine, "b", turn, 1).finished["b", 0].usage
    assert usage.local_tokens == LONG // 16 * 16, "the answer's blocks are not shared either"
    exact = engines.computed(turn)
    assert len(session.blocks) == len(exact.blocks) == len(turn) // 64
    for key, payload in session.blocks.items():
        np.testing.assert_array_equal(payload, exact.blocks[key])


def test_answers_too_short_for_a_selection_are_stored(engines: _Engines) -> None:
    session, plain, tokens = engines.session(), engines.session(), _prompt(2, 100)
    answer = answered(engines.engine(FEW, session), "a", tokens, 60)
    assert _shown(answer) == _shown(answered(engines.engine(None, plain), "a", tokens, 60))
    assert len(session.blocks) == (100 + 59) // 64 and session.blocks.keys() == plain.blocks.keys()


def test_restored_blocks_get_bounds_of_their_own(engines: _Engines) -> None:
    """The pool kept bounds of other pages before."""
    tokens = _prompt(3, LONG)
    session = engines.computed(tokens)
    used = engines.engine(FEW, session)
    for seed in (4, 5):
        answered(used, str(seed), _prompt(seed, LONG), 40)
    assert used.pool.bounds is not None and used.pool.bounds.known.any()
    restored = answered(used, "a", tokens, 40)
    assert restored.finished["a", 0].usage.daemon_tokens == LONG // 64 * 64
    assert _shown(restored) == _shown(answered(engines.engine(FEW, engines.session()), "a", tokens, 40))


@pytest.mark.parametrize("swap_bytes", [0, 64 << 20], ids=["recomputed", "swapped"])
def test_what_preempted_answers_share_and_store_is_what_full_attention_gives(
    engines: _Engines, swap_bytes: int
) -> None:
    session = engines.session()
    engine = engines.engine(FEW, session, 56, swap_bytes)
    prompts = {"a": _prompt(6, 330), "b": _prompt(7, LONG), "c": _prompt(8, 60)}
    for name, tokens in prompts.items():
        engine.add(request(name, tokens, 100))
    outcome = run(engine)
    usages = [finished.usage for finished in outcome.finished.values()]
    assert sum(usage.swaps if swap_bytes else usage.preemptions - usage.swaps for usage in usages) > 0
    again = {name: [*tokens, *outcome.tokens[name, 0]] for name, tokens in prompts.items()}
    for name, tokens in again.items():
        answered(engine, f"{name} again", tokens[: CONTEXT - 2], 1)
    compared = 0
    for tokens in again.values():
        for key, payload in engines.computed(tokens[: CONTEXT - 2]).blocks.items():
            np.testing.assert_array_equal(session.blocks[key], payload)
            compared += 1
    assert compared == len(session.blocks)


def _scattered(pool: BlockPool) -> npt.NDArray[np.uint8]:
    return np.zeros(pool.payload_bytes(4), np.uint8)


@pytest.mark.parametrize(
    "write",
    [
        lambda pool: pool.scatter_block(_scattered(pool), [4, 5, 6, 7]),
        lambda pool: pool.scatter_blocks([_scattered(pool)], [[4, 5, 6, 7]]),
        lambda pool: pool.scatter_part(np.zeros(pool.payload_bytes(6), np.uint8), 1, [4, 5, 6, 7]),
        lambda pool: pool.copy_blocks([0, 1, 2, 3], [4, 5, 6, 7]),
    ],
    ids=["block", "blocks", "part", "copies"],
)
def test_whoever_writes_to_a_block_forgets_its_bounds(engines: _Engines, write: Callable[[BlockPool], None]) -> None:
    pool = selecting_pool(engines.config, 12, FEW)
    assert pool.bounds is not None
    pool.bounds.known[:] = 1
    write(pool)
    assert not pool.bounds.known[4:8].any() and pool.bounds.known[:4].all() and pool.bounds.known[8:].all()


def test_a_worker_selects_as_the_process_itself_and_one_that_dies_loses_no_bounds(
    engines: _Engines, path: Path
) -> None:
    file, memory = GGUFFile.open(path), SharedMemory("test-pool", touched=True)
    pool = selecting_pool(engines.config, CONTEXT // 16, FEW, memory=memory.allocate)
    own, table = engines.executor(FEW), np.arange(CONTEXT // 16, dtype=np.int32)
    tokens = np.array(_prompt(9, LONG), np.int32)
    sizes = StepSizes(1, CONTEXT, 4, CONTEXT)
    with closing(RemoteExecutor(FileWatch(file), engines.config, pool, memory, sizes)) as worker:
        for computing in (own, worker):
            computing.forward([SequenceSlice(tokens, 0, table)])
        for number in range(3):
            step = SequenceSlice(tokens[:1], LONG + number, table, "last", None, LEAST_PAGES)
            expected, everything = (np.copy(own.forward([each])) for each in (step, replace(step, read_pages=0)))
            own.forward([step])
            np.testing.assert_array_equal(worker.forward([step]), expected)
            assert not np.array_equal(expected, everything)
            handle = os.pidfd_open(worker.pid)
            os.kill(worker.pid, signal.SIGKILL)
            select.select([handle], [], [], 10)
            os.close(handle)
        assert worker.deaths == 2
        with pytest.raises(ValueError, match="page bounds"):
            engines.executor(None).forward([step])
        with pytest.raises(ValueError, match="a slice of one token"):
            own.forward([replace(step, tokens=tokens[:2])])


@pytest.mark.parametrize("text", ["0%", "100%", "half", str(LEAST_PAGES - 1), "-1", "50 percent", ""])
def test_a_selection_is_a_share_or_a_number_of_pages(text: str, capsys: pytest.CaptureFixture[str], path: Path) -> None:
    with pytest.raises(UsageError, match="such as 50%"):
        PageSelection.parse(text)
    for command in (["generate", "--prompt", "x"], ["serve"]):
        assert main([*command, "--model", str(path), f"--select-pages={text}"]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    half = PageSelection.parse("50%")
    assert [half.read_pages(pages * 32) for pages in (1, 8, 9, 16, 18, 100)] == [0, 0, 8, 8, 9, 50]
    assert [PageSelection.parse("40").read_pages(tokens) for tokens in (40 * 32, 40 * 32 + 1)] == [0, 40]


def test_where_nothing_can_be_selected_it_is_refused(
    engines: _Engines, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    windowed = replace(engines.config, windows=(64,) * engines.config.layers)
    with pytest.raises(UsageError, match="every layer of this model has a window"):
        selecting_pool(windowed, 4, FEW)
    with pytest.raises(UsageError, match="without --stages"), open_model(path, LoadOptions(stages=2, selection=FEW)):
        pass
    with (
        pytest.raises(UsageError, match="for the device cpu"),
        open_model(path, LoadOptions(device="torch:cpu", selection=FEW)),
    ):
        pass
    monkeypatch.setenv("KVENGINE_KERNEL", "reference")
    with pytest.raises(UsageError, match="needs compiled kernels"):
        selecting_pool(engines.config, 4, FEW)
