"""The parts of the worker that need no process: packets, mailbox, shared memory."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_engine.executors import PoolSetup, StepSizes
from kvstore_engine.gguf import FileChanged
from kvstore_engine.graph.step import SequenceSlice, StepLimits
from kvstore_engine.worker import RemoteExecutor, StepFailed, remote
from kvstore_engine.worker.mailbox import Mailbox
from kvstore_engine.worker.memory import SharedMemory, attach
from kvstore_engine.worker.packets import MAX_PACKET_BYTES, EngineWorkerSetup, Order, Reply, Status
from kvstore_engine.worker.patience import StepPatience

_LIMITS = StepLimits(10, 64, 16, 32, 4, 96)


def _ints(values: list[int]) -> npt.NDArray[np.int32]:
    return np.array(values, np.int32)


def _pair() -> tuple[Mailbox, Mailbox]:
    """The parent's and the child's view of one memory."""
    memory = SharedMemory("test", touched=False)
    parent = Mailbox(_LIMITS, memory.allocate)
    child = Mailbox(_LIMITS, partial(attach, memory.descriptor))
    memory.close()
    return parent, child


_slices = st.lists(
    st.builds(
        SequenceSlice,
        tokens=st.lists(st.integers(0, 9), min_size=1, max_size=8).map(_ints),
        start=st.integers(0, 1 << 20),
        block_table=st.lists(st.integers(0, 99), max_size=9).map(_ints),
        outputs=st.sampled_from(["none", "last", "all"]),
    ),
    min_size=1,
    max_size=4,
)


@given(_slices)
def test_the_child_reads_what_the_parent_wrote(slices: list[SequenceSlice]) -> None:
    parent, child = _pair()
    parent.write(slices)
    for wrote, read in zip(slices, child.read(len(slices)), strict=True):
        assert (read.start, read.outputs) == (wrote.start, wrote.outputs)
        assert read.tokens.tolist() == wrote.tokens.tolist()
        assert read.block_table.tolist() == wrote.block_table.tolist()[:6]


def test_what_does_not_fit_is_refused_before_anything_is_written() -> None:
    parent, _ = _pair()
    piece = SequenceSlice(_ints([1] * 33), 0, _ints([0]))
    with pytest.raises(ValueError, match="at most 32 tokens"):
        parent.write([piece])
    with pytest.raises(ValueError, match="1 to 4 sequences"):
        parent.write([SequenceSlice(_ints([1]), 0, _ints([0]))] * 5)
    with pytest.raises(ValueError, match="1 to 4 sequences"):
        parent.write([])


def test_logits_stay_until_the_step_after_the_next() -> None:
    parent, child = _pair()
    child.logits(1)[:2] = 1.0
    first = parent.logits(1, 2)
    child.logits(2)[:2] = 2.0
    assert (first == 1.0).all()
    child.logits(3)[:2] = 3.0
    assert (first == 3.0).all()


def test_shared_memory_cannot_shrink_under_a_mapping() -> None:
    memory = SharedMemory("test", touched=True)
    assert isinstance(memory.allocate(4096), mmap.mmap)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.descriptor, 0)
    memory.close()
    memory.close()  # twice is once


def test_packets_survive_the_way() -> None:
    order = Order(7, 3, 2)
    assert Order.decode(order.encode()) == order
    reply = Reply(7, Status.FAILED, 0, 123, "naïve")
    assert Reply.decode(reply.encode()) == reply
    assert len(Reply(1, Status.USAGE, message="x" * 100_000).encode()) <= MAX_PACKET_BYTES


def test_the_setup_survives_the_way() -> None:
    setup = EngineWorkerSetup("/m.gguf", PoolSetup(4, 16, "f16"), StepSizes(2, 64, 4, 256))
    assert EngineWorkerSetup.decode(setup.encode()) == setup


class _Worker:
    """A worker that says what a script has for each order, and has no process."""

    pid = 1

    def __init__(self, *replies: Status) -> None:
        self._replies, self.is_ended = list(replies), False

    def order(self, order: Order, timeout_s: float) -> Reply:
        return Reply(order.step, self._replies.pop(0), 1, message="ggml says no")

    def receive(self, timeout_s: float) -> Reply:
        return Reply(0, self._replies.pop(0))

    def end(self) -> None:
        self.is_ended = True


def _executor(worker: _Worker, *, starts: Callable[[], None] = lambda: None) -> RemoteExecutor:
    made = object.__new__(RemoteExecutor)
    made._worker, made._mailbox = worker, _pair()[0]  # type: ignore[assignment]  # it has what is asked of it
    made._step, made._patience, made.threads = 0, StepPatience(), 1
    made._start = starts  # type: ignore[method-assign]
    return made


class _Watch:
    """The watch of a file that is touched, or changed, when a script says so."""

    def __init__(self, *answers: bool | FileChanged) -> None:
        self._answers = list(answers)

    def check(self) -> bool:
        answer = self._answers.pop(0)
        if isinstance(answer, FileChanged):
            raise answer
        return answer


def _starting(watch: _Watch, monkeypatch: pytest.MonkeyPatch) -> tuple[RemoteExecutor, list[_Worker]]:
    """An executor that has served, and the workers that it starts."""
    workers: list[_Worker] = []

    def worker(*_: object) -> _Worker:
        workers.append(_Worker(Status.DONE))
        return workers[-1]

    monkeypatch.setattr(remote, "EngineWorkerProcess", worker)
    monkeypatch.setattr(remote.time, "sleep", lambda seconds: None)
    made = object.__new__(RemoteExecutor)
    made._watch, made._on_notice = watch, lambda notice: None  # type: ignore[assignment]  # as above
    made._descriptors, made._setup = lambda: (0, 0, 0), None  # type: ignore[assignment,method-assign]
    made.deaths, made._has_served, made._worker = 0, True, None
    return made, workers


def test_a_worker_that_loaded_a_file_while_it_was_touched_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    executor, workers = _starting(_Watch(True, False, True, True), monkeypatch)
    executor._start()
    assert [worker.is_ended for worker in workers] == [True, False]


@pytest.mark.parametrize("before", [True, False])
def test_a_worker_is_not_used_with_a_file_that_was_changed(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = FileChanged("it was changed")
    executor, workers = _starting(_Watch(changed) if before else _Watch(True, changed), monkeypatch)
    with pytest.raises(FileChanged):
        executor._start()
    assert len(workers) == (0 if before else 1)


def test_a_step_that_is_taken_apart_blames_the_slice_that_fails_and_not_the_first() -> None:
    pieces = [SequenceSlice(_ints([1]), 0, _ints([0]))] * 3
    with pytest.raises(StepFailed, match="ggml says no") as caught:
        _executor(_Worker(Status.DONE, Status.FAILED, Status.DONE))._take_apart(pieces)
    assert caught.value.slices == (1,)


def test_a_worker_that_speaks_out_of_turn_is_ended_before_another_is_started() -> None:
    worker = _Worker(Status.DONE)
    ended_by_then: list[bool] = []
    _executor(worker, starts=lambda: ended_by_then.append(worker.is_ended)).revive()
    assert ended_by_then == [True]
