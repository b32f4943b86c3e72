"""The child's end of a contender: answers JSON lines on standard input with JSON lines on what was standard output.

Runs in the environment of any rival, so it imports the standard library and numpy alone. A rival's prints go to
standard error. An exception in an operation is an answer, not an end. Never measures: the operations do.

Owns the values of the put and get comparison, too, equal in every contender: 64 of them, random, in touched memory. A
batch is put from one array and got into another, each of which holds all values back to back. Every batch has names of
its own; its bytes are made distinct by a stamp in each value, so that a get that brings another batch is found out.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
STAMP_BYTES = 8


class Batch:
    """The memory that values come from and go to. `prepare` and `check` are not part of any measurement."""

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


def serve(operations: Mapping[str, Callable[..., object]]) -> None:
    """Say that it is ready, then answer `{"do": name, ...arguments}` until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    _say(answers, {"ready": sorted(operations)})
    for line in sys.stdin:
        asked = json.loads(line)
        operation = operations[asked.pop("do")]
        try:
            _say(answers, {"result": operation(**asked)})
        except Exception as error:  # sent to the parent, which stops the comparison and shows it
            _say(answers, {"error": f"{type(error).__name__}: {error}"})


def _say(answers: object, message: dict[str, object]) -> None:
    print(json.dumps(message), file=answers, flush=True)  # type: ignore[call-overload]
