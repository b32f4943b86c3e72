"""A compute whose steps count only if the model's file was the same before and after them.

Owns the order: computed, then checked, then used. Everything that is answered or stored comes out of a step, so neither
can hold what a changed file gave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstore_engine.batching.compute import Compute
from kvstore_engine.executors.logits import StepLogits
from kvstore_engine.graph import SequenceSlice
from kvstore_engine.graph.step import StepLimits
from kvstore_engine.pool import BlockPool
from kvstore_engine.worker.failure import StepFailed


class VerifiedCompute:
    """`compute`, with `check` called after each step, as `FileWatch.check`: what it raises ends the step, and where it
    returns False the step is computed again."""

    def __init__(self, compute: Compute, check: Callable[[], bool]) -> None:
        self._compute, self._check = compute, check

    @property
    def limits(self) -> StepLimits:
        return self._compute.limits

    @property
    def pool(self) -> BlockPool:
        return self._compute.pool

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
