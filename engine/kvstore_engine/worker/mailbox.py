"""A step and its logits in shared memory: the arrays never travel through the socket.

The module owns the layout. The parent writes a step and then sends a packet; the child reads it, writes the logits and
answers. So there is one writer at a time, and the packets order the memory. Invariants: the child's executor checks its
inputs and does not trust them; there are two slots for logits, used in turn, so a result stays unchanged until the step
after the next one.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvstore_engine.graph.step import SequenceSlice, StepLimits

FloatArray = npt.NDArray[np.float32]
_OUTPUTS: tuple[Literal["last", "all", "none"], ...] = ("none", "last", "all")
_CODES: dict[str, int] = {name: code for code, name in enumerate(_OUTPUTS)}
_ALIGNMENT_BYTES = 64
_SLOTS = 2
_FIELDS = 5  # of a slice: start, tokens, blocks, outputs, pages to read


class Mailbox:
    """Shared memory through which the engine and its worker process exchange steps and their logits. `limits` give the
    greatest size of a step. `memory(nbytes)` allocates that memory or maps the other process's.
    """

    def __init__(self, limits: StepLimits, memory: Callable[[int], mmap.mmap]) -> None:
        self._max_tokens, self._max_sequences = max_tokens, max_sequences = limits.max_tokens, limits.max_sequences
        rows = max(max_tokens, max_sequences)
        shapes: list[tuple[tuple[int, ...], type[np.generic]]] = [
            ((max_sequences, _FIELDS), np.int32),
            ((max_tokens,), np.int32),
            (tables := (max_sequences, -(-limits.max_context // limits.block_tokens)), np.int32),
            (tables if limits.window_blocks else (0, 0), np.int32),
            ((_SLOTS, rows, limits.vocabulary), np.float32),
        ]
        offsets, end = [], 0
        for shape, dtype in shapes:
            offsets.append(end)
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            end += -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        flat = memory(end)
        self._slices, self._tokens, self._tables, self._windows, self._logits = (
            np.ndarray(shape, dtype, flat, offset) for (shape, dtype), offset in zip(shapes, offsets, strict=True)
        )

    def write(self, slices: Sequence[SequenceSlice]) -> None:
        """Write the `slices` of the next step into the shared memory. Raises ValueError if the step has no slice, too
        many slices or too many tokens.
        """
        if not 0 < len(slices) <= self._max_sequences:
            raise ValueError(f"a step takes 1 to {self._max_sequences} sequences, not {len(slices)}")
        total = sum(len(piece.tokens) for piece in slices)
        if total > self._max_tokens:
            raise ValueError(f"a step takes at most {self._max_tokens} tokens, not {total}")
        tables, width = self._tables, self._tables.shape[1]
        fields = []
        for index, piece in enumerate(slices):
            blocks = min(len(piece.block_table), width)
            tables[index, :blocks] = piece.block_table[:blocks]
            if piece.window_table is not None and len(self._windows):
                self._windows[index, :blocks] = piece.window_table[:blocks]
            fields.append((piece.start, len(piece.tokens), blocks, _CODES[piece.outputs], piece.read_pages))
        self._slices[: len(slices)] = fields
        np.concatenate([piece.tokens for piece in slices], out=self._tokens[:total], casting="same_kind")

    def read(self, count: int) -> list[SequenceSlice]:
        """Return the `count` slices of the step that `write` put into the shared memory, as views of it."""
        slices, first = [], 0
        for index, (start, tokens, blocks, outputs, pages) in enumerate(self._slices[:count].tolist()):
            table = self._tables[index, :blocks]
            windows = self._windows[index, :blocks] if len(self._windows) else None
            kind: Literal["last", "all", "none"] = _OUTPUTS[outputs]
            slices.append(SequenceSlice(self._tokens[first : first + tokens], start, table, kind, windows, pages))
            first += tokens
        return slices

    def logits(self, step: int, rows: int | None = None) -> FloatArray:
        """Return the memory for the logits of step number `step`, float32 [rows, vocabulary], as a view of the shared
        memory; with `rows` None, all rows that it has room for. It is used again for step number `step` + 2.
        """
        view: FloatArray = self._logits[step % _SLOTS, :rows]
        return view
