"""Computes steps with torch: on a GPU with our kernels, or on the processor. torch's `StepExecutor`.

Owns the step's memory and the recorded decode steps. It never samples or schedules. Decode steps are padded to a bucket
(`buckets`), prompts are computed as they come. The last action of a step is to wait for it, so an error of the device
is raised by the step that met it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from kvstore_engine.executors.base import FloatArray, StepExecutor
from kvstore_engine.executors.likeliest import Likeliest
from kvstore_engine.executors.sizes import StepSizes
from kvstore_engine.graph import SequenceSlice, StepInputs, plan_step
from kvstore_engine.graph.step import StepLimits
from kvstore_engine.kernels.cuda.attention import PARTITION_KEYS
from kvstore_engine.pool import BlockPool
from kvstore_engine.torch_executor.arrivals import Arrivals
from kvstore_engine.torch_executor.attention import AttentionBackend, StepRows
from kvstore_engine.torch_executor.buckets import BUCKETS, bucket_of, context_bound
from kvstore_engine.torch_executor.decoder import Decoder
from kvstore_engine.torch_executor.inputs import InputMemory
from kvstore_engine.torch_executor.library import check_answers, torch_library
from kvstore_engine.torch_executor.recordings import DecodeSteps, Recorder
from kvstore_engine.torch_executor.weights import TorchModel

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Step:
    """What a step found, on the device. `likeliest`: int32 [outputs, 2], a token and the bits of its logit."""

    logits: Any
    likeliest: Any


class TorchExecutor(StepExecutor):
    """Computes forward steps of `model` over `pool`, whose planes `attention` reads and writes."""

    def __init__(
        self,
        model: TorchModel,
        pool: BlockPool,
        attention: AttentionBackend,
        sizes: StepSizes,
        recorder: Recorder | None = None,
        arrivals: Arrivals | None = None,
    ) -> None:
        """`arrivals`: into the pool, which `attention` waits for.

        ValueError if the pool was made for another model, or is too large for 32-bit slots."""
        config = model.config
        if (pool.layers, pool.row_elements) != (config.layers, config.kv_width):
            raise ValueError("the block pool was made for another model")
        if pool.blocks * pool.block_tokens >= 1 << 31:
            raise ValueError("a pool has fewer than 2^31 tokens")
        self._torch, self._model, self.pool = torch_library(), model, pool
        self.limits = StepLimits(
            config.vocabulary, pool.blocks, pool.block_tokens,
            sizes.max_tokens_per_step, sizes.max_sequences, sizes.max_context,
        )  # fmt: skip
        self._attention, self._decoder = attention, Decoder(model, attention)
        self._inputs = InputMemory(self.limits, model.device, BUCKETS[-1])
        self.arrivals = arrivals or Arrivals(config.layers)
        self._decodes = DecodeSteps(self._decode, recorder)
        shape = self.limits.max_tokens, 2
        self._chosen = self._torch.empty(shape, dtype=self._torch.int32, pin_memory=model.device.is_cuda)
        self._is_closed = False
        self.threads = sizes.threads

    @property
    def model(self) -> TorchModel:
        return self._model

    @property
    def threads(self) -> int:
        return self._threads

    @threads.setter
    def threads(self, count: int) -> None:
        self._threads = count
        self._torch.set_num_threads(count)

    def forward(self, slices: Sequence[SequenceSlice], out: FloatArray | None = None) -> FloatArray:
        return self._computed(slices, lambda step, outputs: self._logits_of(step, outputs, out))

    def likeliest(self, slices: Sequence[SequenceSlice]) -> Likeliest:
        return self._computed(slices, self._likeliest_of)

    def _computed(self, slices: Sequence[SequenceSlice], receive: Callable[[_Step | None, int], _T]) -> _T:
        """`receive`: what is wanted of so many rows of a step that is queued, once it has ended."""
        if self._is_closed:
            raise RuntimeError("the executor is closed")
        inputs = plan_step(slices, self.limits)
        try:
            with self._torch.inference_mode():
                return receive(self._queued(inputs, slices), len(inputs.outputs))
        except RuntimeError:
            check_answers(self._model.device)
            raise

    def _queued(self, inputs: StepInputs, slices: Sequence[SequenceSlice]) -> _Step | None:
        count, outputs, bucket = len(inputs.tokens), len(inputs.outputs), bucket_of(slices)
        longest = int(inputs.sequences[:, 2].max())
        self._inputs.fill(inputs, slices, max(bucket, count))
        variant = self._attention.begin(
            piece.block_table[: piece.start // self.limits.block_tokens] for piece in slices
        )
        if bucket:
            self.arrivals.wait_all()
            step: _Step = self._decodes.run(bucket, context_bound(longest, PARTITION_KEYS), variant)
            return step
        rows = self._inputs.rows(count, longest)
        chosen = self._inputs.outputs(outputs) if outputs < count else None
        return self._step(self._inputs.tokens(count), rows, chosen, wants_logits=outputs > 0)

    def close(self) -> None:
        self._decodes.drop()
        self._is_closed = True

    def _decode(self, rows: int, longest_context: int) -> _Step | None:
        return self._step(self._inputs.tokens(rows), self._inputs.rows(rows, longest_context))

    def _step(self, tokens: Any, rows: StepRows, outputs: Any = None, *, wants_logits: bool = True) -> _Step | None:
        """None without logits. What is likeliest is found in every step, so that one recording serves both."""
        logits = self._decoder.step(tokens, rows, outputs, wants_logits=wants_logits)
        if logits is None:
            return None
        greatest, best = logits.max(-1)
        return _Step(logits, self._torch.stack((best.int(), greatest.view(self._torch.int32)), -1))

    def _logits_of(self, step: _Step | None, outputs: int, out: FloatArray | None) -> FloatArray:
        result = np.empty((outputs, self.limits.vocabulary), np.float32) if out is None else out[:outputs]
        if step is not None:
            self._torch.from_numpy(result).copy_(step.logits[:outputs])
        self._synchronize()
        return result

    def _likeliest_of(self, step: _Step | None, outputs: int) -> Likeliest:
        if step is not None:
            self._chosen[:outputs].copy_(step.likeliest[:outputs], non_blocking=True)
        self._synchronize()
        pairs = self._chosen[:outputs].numpy().copy()
        return Likeliest(pairs[:, 0], pairs[:, 1].view(np.float32))

    def _synchronize(self) -> None:
        """The step has ended, and what was copied to the host is there."""
        if self._model.device.is_cuda:
            self._torch.cuda.current_stream(self._model.device.torch_name).synchronize()
