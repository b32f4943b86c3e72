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
    """One range of layers: its executor, its pool, and the thread that does all of its work."""

    def __init__(self, executor: Executor, number: int) -> None:
        self.executor, self.number = executor, number
        self.layers, self.pool = executor.layers, executor.pool  # the stage's share of the pipeline's pool
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"kvengine-stage-{number}")

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Do `work` in the stage's thread, after all work submitted before."""
        return self._thread.submit(work)

    def close(self) -> None:
        """Wait for the submitted work, and free the executor."""
        self._thread.shutdown(wait=True)
        self.executor.close()


class Pipeline:
    """The stages of one model. `pool` has all layers; the pools of the executors are parts of it."""

    def __init__(self, executors: Sequence[Executor], pool: BlockPool) -> None:
        """Make a pipeline. Raises ValueError unless the executors' layers follow one another, from the first to the
        last.
        """
        bounds = [(each.layers.start, each.layers.stop) for each in executors]
        starts, ends = [start for start, _ in bounds], [end for _, end in bounds]
        if not executors or [*starts, executors[0].config.layers] != [0, *ends]:
            raise ValueError(f"the layers of the stages do not follow one another: {bounds}")
        self.pool, self.config, self.limits = pool, executors[0].config, executors[0].limits
        self.stages = tuple(Stage(each, number) for number, each in enumerate(executors))

    def forward(self, slices: Sequence[SequenceSlice], out: FloatArray | None = None) -> FloatArray:
        """Compute one step, as `Executor.forward` does, with its prompts in pieces, so that all stages work at once."""
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
        """Compute one step, as `StepExecutor.step` does."""
        return HostLogits(self.forward(slices))

    def submit(self, slices: Sequence[SequenceSlice]) -> Future[FloatArray]:
        """Send `slices` through the stages, behind earlier ones. Return a future of the logits."""
        done: Future[FloatArray] = Future()
        self._enter(0, slices, None, done)
        return done

    def close(self) -> None:
        """Wait for work under way and free the executors; model and pool stay open."""
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
    """Cut a step into pieces of `rows` rows, each of one sequence, that follow one another through the stages.

    The last piece is the remainder: of each of `slices` `rows` to 2 * `rows` - 1 rows, or all of a shorter one and of
    one whose logits are all wanted. No piece but the last has outputs. The pieces compute the bits of the step: ggml
    multiplies the last rows of a product, and a single row, with other kernels (`graph.plan`); so whole storage blocks
    are taken from the head of each prompt, and all rows whose logits are wanted remain in one piece, which has the
    step's last rows and as many outputs.
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
    """Return the layers of each stage, as even as they can be. Raises ValueError for more stages than layers."""
    if not 1 <= stages <= layers:
        raise ValueError(f"a model of {layers} layers has 1 to {layers} stages, not {stages}")
    return [range(*pair) for pair in pairwise(layers * number // stages for number in range(stages + 1))]


def open_pipeline(model: Model, pool: BlockPool, stages: int, sizes: StepSizes | None = None) -> Pipeline:
    """A pipeline of `stages` even stages with `sizes.threads` threads each, one by default; otherwise as `Executor`."""
    sizes = sizes or StepSizes(threads=1)
    with ExitStack() as stack:
        executors = [
            stack.enter_context(Executor(model, pool.of_layers(layers), sizes, layers=layers))
            for layers in stage_layers(model.config.layers, stages)
        ]
        pipeline = Pipeline(executors, pool)
        stack.pop_all()
        return pipeline
