"""What the owner of a worker receives when one dies, and what a step's caller gets when it cannot be computed.

Owns no behaviour.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


class StepFailed(RuntimeError):
    """A step cannot be computed: `slices` are the indices at fault; the others can be tried again.

    K and V of the positions of this step are undefined; the rest of the pool is untouched.
    """

    def __init__(self, message: str, slices: tuple[int, ...]) -> None:
        super().__init__(message)
        self.slices = slices


@dataclass(frozen=True, slots=True)
class WorkerNotice:
    """The worker's state changed. `deaths` counts since the executor was made; `reason` says why, for "dead"."""

    state: Literal["starting", "ready", "dead"]
    pid: int
    deaths: int
    reason: str = ""
