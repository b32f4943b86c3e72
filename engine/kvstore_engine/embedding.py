"""Embeddings of token sequences: the states of a model behind its last norm, pooled and scaled to length 1.

The module owns the way from token ids to vectors, on the processor, with a small K/V pool of its own. It knows nothing
of texts, requests or stores. Short inputs are computed together, longer ones in several steps. An embedding may differ
in its last bits with the inputs that are computed beside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from kvstore_engine.devices import DeviceName
from kvstore_engine.executors import PoolSetup, StepSizes
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.graph import SequenceSlice
from kvstore_engine.model.metadata import Hyperparameters
from kvstore_engine.opening import open_executor
from kvstore_engine.pool import ENGINE_BLOCK_TOKENS

Pooling = Literal["mean", "cls", "last"]
Vectors = npt.NDArray[np.float32]
POOLINGS: Final[tuple[Pooling, ...]] = ("mean", "cls", "last")
_BY_NUMBER: Mapping[object, Pooling] = {1: "mean", 2: "cls", 3: "last"}
_STEP_TOKENS, _STEP_SEQUENCES = 512, 16


def pooling_of(file: GGUFFile) -> Pooling | None:
    """Return how the model in `file` pools states, by its metadata, or None if it does not say."""
    return _BY_NUMBER.get(Hyperparameters(file.metadata).get("pooling_type"))


class EmbeddingModel:
    """The model in `file`, opened to compute embeddings of up to `context` tokens with `threads` threads. Use it from
    one thread at a time. `close` closes the file, too. Raises UsageError or OperationError with a message of one line.
    """

    def __init__(self, file: GGUFFile, pooling: Pooling, *, threads: int, context: int) -> None:
        self.pooling, self._context = pooling, context
        blocks = -(-max(context, _STEP_TOKENS) // ENGINE_BLOCK_TOKENS) + _STEP_SEQUENCES
        sizes = StepSizes(threads, _STEP_TOKENS, _STEP_SEQUENCES, context)
        self._opened = contextlib.ExitStack()
        setup = PoolSetup(blocks, ENGINE_BLOCK_TOKENS, "f16")
        self._executor = self._opened.enter_context(open_executor(file, DeviceName.parse("cpu"), setup, sizes))
        self.width = self._executor.config.width

    def compute(self, inputs: Sequence[npt.NDArray[np.int32]]) -> Vectors:
        """Return the embedding of each input, float32 [inputs, width]. An input has 1 to `context` token ids."""
        found = np.zeros((len(inputs), self.width), np.float32)
        step, tokens = list[int](), 0
        for place, each in enumerate(inputs):
            if step and (tokens + len(each) > _STEP_TOKENS or len(step) == _STEP_SEQUENCES):
                self._compute(step, inputs, found)
                step, tokens = [], 0
            step.append(place)
            tokens += len(each)
        if step:
            self._compute(step, inputs, found)
        return found

    def close(self) -> None:
        self._opened.close()

    def _compute(self, places: Sequence[int], inputs: Sequence[npt.NDArray[np.int32]], found: Vectors) -> None:
        """Compute the inputs at `places` together: several short ones, or one that takes some steps."""
        first = 0
        tables = list[npt.NDArray[np.int32]]()
        for place in places:
            count = -(-len(inputs[place]) // ENGINE_BLOCK_TOKENS)
            tables.append(np.arange(first, first + count, dtype=np.int32))
            first += count
        pooled = np.zeros((len(places), self.width), np.float64)
        longest = max(len(inputs[place]) for place in places)
        for start in range(0, longest, _STEP_TOKENS):
            pieces = [inputs[place][start : start + _STEP_TOKENS] for place in places]
            states = self._executor.forward(
                [SequenceSlice(piece, start, table, "states") for piece, table in zip(pieces, tables, strict=True)]
            )
            ends = np.cumsum([len(piece) for piece in pieces])
            for row, of_input in enumerate(np.split(states, ends[:-1])):
                if self.pooling == "mean":
                    pooled[row] += of_input.sum(0, dtype=np.float64)
                elif self.pooling == "last" or start == 0:
                    pooled[row] = of_input[-1 if self.pooling == "last" else 0]
        lengths = np.linalg.norm(pooled, axis=1, keepdims=True)
        found[list(places)] = (pooled / np.where(lengths, lengths, 1)).astype(np.float32)
