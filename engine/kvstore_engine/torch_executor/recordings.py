"""Decode steps that are recorded once for each bucket and then replayed: one launch instead of a thousand.

The module owns the recordings, the time of making one, and the grouping of steps: rows and contexts are rounded up to a
bucket's. Rows of padding are computed and thrown away; a context that is rounded up costs thread blocks that end at
once. CUDA graphs have not yet run on hardware.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from kvstore_engine.graph import SequenceSlice
from kvstore_engine.torch_executor.library import torch_library

BUCKETS = (1, 2, 4, 8, 16, 32, 64)
Compute = Callable[[int, int], Any]  # rows, longest context: its results
Replay = Callable[[], None]
Record = Callable[[Callable[[], Any]], tuple[Replay, Any]]
"""Makes of a step, computed once before, what computes it again from the memory of its inputs, and its result.

Each replay overwrites the result."""

_MOST_KEPT = 128  # buckets times lengths of a context are about half as many


def bucket_of(slices: Sequence[SequenceSlice]) -> int:
    """Return the number of rows, one of BUCKETS, to which a step of `slices` is padded so that it can be recorded.
    Return 0 unless every sequence of the step computes one token and its logits.
    """
    if any(len(piece.tokens) != 1 or piece.outputs == "none" for piece in slices):
        return 0
    return next((bucket for bucket in BUCKETS if bucket >= len(slices)), 0)


def context_bound(longest: int, partition_keys: int) -> int:
    """Return the context `longest` (tokens), rounded up to `partition_keys` times a power of two."""
    partitions = max(1, -(-longest // partition_keys))
    return partition_keys << (partitions - 1).bit_length()


def cuda_recorder() -> Record:
    """Return a function that records a step as a CUDA graph and returns two things: a function that replays the graph,
    and its result. All recordings share memory, so only one may run at a time.
    """
    torch = torch_library()
    pool = torch.cuda.graph_pool_handle()

    def record(compute: Callable[[], Any]) -> tuple[Replay, Any]:
        graph = torch.cuda.CUDAGraph()
        # The storing thread copies meanwhile, on its own stream: only this thread's calls belong to the graph.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = compute()
        return graph.replay, result

    return record


class DecodeSteps:
    """A cache of recorded decode steps. With `record`, the second step of a kind (as `run` explains) is recorded and
    later ones are replayed; without it every step is computed. At most 128 recordings are kept.
    """

    def __init__(self, compute: Compute, record: Record | None) -> None:
        self._compute, self._record = compute, record
        self._known: OrderedDict[Hashable, tuple[Replay, Any] | None] = OrderedDict()  # None: computed once

    def run(self, rows: int, longest_context: int, variant: Hashable = None) -> Any:
        """Compute or replay a step of `rows` rows and return its results, which are valid until the next call. Steps
        with equal `rows`, `longest_context` and `variant` are of one kind, which one recording serves.
        """
        key = rows, longest_context, variant
        if self._record is None:
            return self._compute(rows, longest_context)
        if key not in self._known:
            logits = self._compute(rows, longest_context)
            self._known[key] = None
            if len(self._known) > _MOST_KEPT:
                self._known.popitem(last=False)
            return logits
        self._known.move_to_end(key)
        recorded = self._known[key]
        if recorded is None:
            recorded = self._known[key] = self._record(lambda: self._compute(rows, longest_context))
        replay, logits = recorded
        replay()  # recording computes nothing by itself
        return logits

    def drop(self) -> None:
        """Forget all recordings and free their memory."""
        self._known.clear()
