"""ggml in a process of its own: the same numbers, and a death costs nothing but time."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvstore_engine.errors import UsageError
from kvstore_engine.executor import Executor
from kvstore_engine.executors import StepSizes
from kvstore_engine.gguf import FileWatch, GGUFFile
from kvstore_engine.graph import SequenceSlice
from kvstore_engine.model.config import ModelConfig
from kvstore_engine.model.weights import load_model
from kvstore_engine.pool import BlockPool
from kvstore_engine.worker import EngineWorkerNotice, RemoteExecutor, StepFailed
from kvstore_engine.worker.memory import SharedMemory
from kvstore_engine.worker.patience import StepPatience
from tests.reference.make_gguf import TinyModel, write_model
from tests.reference.skips import skip_without_ggml
from tests.reference.tiny_llama import write_tiny_llama

_BLOCKS, _CONTEXT = 64, 256
_PATIENCE_S = 60.0


@dataclass
class _Setting:
    path: Path
    pool: BlockPool
    executor: RemoteExecutor
    notices: list[EngineWorkerNotice] = field(default_factory=list)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    skip_without_ggml()
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf")


class _Impatient(StepPatience):
    def limit_s(self, slices: Sequence[SequenceSlice]) -> float:
        return 0.2


def _open(model: Path) -> _Setting:
    file = GGUFFile.open(model)
    config = ModelConfig.from_gguf(file, _CONTEXT)
    memory = SharedMemory("test-pool", touched=True)
    pool = BlockPool(config, _BLOCKS, memory=memory.allocate)
    executor = RemoteExecutor(FileWatch(file), config, pool, memory, StepSizes(1, 64, 4, _CONTEXT))
    return _Setting(model, pool, executor)


@pytest.fixture(scope="module")
def shared(model: Path) -> Iterator[_Setting]:
    opened = _open(model)
    with contextlib.closing(opened.executor):
        yield opened


@pytest.fixture
def setting(shared: _Setting) -> _Setting:
    """Return a new setting: nothing in the pool, no worker dead."""
    shared.pool.planes.fill(0)
    shared.notices.clear()
    shared.executor.deaths = 0
    shared.executor._patience = StepPatience(_PATIENCE_S)
    shared.executor._on_notice = shared.notices.append
    return shared


def _prompt(count: int, seed: int = 0) -> npt.NDArray[np.int32]:
    return np.random.default_rng(seed).integers(3, 250, count).astype(np.int32)


def _piece(tokens: npt.NDArray[np.int32], start: int, first_block: int) -> SequenceSlice:
    return SequenceSlice(tokens, start, np.arange(first_block, first_block + 8, dtype=np.int32))


def _kill(executor: RemoteExecutor) -> None:
    """Returns when the worker is a zombie: its socket is closed by then."""
    handle = os.pidfd_open(executor.pid)
    os.kill(executor.pid, signal.SIGKILL)
    select.select([handle], [], [], _PATIENCE_S)
    os.close(handle)


def _answer(forward: Callable[[list[SequenceSlice]], npt.NDArray[np.float32]], steps: int = 12) -> list[list[int]]:
    """Two sequences, greedily; tokens for each."""
    prompts = [_prompt(33, 1), _prompt(20, 2)]
    logits = forward([_piece(prompts[0], 0, 0), _piece(prompts[1], 0, 8)])
    chosen: list[list[int]] = [[], []]
    for step in range(steps):
        for row in range(2):
            chosen[row].append(int(logits[row].argmax()))
        pieces = [_piece(np.array(chosen[row][-1:], np.int32), len(prompts[row]) + step, 8 * row) for row in range(2)]
        logits = forward(pieces)
    return chosen


def test_the_worker_computes_the_same_bits(setting: _Setting) -> None:
    with load_model(GGUFFile.open(setting.path)) as loaded:
        own = BlockPool(loaded.config, _BLOCKS)
        with Executor(
            loaded, own, StepSizes(threads=1, max_tokens_per_step=64, max_sequences=4, max_context=_CONTEXT)
        ) as executor:
            slices = [_piece(_prompt(40), 0, 0), _piece(_prompt(7, 3), 0, 8)]
            np.testing.assert_array_equal(setting.executor.forward(slices), executor.forward(slices))
            np.testing.assert_array_equal(setting.pool.planes, own.planes)
            assert setting.executor.limits == executor.limits


def test_an_answer_goes_on_where_the_worker_was_killed(setting: _Setting) -> None:
    undisturbed = _answer(setting.executor.forward)
    setting.pool.planes.fill(0)
    count = 0

    def forward(slices: list[SequenceSlice]) -> npt.NDArray[np.float32]:
        nonlocal count
        count += 1
        if count in (3, 8):
            _kill(setting.executor)
        return setting.executor.forward(slices)

    assert _answer(forward) == undisturbed
    assert setting.executor.deaths == 2
    states = [notice.state for notice in setting.notices]
    assert states == ["dead", "starting", "ready"] * 2
    assert "SIGKILL" in setting.notices[0].reason


def test_a_worker_killed_within_a_step(setting: _Setting) -> None:
    """Stopped, so that the order is surely out when it dies."""
    wanted = setting.executor.forward([_piece(_prompt(30), 0, 0)]).copy()
    pid = setting.executor.pid
    os.kill(pid, signal.SIGSTOP)
    killer = subprocess.Popen([sys.executable, "-c", f"import os, time; time.sleep(0.3); os.kill({pid}, 9)"])
    np.testing.assert_array_equal(setting.executor.forward([_piece(_prompt(30), 0, 0)]), wanted)
    assert killer.wait() == 0
    assert setting.executor.deaths == 1


def test_an_idle_worker_that_dies_is_noticed_and_replaced(setting: _Setting) -> None:
    first = setting.executor.pid
    assert not select.select([setting.executor], [], [], 0)[0]
    _kill(setting.executor)
    assert select.select([setting.executor], [], [], _PATIENCE_S)[0]
    setting.executor.revive()
    assert setting.executor.pid != first
    assert setting.executor.forward([_piece(_prompt(3), 0, 0)]).shape[0] == 1


def test_a_step_that_kills_every_worker_names_its_sequence(setting: _Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second sequence's first token is the poison: a worker that is ordered to compute it is killed."""
    poison = np.array([77], np.int32)
    order = setting.executor._compute

    def compute(slices: Sequence[SequenceSlice]) -> npt.NDArray[np.float32]:
        if any(77 in piece.tokens for piece in setting.executor._mailbox.read(len(slices))):
            _kill(setting.executor)
        return order(slices)

    monkeypatch.setattr(setting.executor, "_compute", compute)
    good = [_piece(_prompt(5), 0, 0), _piece(_prompt(6), 0, 16)]
    with pytest.raises(StepFailed, match="SIGKILL") as caught:
        setting.executor.forward([good[0], _piece(poison, 0, 8), good[1]])
    assert caught.value.slices == (1,)
    assert setting.executor.forward(good).shape[0] == 2


