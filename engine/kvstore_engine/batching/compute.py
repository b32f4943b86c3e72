"""The contract of what computes a step: the executor in this process, or one in a worker process.

Between two calls only the engine touches the pool's planes.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from kvstore_engine.executors.likeliest import Floats, Likeliest
from kvstore_engine.graph import SequenceSlice
from kvstore_engine.graph.step import StepLimits


class Compute(Protocol):
    """The caller guarantees that the K/V before each slice is in the pool, and that no two slices write to the same
    place. The implementation MUST have written the slices' K/V to the pool when `forward` returns. After `forward` has
    raised, the engine MAY call it again with the same slices: nothing of the failed call counts.
    """

    @property
    def limits(self) -> StepLimits: ...

    def forward(self, slices: Sequence[SequenceSlice], /) -> Floats:
        """Logits [outputs, vocabulary] of the wanted tokens, in the order of `slices`, for use before the next call.

        StepFailed names slices that cannot be computed; the others can be tried again.
        """
        ...


@runtime_checkable
class FindsLikeliest(Protocol):
    """A `Compute` that can choose where the logits are: rows of a vocabulary's size need not be brought to the host."""

    def likeliest(self, slices: Sequence[SequenceSlice], /) -> Likeliest:
        """Compute the step as `forward` does; of its logits the greatest."""
        ...
