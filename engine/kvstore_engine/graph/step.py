"""The input of one forward step, and the flat arrays that the graph reads.

Owns the checks that keep a wrong input from ggml and the kernels, where it would corrupt memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """Some consecutive tokens of one sequence.

    tokens:      int32 [n], at least one.
    start:       position of the first; the K/V of positions 0..start-1 must be in the pool already.
    block_table: int32, the engine blocks that hold positions 0, 16, 32...; covers start + n tokens at least.
    outputs:     which tokens' logits are wanted.
    """

    tokens: Int32Array
    start: int
    block_table: Int32Array
    outputs: Literal["last", "all", "none"] = "last"


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The graph's inputs. `sequences` int32 [s, 4]: first row, rows, context; `outputs` are row numbers."""

    tokens: Int32Array
    positions: Int32Array
    slots: Int64Array
    outputs: Int32Array
    sequences: Int32Array


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What an executor was built for."""

    vocabulary: int
    pool_blocks: int
    block_tokens: int
    max_tokens: int
    max_sequences: int
    max_context: int


def plan_step(slices: Sequence[SequenceSlice], limits: StepLimits) -> StepInputs:
    """Check `slices` and lay them out one after another. Raises ValueError with what is wrong."""
    if not 0 < len(slices) <= limits.max_sequences:
        raise ValueError(f"a step takes 1 to {limits.max_sequences} sequences, not {len(slices)}")
    total = sum(len(piece.tokens) for piece in slices)
    if total > limits.max_tokens:
        raise ValueError(f"a step takes at most {limits.max_tokens} tokens, not {total}")
    tokens = np.empty(total, np.int32)
    positions = np.empty(total, np.int32)
    slots = np.empty(total, np.int64)
    sequences = np.zeros((len(slices), 4), np.int32)
    outputs: list[int] = []
    first = 0
    for index, piece in enumerate(slices):
        _check(piece, limits)
        count = len(piece.tokens)
        last, rows = first + count, np.arange(piece.start, piece.start + count)
        tokens[first:last], positions[first:last] = piece.tokens, rows
        blocks = np.asarray(piece.block_table, np.int64)[rows // limits.block_tokens]
        slots[first:last] = blocks * limits.block_tokens + rows % limits.block_tokens
        sequences[index, :3] = first, count, piece.start + count
        outputs += {"last": [last - 1], "all": range(first, last), "none": ()}[piece.outputs]
        first = last
    if len(slices) > 1 and len(np.unique(slots)) != total:
        raise ValueError("two tokens of one step would be written to the same place in the pool")
    return StepInputs(tokens, positions, slots, np.array(outputs, np.int32), sequences)


def _check(piece: SequenceSlice, limits: StepLimits) -> None:
    tokens, table = np.asarray(piece.tokens), np.asarray(piece.block_table)
    end = piece.start + len(tokens)
    if tokens.ndim != 1 or not len(tokens) or piece.start < 0:
        raise ValueError("a slice needs at least one token and a start of at least 0")
    if tokens.min() < 0 or tokens.max() >= limits.vocabulary:
        raise ValueError(f"token ids must be in 0..{limits.vocabulary - 1}")
    if end > limits.max_context:
        raise ValueError(f"the sequence would reach {end} tokens, the context holds {limits.max_context}")
    used = table[: -(-end // limits.block_tokens)]
    if len(used) * limits.block_tokens < end:
        raise ValueError(f"the block table holds {len(table)} blocks, too few for {end} tokens")
    if used.min() < 0 or used.max() >= limits.pool_blocks:
        raise ValueError(f"block ids must be in 0..{limits.pool_blocks - 1}")
