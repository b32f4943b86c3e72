"""The side thread takes part in large copies, and never works for a call that has ended."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator

import pytest

from kvstore_cuda import side_thread
from kvstore_cuda.side_thread import NAME, SHARED_BYTES, together

PATIENCE_S = 20.0


@pytest.fixture(autouse=True)
def two_processors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test has a side thread of its own, also on a machine with one processor."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    side_thread._queue.cache_clear()
    yield
    side_thread._queue.cache_clear()


def test_both_threads_work_and_the_call_ends_behind_both() -> None:
    both, names = threading.Barrier(2), deque[str]()

    def work() -> None:
        both.wait(PATIENCE_S)
        names.append(threading.current_thread().name)

    together(work, SHARED_BYTES)
    assert sorted(names) == sorted([NAME, threading.current_thread().name])


def test_a_caller_that_is_ready_first_waits_for_no_busy_thread() -> None:
    begun, may_end, calls = threading.Event(), threading.Event(), deque[str]()

    def long() -> None:
        if threading.current_thread().name == NAME:
            begun.set()
            assert may_end.wait(PATIENCE_S)
        else:
            assert begun.wait(PATIENCE_S)

    other = threading.Thread(target=together, args=(long, SHARED_BYTES))
    other.start()
    assert begun.wait(PATIENCE_S)
    together(lambda: calls.append(threading.current_thread().name), SHARED_BYTES)
    may_end.set()
    other.join(PATIENCE_S)
    both = threading.Barrier(2)
    together(lambda: both.wait(PATIENCE_S) and None, SHARED_BYTES)  # the thread is done with what came before
    assert list(calls) == [threading.current_thread().name]


@pytest.mark.parametrize("breaks_in", [NAME, "MainThread"])
def test_an_error_of_either_thread_is_raised(breaks_in: str) -> None:
    both = threading.Barrier(2)

    def work() -> None:
        both.wait(PATIENCE_S)
        if threading.current_thread().name == breaks_in:
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        together(work, SHARED_BYTES)


def test_few_bytes_and_a_process_with_one_processor_are_the_callers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[str]()
    together(lambda: calls.append(threading.current_thread().name), SHARED_BYTES - 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    together(lambda: calls.append(threading.current_thread().name), SHARED_BYTES)
    assert calls == [threading.current_thread().name] * 2
    assert side_thread._queue(os.getpid()) is None


def test_a_forked_child_has_a_side_thread_of_its_own() -> None:
    both = threading.Barrier(2)
    together(lambda: both.wait(PATIENCE_S) and None, SHARED_BYTES)
    if (child := os.fork()) == 0:
        in_child, names = threading.Barrier(2), deque[str]()

        def work() -> None:
            in_child.wait(PATIENCE_S)
            names.append(threading.current_thread().name)

        together(work, SHARED_BYTES)
        os._exit(0 if NAME in names else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
