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
    """The caller guarantees that the K/V before each slice is in the pool, and that no two slices write to the same
    place. The implementation MUST have written the slices' K/V to the pool when `step` returns. After `step` has
    raised, the engine MAY call it again with the same slices: nothing of the failed call counts.
    """

    @property
    def limits(self) -> StepLimits: ...
    @property
    def pool(self) -> BlockPool: ...

    def step(self, slices: Sequence[SequenceSlice], whole: Sequence[int] | None = None, /) -> StepLogits:
        """Return the logits of the wanted tokens, in the order of `slices`, for use before the next call. `whole`: the
        rows of them that will be asked for whole; None: all.

        StepFailed names slices that cannot be computed; the others can be tried again.
        """
        ...


class VerifiedCompute:
    """A `compute` with `check` called after each step, as `FileWatch.check`: an error that it raises ends the step, and
    if it returns False the step is computed again.
    """

    def __init__(self, compute: Compute, check: Callable[[], bool]) -> None:
        self._compute, self._check = compute, check
        self.limits, self.pool = compute.limits, compute.pool

    def step(self, slices: Sequence[SequenceSlice], whole: Sequence[int] | None = None, /) -> StepLogits:
        """Compute a step as `Compute.step` does, and check the file after it."""
        while True:
            try:
                logits = self._compute.step(slices, whole)
            except StepFailed:  # perhaps by weights that are no numbers any more
                if self._check():
                    raise
                continue
            if self._check():
                return logits
