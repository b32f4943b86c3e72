"""The contract of an executor: it computes forward steps of one model over one block pool, in this process.

The caller guarantees that the K/V before each slice is in the pool, and that it uses the executor from one thread. The
implementation MUST refuse, before it touches memory, a step that breaks a limit (`graph.plan_step`); MUST have written
the slices' K/V to the pool when `forward` returns, and nothing else; and MUST compute a repeated step in an equal way
after a `forward` that raised. Logits of a token MAY depend on the other tokens of a step by rounding alone.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

from kvstore_engine.executors.logits import FloatArray, HostLogits, StepLogits
from kvstore_engine.graph import SequenceSlice
from kvstore_engine.graph.step import StepLimits
from kvstore_engine.model.config import ModelConfig
from kvstore_engine.pool import BlockPool


class StepExecutor(ABC):
    """An object that computes forward steps of a model on one device, over a pool of K/V blocks. `threads` is the
    number of processor threads; it may be changed between steps.
    """

    config: ModelConfig
    pool: BlockPool
    limits: StepLimits
    threads: int

    @abstractmethod
    def forward(self, slices: Sequence[SequenceSlice], out: FloatArray | None = None) -> FloatArray:
        """Compute one step of `slices` and write its K and V to the pool. Return a copy of the logits that the slices
        ask for, float32 [outputs, vocabulary]; `out` is the array to write them to, if given. Raises ValueError if a
        limit is exceeded, RuntimeError if this step fails, OperationError if no later step can succeed.
        """

    def step(self, slices: Sequence[SequenceSlice], whole: Sequence[int] | None = None) -> StepLogits:
        """Compute one step of `slices` as `forward` does, but return the logits without copying them to another device.
        `whole` lists the numbers of the rows that will be read completely; None means all rows.
        """
        return HostLogits(self.forward(slices))

    @abstractmethod
    def close(self) -> None:
        """Free the executor's memory. The model and the K/V pool stay open; a later `forward` raises RuntimeError."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
