"""Which decode steps share a recorded graph: their rows and contexts are rounded up to a bucket's.

Pure. Rows of padding are computed and thrown away; a context that is rounded up costs thread blocks that end at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore_engine.graph import SequenceSlice

BUCKETS = (1, 2, 4, 8, 16, 32, 64)


def bucket_of(slices: Sequence[SequenceSlice]) -> int:
    """The rows of the bucket for a step in which every sequence decodes one token; 0: it is no such step."""
    if any(len(piece.tokens) != 1 or piece.outputs == "none" for piece in slices):
        return 0
    return next((bucket for bucket in BUCKETS if bucket >= len(slices)), 0)


def context_bound(longest: int, partition_keys: int) -> int:
    """`longest` rounded up to a power of two of partitions."""
    partitions = max(1, -(-longest // partition_keys))
    return partition_keys << (partitions - 1).bit_length()
