"""The contract of what computes a step: the executor in this process, or one in a worker process.

Between two calls only the engine touches the pool's planes.
"""

from collections.abc import Sequence
from typing import Protocol

from kvstore_engine.executors.logits import StepLogits
from kvstore_engine.graph import SequenceSlice
from kvstore_engine.graph.step import StepLimits
from kvstore_engine.pool import BlockPool


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
        """The logits of the wanted tokens, in the order of `slices`, for use before the next call. `whole`: the rows of
        them that will be asked for whole; None: all.

        StepFailed names slices that cannot be computed; the others can be tried again.
        """
        ...
