"""The contract for computing a step: by an executor in this process, or by one in a worker process.

Between two calls only the engine touches the pool's planes. With `VerifiedCompute`, a step counts only if the model's
file was unchanged before and after it. All answers and stored blocks come out of steps, so none can come from a changed
file.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from kvstore_engine.executors.logits import StepLogits
from kvstore_engine.graph import SequenceSlice
from kvstore_engine.graph.step import StepLimits
from kvstore_engine.pool import BlockPool
from kvstore_engine.worker.remote import StepFailed


class Compute(Protocol):
    """An object that computes steps of the model over a pool of K/V blocks. The caller guarantees that the K/V of all
    tokens before each slice are in the pool, and that no two slices write to one place. When `step` returns, the K/V of
    the slices MUST be in the pool. After `step` has raised, the engine MAY call it again with the same slices.
    """

    @property
    def limits(self) -> StepLimits: ...
    @property
    def pool(self) -> BlockPool: ...

    def step(self, slices: Sequence[SequenceSlice], whole: Sequence[int] | None = None, /) -> StepLogits:
        """Compute all `slices` and return the logits that they ask for, in the order of the slices; they are valid
        until the next call. `whole` lists the numbers of the rows of logits that will be read completely; None means
        all rows. Raises StepFailed, which names the slices that cannot be computed; the other slices can be tried
        again.
        """
        ...


class VerifiedCompute:
    """A `Compute` that calls another one, `compute`, and checks after each step that the model's file is unchanged.
    `check` (see `FileWatch.check`) raises if the file has changed, and returns False if the step must be computed
    again.
    """

    def __init__(self, compute: Compute, check: Callable[[], bool]) -> None:
        self._compute, self._check = compute, check
        self.limits, self.pool = compute.limits, compute.pool

    def step(self, slices: Sequence[SequenceSlice], whole: Sequence[int] | None = None, /) -> StepLogits:
        """Compute `slices` as `Compute.step` does and check the model's file afterwards. The step is computed again
        until the check accepts it. `whole` lists the rows of logits that will be read completely.
        """
        while True:
            try:
                logits = self._compute.step(slices, whole)
            except StepFailed:  # perhaps by weights that are no numbers any more
                if self._check():
                    raise
                continue
            if self._check():
                return logits
