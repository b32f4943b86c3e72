"""The fixed memory that a step's inputs and logits pass through between the host and a torch device.

Inputs are filled on the host, copied to the device at once and seen there as tensors, whose addresses never change, so
that a recorded graph can be replayed with other inputs. The caller lets a step end before it fills the next one. The
largest logit of each row is queued with the step: a greedy choice needs nothing else. Rows of logits are copied to host
memory when they are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvstore_engine.devices import DeviceName
from kvstore_engine.executors.logits import FloatArray, StepLogits
from kvstore_engine.graph import SequenceSlice, StepInputs
from kvstore_engine.graph.step import StepLimits
from kvstore_engine.torch_executor.attention import StepRows
from kvstore_engine.torch_executor.library import torch_library

_TOKENS, _POSITIONS, _SLOTS, _SEQUENCES, _CONTEXTS, _OUTPUTS = range(6)
_FIELDS = 6


class InputMemory:
    """Memory, on the host and on `device`, for the inputs of steps within `limits` and up to `padding` further padding
    rows. Its addresses never change, so that a recorded step can be replayed.
    """

    def __init__(self, limits: StepLimits, device: DeviceName, padding: int) -> None:
        torch = torch_library()
        self._rows = rows = -(-(limits.max_tokens + padding) // 4) * 4
        self._width = width = -(-limits.max_context // limits.block_tokens)
        size = _FIELDS * rows + limits.max_sequences * width
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=device.is_cuda)
        self._device = torch.zeros(size, dtype=torch.int32, device=device.torch_name)
        flat = self._host.numpy()
        self._fields = flat[: _FIELDS * rows].reshape(_FIELDS, rows)
        self._tables = flat[_FIELDS * rows :].reshape(-1, width)

    def fill(self, inputs: StepInputs, slices: Sequence[SequenceSlice], padded: int) -> None:
        """Write the `inputs` of the step `slices` to the host memory and queue their copy to the device. The rows from
        the step's last one up to row number `padded` become padding rows.
        """
        count, fields = len(inputs.tokens), self._fields
        fields[_TOKENS, :count], fields[_POSITIONS, :count] = inputs.tokens, inputs.positions
        fields[_SLOTS, :count], fields[_CONTEXTS, :count] = inputs.slots, inputs.positions + 1
        fields[_SEQUENCES, :count] = np.repeat(np.arange(len(slices)), inputs.sequences[:, 1])
        fields[:, count:padded] = 0
        fields[_SLOTS, count:padded] = -1
        fields[_OUTPUTS, : len(inputs.outputs)] = inputs.outputs
        for row, piece in zip(self._tables, slices, strict=False):
            used = min(len(piece.block_table), self._width)
            row[:used] = piece.block_table[:used]
        filled = _FIELDS * self._rows + len(slices) * self._width
        self._device[:filled].copy_(self._host[:filled], non_blocking=True)

    def tokens(self, count: int) -> Any:
        return self._field(_TOKENS, count)

    def outputs(self, count: int) -> Any:
        return self._field(_OUTPUTS, count)

    def rows(self, count: int, longest_context: int) -> StepRows:
        """Return the device's tensors for the first `count` rows of the step. No context of the step exceeds
        `longest_context` tokens.
        """
        tables = self._device[_FIELDS * self._rows :].view(-1, self._width)
        return StepRows(
            count=count,
            positions=self._field(_POSITIONS, count),
            slots=self._field(_SLOTS, count),
            sequences=self._field(_SEQUENCES, count),
            contexts=self._field(_CONTEXTS, count),
            tables=tables,
            longest_context=longest_context,
        )

    def _field(self, number: int, count: int) -> Any:
        return self._device[number * self._rows : number * self._rows + count]


class StepOutputs(NamedTuple):
    """The results of a step as tensors on the device: `logits`, float32 [rows, vocabulary], and `likeliest`, int32
    [rows, 2]: for each row the token with the largest logit, and the bits of that logit.
    """

    logits: Any
    likeliest: Any

    @classmethod
    def of(cls, logits: Any) -> StepOutputs:
        """Return the results of a step with `logits`: it finds the likeliest token of each row. The work is queued on
        the device and not waited for.
        """
        torch = torch_library()
        most, best = logits.max(dim=-1)
        return cls(logits, torch.stack((best.int(), most.view(torch.int32)), -1))

    def first(self, count: int) -> StepOutputs:
        return StepOutputs(self.logits[:count], self.likeliest[:count])


class LogitsMemory:
    """Host memory to which the results of an executor's steps are copied."""

    def __init__(self, device: DeviceName) -> None:
        self._torch, self._device = torch_library(), device
        self._likeliest = self._new(0, self._torch.int32)
        self._rows = self._new(0, self._torch.float32)

    def received(self, computed: StepOutputs | None, whole: Sequence[int] | None) -> DeviceLogits:
        """Wait for the step with the results `computed`, and return its logits on the host. `whole` lists the numbers
        of the rows whose logits are copied completely, None for all rows. If `computed` is None, nothing is copied.
        """
        if computed is None:
            self._synchronize()
            return DeviceLogits([], [], [], np.empty((0, 0), np.float32))
        rows = list(range(len(computed.likeliest)) if whole is None else whole)
        if computed.likeliest.numel() > len(self._likeliest):
            self._likeliest = self._new(computed.likeliest.numel(), self._torch.int32)
        here = self._likeliest[: computed.likeliest.numel()].view(computed.likeliest.shape)
        here.copy_(computed.likeliest, non_blocking=True)
        whole_rows = self._fetched(computed.logits, rows)
        self._synchronize()
        pairs = here.numpy()
        best, most = pairs[:, 0].tolist(), pairs[:, 1].copy().view(np.float32).tolist()
        return DeviceLogits(best, most, rows, whole_rows)

    def _fetched(self, logits: Any, rows: list[int]) -> FloatArray:
        """Return rows of `logits` in host memory, once the stream has come so far."""
        if not rows:
            return np.empty((0, logits.shape[1]), np.float32)
        every = rows == list(range(len(logits)))
        chosen = logits if every else logits[self._torch.tensor(rows, dtype=self._torch.int64, device=logits.device)]
        if chosen.numel() > len(self._rows):
            self._rows = self._new(chosen.numel(), self._torch.float32)
        here = self._rows[: chosen.numel()].view(chosen.shape)
        here.copy_(chosen, non_blocking=True)
        array: FloatArray = here.numpy()
        return array

    def _new(self, count: int, dtype: Any) -> Any:
        return self._torch.empty(count, dtype=dtype, pin_memory=self._device.is_cuda)

    def _synchronize(self) -> None:
        if self._device.is_cuda:
            self._torch.cuda.current_stream(self._device.torch_name).synchronize()


class DeviceLogits(StepLogits):
    """The logits of a finished step, on the host. `best` and `most` have the likeliest token of each row and its logit.
    Only the rows whose numbers are in `whole` can be read completely, from `array`, until the next step.
    """

    def __init__(self, best: list[int], most: list[float], whole: Sequence[int], array: FloatArray) -> None:
        self._best, self._most, self._whole, self._array = best, most, list(whole), array

    def __len__(self) -> int:
        return len(self._best)

    def likeliest(self, rows: Sequence[int]) -> tuple[list[int], list[float]]:
        return [self._best[row] for row in rows], [self._most[row] for row in rows]

    def rows(self, rows: Sequence[int]) -> FloatArray:
        asked = list(rows)
        return self._array if asked == self._whole else self._array[[self._whole.index(row) for row in asked]]
