"""Which memory of a device its L2 cache should keep: a prefix that the sequences of a batch share.

Owns the choice of the window; `Device.keep_in_cache` sets it for the launches that follow on a stream. A window is one
range of addresses, so that only blocks which follow each other in the pool can be in it. It never changes a result.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class CacheWindow:
    """`nbytes` of device memory at `address`."""

    address: int
    nbytes: int

    @classmethod
    def of_blocks(
        cls, plane: int, block_bytes: int, blocks: npt.NDArray[np.int32], most_bytes: int
    ) -> CacheWindow | None:
        """The longest run of consecutive ids among `blocks`, int32 [n] in the order of a block table, in the plane at
        address `plane`, of at most `most_bytes`; None where not even a block fits. The first of equally long runs."""
        most = most_bytes // block_bytes if block_bytes > 0 else 0
        if most < 1 or not len(blocks):
            return None
        starts = np.concatenate(([0], np.flatnonzero(np.diff(blocks) != 1) + 1))
        lengths = np.diff(np.append(starts, len(blocks)))
        at = int(lengths.argmax())
        return cls(plane + int(blocks[starts[at]]) * block_bytes, min(int(lengths[at]), most) * block_bytes)
