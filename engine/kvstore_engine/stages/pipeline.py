"""Computes steps through stages, each of which has a range of the layers. Implements `batching.Compute`.

The module owns the stages' executors and their threads. A stage does one piece of work at a time, in the given order;
while it computes one piece of a step, the stages before it compute the following ones. It does not schedule or sample.
Invariants: the K and V of a stage's layers are written in its thread; the results equal one executor's.

Stages are threads of one process: ggml computes without the GIL, the weights are loaded once, and hidden states pass as
arrays. On machines of their own they would be processes; a stage's stored and loaded blocks do not depend on that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from itertools import pairwise
from typing import Self, TypeVar

import numpy as np

from kvstore_engine.executor import Executor
from kvstore_engine.executors.logits import FloatArray, HostLogits, StepLogits
from kvstore_engine.executors.sizes import StepSizes
from kvstore_engine.graph import SequenceSlice, plan_step
from kvstore_engine.graph.plan import BLOCK_TOKENS
from kvstore_engine.model.weights import Model
from kvstore_engine.pool import BlockPool

Result = TypeVar("Result")


class Stage:
    """A range of a model's layers that one thread computes: its executor, its part of the K/V pool, and the thread."""

    def __init__(self, executor: Executor, number: int) -> None:
        self.executor, self.number = executor, number
        self.layers, self.pool = executor.layers, executor.pool  # the stage's share of the pipeline's pool
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"kvengine-stage-{number}")

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Run `work` in the stage's thread after earlier work, and return a future of its result."""
        return self._thread.submit(work)

    def close(self) -> None:
        """Wait until the submitted work is done, and close the executor."""
        self._thread.shutdown(wait=True)
        self.executor.close()


class Pipeline:
    """A `Compute` that passes steps through stages, each of which computes a range of the model's layers. `pool` has
    all layers.
    """

    def __init__(self, executors: Sequence[Executor], pool: BlockPool) -> None:
        """Make the pipeline. Raises ValueError unless the executors' layers follow one another from the model's first
        to its last.
        """
        bounds = [(each.layers.start, each.layers.stop) for each in executors]
        starts, ends = [start for start, _ in bounds], [end for _, end in bounds]
        if not executors or [*starts, executors[0].config.layers] != [0, *ends]:
            raise ValueError(f"the layers of the stages do not follow one another: {bounds}")
        self.pool, self.config, self.limits = pool, executors[0].config, executors[0].limits
        self.stages = tuple(Stage(each, number) for number, each in enumerate(executors))

    def forward(self, slices: Sequence[SequenceSlice], out: FloatArray | None = None) -> FloatArray:
        """Compute one step of `slices` and return the logits, as `Executor.forward` does. Long prompts are cut into
        pieces, so that all stages work at once.
        """
        plan_step(slices, self.limits)
        pieces = [self.submit(each) for each in micro_batches(slices)]
        wait(pieces)  # all of them: none may still write to the pool when this one raises
        logits = np.concatenate([each.result() for each in pieces])
        if out is None:
            return logits
        rows = out[: len(logits)]
        np.copyto(rows, logits)
        return rows

    def step(self, slices: Sequence[SequenceSlice], whole: Sequence[int] | None = None) -> StepLogits:
        """Compute one step of `slices` and return its logits, as `StepExecutor.step` does."""
        return HostLogits(self.forward(slices))

    def submit(self, slices: Sequence[SequenceSlice]) -> Future[FloatArray]:
        """Send `slices` through all stages, behind earlier steps, and return a future of the logits."""
        done: Future[FloatArray] = Future()
        self._enter(0, slices, None, done)
        return done

    def close(self) -> None:
        """Wait until all steps are computed, and close the stages' executors. The model and the pool stay open."""
        for stage in self.stages:  # the first one first: it gives work to the next
            stage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _enter(
        self, at: int, slices: Sequence[SequenceSlice], hidden: FloatArray | None, done: Future[FloatArray]
    ) -> None:
        self.stages[at].submit(lambda: self._compute(at, slices, hidden, done))

    def _compute(
        self, at: int, slices: Sequence[SequenceSlice], hidden: FloatArray | None, done: Future[FloatArray]
    ) -> None:
        try:
            result = self.stages[at].executor.forward(slices, hidden=hidden)
            if at + 1 < len(self.stages):
                self._enter(at + 1, slices, result, done)
            else:
                done.set_result(result)
        except Exception as error:  # the caller's, who waits for it
            done.set_exception(error)


def micro_batches(slices: Sequence[SequenceSlice], rows: int = BLOCK_TOKENS) -> list[list[SequenceSlice]]:
    """Cut a step into pieces of `rows` rows (tokens) of one sequence each, which can follow one another through the
    stages of a pipeline. The last piece has all rows that give logits, and the rows that are left. Computing the pieces
    gives the same bits as computing the step.
    """
    pieces, rest = [], []
    for each in slices:
        end = 0 if each.outputs == "all" else max(0, len(each.tokens) // rows - 1) * rows
        for first in range(0, end, rows):
            tokens = each.tokens[first : first + rows]
            pieces.append([SequenceSlice(tokens, each.start + first, each.block_table, "none")])
        rest.append(SequenceSlice(each.tokens[end:], each.start + end, each.block_table, each.outputs))
    return [*pieces, rest]


def stage_layers(layers: int, stages: int) -> list[range]:
    """Return for each of `stages` stages the range of layers that it computes, as even as possible. Raises ValueError
    for more stages than layers.
    """
    if not 1 <= stages <= layers:
        raise ValueError(f"a model of {layers} layers has 1 to {layers} stages, not {stages}")
    return [range(*pair) for pair in pairwise(layers * number // stages for number in range(stages + 1))]


def open_pipeline(model: Model, pool: BlockPool, stages: int, sizes: StepSizes | None = None) -> Pipeline:
    """Return a pipeline that computes `model` over `pool` in `stages` stages with about equal numbers of layers. Each
    stage has `sizes.threads` threads, by default one.
    """
    sizes = sizes or StepSizes(threads=1)
    with ExitStack() as stack:
        executors = [
            stack.enter_context(Executor(model, pool.of_layers(layers), sizes, layers=layers))
            for layers in stage_layers(model.config.layers, stages)
        ]
        pipeline = Pipeline(executors, pool)
        stack.pop_all()
        return pipeline
