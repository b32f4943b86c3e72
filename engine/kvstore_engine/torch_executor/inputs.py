"""A step's inputs in fixed memory: filled on the host, copied to the device at once, seen there as tensors.

Owns both. The addresses never change, so that a recorded graph can be replayed with other inputs. The caller lets a
step end before it fills the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvstore_engine.devices import DeviceName
from kvstore_engine.graph import SequenceSlice, StepInputs
from kvstore_engine.graph.step import StepLimits
from kvstore_engine.torch_executor.attention import StepRows
from kvstore_engine.torch_executor.library import torch_library

_TOKENS, _POSITIONS, _SLOTS, _SEQUENCES, _CONTEXTS, _OUTPUTS = range(6)
_FIELDS = 6


class InputMemory:
    """For steps within `limits`, padded by at most `padding` rows."""

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
        """Queue the copy of a step's inputs; rows up to `padded` become padding."""
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
        """The first `count` rows."""
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
