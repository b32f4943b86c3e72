"""Steps computed in the scheduler's own process, by an executor that cannot be in another one.

A device's memory belongs to the process that got it, and the scheduler copies K and V in and out of it. A step that
fails costs the answers in it and no other; one that hangs, and a device that has failed for good, end the process,
which is started again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore_engine.errors import OperationError
from kvstore_engine.executors import StepExecutor
from kvstore_engine.executors.logits import StepLogits
from kvstore_engine.graph import SequenceSlice
from kvstore_engine.server.hang_watch import HangWatch
from kvstore_engine.worker import StepFailed

_WARM_UP_TOKENS = 64


class InProcess:
    """The engine's `Compute` over `executor`; both arguments are the caller's to close."""

    def __init__(self, executor: StepExecutor, watch: HangWatch) -> None:
        self._executor, self._watch = executor, watch
        self.limits, self.pool = executor.limits, executor.pool

    def step(self, slices: Sequence[SequenceSlice], whole: Sequence[int] | None = None, /) -> StepLogits:
        """As `StepExecutor.step`; a step that fails is StepFailed. OperationError: no other will do better."""
        try:
            with self._watch.watching(slices):
                return self._executor.step(slices, whole)
        except OperationError:
            raise
        except RuntimeError as error:
            raise StepFailed(f"the step failed: {error}", tuple(range(len(slices)))) from error

    def warm_up(self) -> None:
        """Compute a short prompt and one token after it: what has to be compiled is, and what cannot run says so before
        anything is served. OperationError.
        """
        pool = self.pool
        count = min(_WARM_UP_TOKENS, self.limits.max_tokens, self.limits.max_context - 1)
        blocks = pool.allocate(-(-(count + 1) // pool.block_tokens))
        try:
            for start, tokens in ((0, count), (count, 1)):
                self.step([SequenceSlice(np.zeros(tokens, np.int32), start, np.array(blocks, np.int32))])
        except StepFailed as error:
            raise OperationError(f"nothing can be computed here: {error}") from error
        finally:
            pool.free(blocks)
