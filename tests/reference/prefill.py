"""A prompt computed by an executor in the steps in which the batch engine cuts one that is alone: cold or restored,
its end is computed in the same step.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvstore_engine.executors.base import StepExecutor
from kvstore_engine.graph import SequenceSlice
from kvstore_engine.graph.plan import BLOCK_TOKENS


def prefill(
    executor: StepExecutor, tokens: npt.NDArray[np.int32], start: int, table: npt.NDArray[np.int32]
) -> npt.NDArray[np.float32]:
    """Compute `tokens`, the positions from `start` on; return the last one's logits, float32 [vocabulary]."""
    end, chunk = start + len(tokens), min(2 * BLOCK_TOKENS, executor.limits.max_tokens // BLOCK_TOKENS * BLOCK_TOKENS)
    tail = (end - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    cuts = sorted({start, *range(start // chunk * chunk + chunk, tail, chunk), max(start, tail), end})
    for first, last in pairwise(cuts):
        outputs = "last" if last == end else "none"
        logits = executor.forward([SequenceSlice(tokens[first - start : last - start], first, table, outputs)])  # type: ignore[arg-type]
    found: npt.NDArray[np.float32] = logits[0]
    return found
