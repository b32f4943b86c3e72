"""Memory beside the pool for the blocks of preempted sequences.

Owns slabs of engine blocks' payloads. It never decides which sequence is swapped. Empty memory is returned to the
system once it has been unused for a while: where blocks are short, one swap follows another, and first writes to fresh
memory take five times as long as the copy.
"""

import numpy as np
import numpy.typing as npt

from kvstore_engine.blocks.runs import split_runs
from kvstore_engine.blocks.slabs import Slabs
from kvstore_engine.free_list import PoolExhausted
from kvstore_engine.pool import BlockPool

_PATIENCE = 32


class HostPoolFull(RuntimeError):
    """The host pool has no room for the sequence."""


class HostPool:
    """Room for `limit_bytes` of engine blocks' payloads of `pool`'s shape."""

    def __init__(self, pool: BlockPool, limit_bytes: int) -> None:
        self._pool = pool
        self.block_bytes = pool.payload_bytes(1)
        self._slabs = Slabs(self.block_bytes, limit_bytes)
        self._unused_calls = 0

    @property
    def free_blocks(self) -> int:
        """Engine blocks that still fit."""
        return self._slabs.available

    @property
    def resident_bytes(self) -> int:
        """Memory that this pool has got from the system."""
        return self._slabs.backed_bytes

    @property
    def used_blocks(self) -> int:
        """Engine blocks that are saved here."""
        return self._slabs.used

    def save(self, blocks: list[int]) -> list[int]:
        """Copy pool blocks to places of this pool. HostPoolFull, and then nothing is copied."""
        try:
            places = self._slabs.allocate(len(blocks))
        except PoolExhausted as error:
            raise HostPoolFull(str(error)) from None
        self._unused_calls = 0
        done = 0
        for first, count in split_runs(places):
            self._pool.gather_block(blocks[done : done + count], self._view(first, count))
            done += count
        return places

    def load(self, places: list[int], skip: int, blocks: list[int]) -> None:
        """Copy what was saved, without its first `skip` blocks, back to pool blocks."""
        # A run of places was written as one payload, plane by plane, so it is read as one, without its head.
        done = 0
        for first, count in split_runs(places):
            kept = min(max(skip - done, 0), count)
            targets = blocks[done + kept - skip : done + count - skip]
            if targets:
                self._pool.scatter_part(self._view(first, count), kept, targets)
            done += count

    def free(self, places: list[int]) -> None:
        """Discard what was saved in `places`."""
        self._slabs.free(places)

    def trim_if_unused(self) -> None:
        """Call this now and then: empty memory is returned if nothing was saved for 32 calls."""
        self._unused_calls += 1
        if self._unused_calls >= _PATIENCE:
            self.trim()

    def trim(self) -> None:
        """Return all empty memory to the system now."""
        self._slabs.trim()

    def _view(self, first: int, count: int) -> npt.NDArray[np.uint8]:
        return self._slabs.memory[first : first + count].reshape(-1)
