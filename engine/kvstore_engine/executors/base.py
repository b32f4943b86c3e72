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
    """One implementation's executor, of a model of `config`. `threads`: of the processor; may be set between steps."""

    config: ModelConfig
    pool: BlockPool
    limits: StepLimits
    threads: int

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

    @abstractmethod
    def close(self) -> None:
        """Free the executor's reserved memory; model and pool stay open. A later `forward` raises RuntimeError."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
