"""Points in an engine's work, which may be ahead of its device: when they have come, the time between two, and how many
layers of a copy are done.

On a CUDA device a moment is an event (`kvstore_client.device.DeviceMoment`).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Protocol

from kvstore_restore.choice import LoadChoice


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


class LayerProgress:
    """Counts the layers of a copy that are done: one thread copies, others wait for the layer that they are to read.

    A copy ends once, whether all of its layers are done or not.
    """

    def __init__(self) -> None:
        self._done = 0
        self._has_ended = False
        self._changed = threading.Condition()

    def advance(self) -> None:
        """One more layer may be read."""
        with self._changed:
            self._done += 1
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def wait(self, layer: int) -> None:
        """Wait until `layer` is done, or will never be."""
        with self._changed:
            self._changed.wait_for(lambda: self._done > layer or self._has_ended)


class ComputeTimes:
    """Reports to `choice` (None: nothing is to be learned) what calls of a model took, as soon as that is known.

    A device may still be computing when its call returns: then it is asked again at the next one, and never waited for.
    """

    def __init__(self, choice: LoadChoice | None) -> None:
        self._choice = choice
        self._open: tuple[int, int, Moment, Moment] | None = None

    def ended(self, first: int, tokens: int, begin: Moment, end: Moment) -> None:
        """`tokens` tokens from position `first` on were computed between these."""
        self._open = first, tokens, begin, end
        self.report()

    def report(self) -> None:
        """Report the latest call to the choice, if its time is known by now."""
        if self._choice is None or self._open is None:
            return
        first, tokens, begin, end = self._open
        seconds = end.seconds_since(begin)
        if seconds is not None:
            self._choice.observe_compute(first, tokens, seconds)
            self._open = None
