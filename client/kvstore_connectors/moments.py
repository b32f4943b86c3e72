"""Points in an engine's work, which may be ahead of its device: when they have come, and the time between two.

On a CUDA device a moment is an event (`kvstore_client.device.DeviceMoment`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


class Moment(Protocol):
    """Behind all that the engine had begun when it was named."""

    def wait(self) -> None:
        """Until it has come. Raises what the device says."""
        ...

    def seconds_since(self, earlier: Any) -> float | None:
        """From an earlier moment of the same kind; None where that is not known, or not known yet. Never waits."""
        ...


@dataclass(frozen=True, slots=True)
class HostMoment:
    """Of an engine that has done what it has begun. `at_s`: None where the work of another device is not done when its
    call returns."""

    at_s: float | None

    def wait(self) -> None:
        """The CPU is there; torch itself waits for another device when it copies from it."""

    def seconds_since(self, earlier: HostMoment) -> float | None:
        return None if self.at_s is None or earlier.at_s is None else self.at_s - earlier.at_s
