"""The contract of an executor: it computes forward steps of one model over one block pool, in this process.

The caller guarantees that the K/V before each slice is in the pool, and that it uses the executor from one thread. The
implementation MUST refuse, before it touches memory, a step that breaks a limit (`graph.plan_step`); MUST have written
the slices' K/V to the pool when `forward` returns, and nothing else; and MUST compute a repeated step in an equal way
after a `forward` that raised. Logits of a token MAY depend on the other tokens of a step by rounding alone.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from kvstore_engine.executors.logits import FloatArray, HostLogits, StepLogits
from kvstore_engine.graph import SequenceSlice, chunk_plan
from kvstore_engine.graph.plan import BLOCK_TOKENS, CHUNK_TOKENS
from kvstore_engine.graph.step import StepLimits
from kvstore_engine.model.config import ModelConfig
from kvstore_engine.pool import BlockPool


class HasConfig(Protocol):
    """The interface of an executor's model for its callers."""

    @property
    def config(self) -> ModelConfig: ...


class StepExecutor(ABC):
    """The executor of one implementation."""

    pool: BlockPool
    limits: StepLimits

    @property
    @abstractmethod
    def model(self) -> HasConfig:
        """The model that it computes."""

    @property
    @abstractmethod
    def threads(self) -> int:
        """The number of the processor's compute threads; may be set between steps."""

    @threads.setter
    @abstractmethod
    def threads(self, count: int) -> None: ...

    @abstractmethod
    def forward(self, slices: Sequence[SequenceSlice], out: FloatArray | None = None) -> FloatArray:
        """Compute one step; its K and V are in the pool afterwards.

        Return the logits, float32 [outputs, vocabulary], of the wanted tokens in the order of `slices`: a copy, in the
        leading rows of `out` if that is given. Raises ValueError for a request that breaks a limit, RuntimeError if
        computing fails, OperationError if nothing can be computed any more in this process.
        """

    def step(self, slices: Sequence[SequenceSlice], whole: Sequence[int] | None = None) -> StepLogits:
        """Compute one step, as `forward` does, but leave the logits on the device that computed them. `whole`: the rows
        that are wanted whole in host memory; None: all.
        """
        return HostLogits(self.forward(slices))

    def prefill(
        self,
        tokens: npt.NDArray[np.int32],
        start: int,
        block_table: npt.NDArray[np.int32],
        *,
        block: int = BLOCK_TOKENS,
        chunk: int = CHUNK_TOKENS,
    ) -> FloatArray:
        """Compute `tokens`, the positions from `start` on, in the steps of `chunk_plan`.

        Return the last token's logits, float32 [vocabulary].
        """
        end = start + len(tokens)
        if not len(tokens):
            raise ValueError("a prefill needs at least one token: the last one's logits are the result")
        largest = max(block, self.limits.max_tokens // block * block)
        steps = chunk_plan(start, end, block=block, chunk=min(chunk, largest))
        for first, last in steps[:-1]:
            self.forward([SequenceSlice(tokens[first - start : last - start], first, block_table, "none")])
        tail, _ = steps[-1]
        logits: FloatArray = self.forward([SequenceSlice(tokens[tail - start :], tail, block_table)])[0]
        return logits

    @abstractmethod
    def close(self) -> None:
        """Free the executor's reserved memory; model and pool stay open. A later `forward` raises RuntimeError."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
