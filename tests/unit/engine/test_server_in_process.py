"""Steps in the scheduler's own process: what a failure and a hang cost, and the steps before anything is served."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvstore_engine.batching.engine import BatchEngine
from kvstore_engine.errors import OperationError
from kvstore_engine.graph import SequenceSlice
from kvstore_engine.server.computing import HangWatch, InProcess
from kvstore_engine.worker.patience import StepPatience
from tests.reference.batch_runs import Outcome, check, request, run
from tests.reference.twin_compute import TwinCompute, TwinTokenizer, answer_alone, twin_pool

_HANGS = """
import threading
from kvstore_engine.server.computing import HangWatch

class Impatient:
    def limit_s(self, slices):
        return 0.01

with HangWatch(Impatient()).watching([]):
    threading.Event().wait(60)
"""
_Steps = Callable[[Sequence[SequenceSlice]], None]


@pytest.fixture
def computing() -> Iterator[Callable[..., tuple[TwinCompute, InProcess]]]:
    """Makes a computing process, whose steps call `on_step` first."""
    with closing(HangWatch(StepPatience())) as watch:

        def made(on_step: _Steps, **limits: Any) -> tuple[TwinCompute, InProcess]:
            twin = TwinCompute(twin_pool(64), on_step=on_step, **limits)
            return twin, InProcess(twin, watch)  # type: ignore[arg-type]  # of an executor, what is used here

        yield made


def _failing(error: Exception) -> _Steps:
    def fail(slices: Sequence[SequenceSlice]) -> None:
        raise error

    return fail


def test_a_step_that_fails_costs_its_answers_and_no_other(computing: Any) -> None:
    failures = [RuntimeError("out of memory")]

    def fail_once(slices: Sequence[SequenceSlice]) -> None:
        if failures:
            raise failures.pop()

    _, compute = computing(fail_once)
    engine = BatchEngine(compute, TwinTokenizer())
    engine.add(request("first", range(20), 5))
    outcome = Outcome()
    outcome.take(engine.step())
    assert outcome.finished["first", 0].reason == "failed"
    assert outcome.finished["first", 0].message == "the step failed: out of memory"
    engine.add(request("second", range(20), 5))
    run(engine, outcome)
    assert outcome.tokens["second", 0] == answer_alone(range(20), 5)
    engine.close()
    check(engine)


def test_a_device_that_has_failed_for_good_ends_the_process(computing: Any) -> None:
    twin, compute = computing(_failing(OperationError("cuda:0 computes nothing more in this process")))
    with pytest.raises(OperationError, match=r"^cuda:0 computes nothing more"):
        compute.warm_up()
    assert twin.pool.free_blocks == 64
    engine = BatchEngine(compute, TwinTokenizer())
    engine.add(request("first", range(20), 5))
    with pytest.raises(OperationError, match=r"^cuda:0 computes nothing more"):
        engine.step()


@pytest.mark.parametrize(
    ("limits", "steps"),
    [({}, [(0, 64), (64, 1)]), ({"max_tokens": 8}, [(0, 8), (8, 1)]), ({"max_context": 2}, [(0, 1), (1, 1)])],
)
def test_the_first_steps_are_a_prompt_and_a_token_within_the_limits(
    computing: Any, limits: dict[str, int], steps: list[tuple[int, int]]
) -> None:
    seen: list[tuple[int, int]] = []
    twin, compute = computing(lambda slices: seen.append((slices[0].start, len(slices[0].tokens))), **limits)
    compute.warm_up()
    assert seen == steps and twin.pool.free_blocks == 64


def test_what_cannot_compute_its_first_step_says_so(computing: Any) -> None:
    twin, compute = computing(_failing(RuntimeError("no kernel image is available")))
    with pytest.raises(OperationError, match="nothing can be computed here: the step failed: no kernel image"):
        compute.warm_up()
    assert twin.pool.free_blocks == 64


@dataclass
class _Patience:
    limit: float
    took_s: list[float] = field(default_factory=list)

    def limit_s(self, slices: Sequence[SequenceSlice]) -> float:
        return self.limit

    def took(self, slices: Sequence[SequenceSlice], seconds: float) -> None:
        self.took_s.append(seconds)


def test_a_step_beyond_its_limit_hangs_and_one_within_it_is_learnt_from() -> None:
    patience, ended = _Patience(3600.0), threading.Event()
    with closing(HangWatch(patience, ended.set)) as watch:  # type: ignore[arg-type]
        with watch.watching([]):
            pass
        with pytest.raises(RuntimeError), watch.watching([]):
            raise RuntimeError("of a failed step nothing is learnt")
        assert len(patience.took_s) == 1 and not ended.is_set()
        patience.limit = 0.01
        with watch.watching([]):
            assert ended.wait(60)


def test_a_process_whose_step_hangs_ends() -> None:
    ended = subprocess.run([sys.executable, "-c", _HANGS], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 75, ended.stderr
    assert "a step hangs" in ended.stderr
