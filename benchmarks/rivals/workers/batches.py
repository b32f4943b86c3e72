"""The values of the put and get comparison, the same in every contender: 64 of them, random, in touched memory.

A batch is put from one array and got into another, each of which holds all values back to back. Every batch has names
of its own; its bytes are made distinct by a stamp in each value, so that a get that brings another batch is found out.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
STAMP_BYTES = 8


class Batch:
    """Where values come from and go to. `prepare` and `check` are not part of any measurement."""

    def __init__(self, values: int, value_bytes: int) -> None:
        self.values, self.value_bytes = values, value_bytes
        self.source = np.random.default_rng(values).integers(0, 256, (values, value_bytes), dtype=np.uint8)
        self.target = np.ones((values, value_bytes), np.uint8)

    def names(self, number: int) -> list[str]:
        return [f"{self.value_bytes}-{number}-{value}" for value in range(self.values)]

    def prepare(self, number: int) -> None:
        """Make the source what batch `number` holds, and spoil the target."""
        self.source[:, :STAMP_BYTES].view("<u8")[:, 0] = np.arange(self.values) + number * self.values
        self.target[:, ::4096] ^= 0xFF

    def check(self, number: int) -> None:
        """Raise unless the target holds batch `number`. A page of each value is compared at every 4096th byte."""
        self.source[:, :STAMP_BYTES].view("<u8")[:, 0] = np.arange(self.values) + number * self.values
        if not np.array_equal(self.source[:, ::4096], self.target[:, ::4096]):
            raise RuntimeError(f"batch {number} did not come back as it was put")
