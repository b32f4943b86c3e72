"""The contract of attention over the paged cache, and what a step's rows are to it.

The caller guarantees that positions are below the longest context, and that slots and block ids are inside the pool.
The implementation MUST NOT let keys or values past a row's own position change that row, and MUST NOT store rows whose
slot is negative. Work is queued on torch's current stream.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class StepRows:
    """A step's rows as int32 tensors on the device; rows past the step's own are padding, with slot -1 and context 0.

    sequences: each row's line in `tables`, [sequences, table_stride]. contexts: tokens up to the row's own.
    longest_context: at least the greatest of `contexts`, known on the host.
    """

    count: int
    positions: Any
    slots: Any
    sequences: Any
    contexts: Any
    tables: Any
    longest_context: int

    def select(self, rows: Any) -> StepRows:
        """The attending side of `rows`, an integer tensor; their K and V have been written."""
        return replace(self, count=len(rows), sequences=self.sequences[rows], contexts=self.contexts[rows])


class AttentionBackend(ABC):
    """Of one model and pool. `layer` is a layer's number."""

    def begin(self, tables: Iterable[npt.NDArray[np.int32]]) -> Hashable:
        """Before the work of a step is queued. `tables`: of each sequence the whole blocks before the step's tokens,
        once.

        Returns what a recording of the step depends on beside its rows and its longest context: a recorded step may
        stand for this one where that was equal.
        """
        return None

    @abstractmethod
    def write(self, layer: int, queries: Any, keys: Any, values: Any, rows: StepRows) -> Any:
        """Rotate queries and keys by their positions, and write keys and values to the cache.

        bf16 [rows, heads, head_dim], of which the last two dimensions are contiguous. Returns the rotated queries,
        contiguous.
        """

    @abstractmethod
    def attend(self, layer: int, queries: Any, rows: StepRows) -> Any:
        """Attention of rotated queries, bf16 [rows, heads, head_dim]; the same shape."""