def test_a_wrong_step_is_the_callers_mistake_and_kills_no_worker(setting: _Setting) -> None:
    with pytest.raises(ValueError, match="block ids"):
        setting.executor.forward([SequenceSlice(_prompt(3), 0, np.array([_BLOCKS], np.int32))])
    with pytest.raises(ValueError, match="token ids"):
        setting.executor.forward([_piece(np.array([-1], np.int32), 0, 0)])
    assert setting.executor.deaths == 0


def test_a_worker_that_hangs_is_killed(setting: _Setting) -> None:
    executor = setting.executor
    os.kill(executor.pid, signal.SIGSTOP)
    executor._patience = _Impatient()

    def patient(notice: EngineWorkerNotice) -> None:
        executor._patience = StepPatience(_PATIENCE_S)

    executor._on_notice = patient
    assert executor.forward([_piece(_prompt(3), 0, 0)]).shape[0] == 1
    assert executor.deaths == 1


def test_a_model_that_cannot_be_loaded_is_said_by_the_worker(model: Path, tmp_path: Path) -> None:
    with GGUFFile.open(model) as file:
        config = ModelConfig.from_gguf(file, _CONTEXT)
    other = write_model(tmp_path / "other.gguf", TinyModel(metadata={"general.architecture": "mamba"}))
    memory = SharedMemory("test-pool", touched=False)
    pool = BlockPool(config, _BLOCKS, memory=memory.allocate)
    with GGUFFile.open(other) as file, pytest.raises(UsageError, match="mamba"):
        RemoteExecutor(FileWatch(file), config, pool, memory, StepSizes())


_PARENT = """
import sys, time
from pathlib import Path
from tests.faults.test_engine_worker import _open
opened = _open(Path(sys.argv[1]))
print(opened.executor.pid, flush=True)
time.sleep(3600)
"""


@pytest.mark.slow
def test_the_worker_ends_with_its_parent(model: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", _PARENT, model], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = os.pidfd_open(int(parent.stdout.readline()))
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.pidfd_send_signal(worker, number)  # are the parent's to handle
        assert not select.select([worker], [], [], 0.2)[0]
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    assert select.select([worker], [], [], _PATIENCE_S)[0]
    os.close(worker)
