"""Computes steps with torch: on a GPU with the engine's kernels, or on the processor. It is torch's `StepExecutor`.

The module owns the step's memory and the recorded decode steps. It does not sample or schedule. Decode steps are padded
to a bucket (`recordings`), prompts are computed without padding. The last action of a step is to wait for it, so an
error of the device is raised by the step that met it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore_engine.executors.base import StepExecutor
from kvstore_engine.executors.logits import FloatArray
from kvstore_engine.executors.sizes import StepSizes
from kvstore_engine.graph import SequenceSlice, StepInputs, plan_step
from kvstore_engine.kernels.cuda.attention import PARTITION_KEYS
from kvstore_engine.pool import BlockPool
from kvstore_engine.torch_executor.attention import AttentionBackend
from kvstore_engine.torch_executor.cache import Arrivals
from kvstore_engine.torch_executor.library import check_answers, torch_library
from kvstore_engine.torch_executor.model import Decoder, TorchModel
from kvstore_engine.torch_executor.recordings import BUCKETS, DecodeSteps, Record, bucket_of, context_bound
from kvstore_engine.torch_executor.step_memory import DeviceLogits, InputMemory, LogitsMemory, StepOutputs


class TorchExecutor(StepExecutor):
    """An executor that computes steps of `model` with torch, over the K/V in `pool`, which `attention` reads and
    writes.
    """

    def __init__(
        self,
        model: TorchModel,
        pool: BlockPool,
        attention: AttentionBackend,
        sizes: StepSizes,
        record: Record | None = None,
        arrivals: Arrivals | None = None,
    ) -> None:
        """Make the executor. With `record`, decode steps are recorded and replayed. `arrivals` are the loads for which
        `attention` waits. Raises ValueError if the pool was made for another model or has 2^31 tokens or more.
        """
        config = model.config
        if (pool.layers, pool.row_elements) != (config.layers, config.kv_width):
            raise ValueError("the block pool was made for another model")
        if pool.blocks * pool.block_tokens >= 1 << 31:
            raise ValueError("a pool has fewer than 2^31 tokens")
        self._torch, self.model, self.config, self.pool = torch_library(), model, config, pool
        self.limits = sizes.limits(config.vocabulary, pool)
        self._attention, self._decoder = attention, Decoder(model, attention)
        self._inputs = InputMemory(self.limits, model.device, BUCKETS[-1])
        self.arrivals = arrivals or Arrivals(config.layers)
        self._logits = LogitsMemory(model.device)
        self._decodes = DecodeSteps(self._decode, record)
        self._is_closed = False
        self.threads = sizes.threads

    @property
    def threads(self) -> int:
        return self._threads

    @threads.setter
    def threads(self, count: int) -> None:
        self._threads = count
        self._torch.set_num_threads(count)

    def forward(self, slices: Sequence[SequenceSlice], out: FloatArray | None = None) -> FloatArray:
        logits = self.step(slices)
        result = np.empty((len(logits), self.limits.vocabulary), np.float32) if out is None else out[: len(logits)]
        if len(logits):
            np.copyto(result, logits.rows(range(len(logits))))
        return result

    def step(self, slices: Sequence[SequenceSlice], whole: Sequence[int] | None = None) -> DeviceLogits:
        if self._is_closed:
            raise RuntimeError("the executor is closed")
        inputs = plan_step(slices, self.limits)
        try:
            return self._computed(inputs, slices, whole)
        except RuntimeError:
            check_answers(self.model.device)
            raise

    def _computed(
        self, inputs: StepInputs, slices: Sequence[SequenceSlice], whole: Sequence[int] | None
    ) -> DeviceLogits:
        count, outputs, bucket = len(inputs.tokens), len(inputs.outputs), bucket_of(slices)
        longest = int(inputs.sequences[:, 2].max())
        with self._torch.inference_mode():
            self._inputs.fill(inputs, slices, max(bucket, count))
            variant = self._attention.begin(
                piece.block_table[: piece.start // self.limits.block_tokens] for piece in slices
            )
            if bucket:
                self.arrivals.wait_all()
                found: StepOutputs | None = self._decodes.run(bucket, context_bound(longest, PARTITION_KEYS), variant)
            else:
                rows = self._inputs.rows(count, longest)
                chosen = self._inputs.outputs(outputs) if outputs < count else None
                logits = self._decoder.step(self._inputs.tokens(count), rows, chosen, wants_logits=outputs > 0)
                found = StepOutputs.of(logits) if outputs else None
            return self._logits.received(found.first(outputs) if found is not None else None, whole)

    def close(self) -> None:
        self._decodes.drop()
        self._is_closed = True

    def _decode(self, rows: int, longest_context: int) -> StepOutputs:
        return StepOutputs.of(self._decoder.step(self._inputs.tokens(rows), self._inputs.rows(rows, longest_context)))
