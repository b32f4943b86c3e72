"""Points in an engine's work, which may be ahead of its device: whether they have come, the time between two of them,
and the number of layers of a copy that are done.

On a CUDA device a moment is an event (`kvstore_client.device.DeviceMoment`).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Protocol

from kvstore_restore.choice import LoadChoice


class Moment(Protocol):
    """The point in time when the engine's device has finished all work that was begun before the object was made."""

    def wait(self) -> None:
        """Wait until the moment has come. Raises the device's error."""
        ...

    def seconds_since(self, earlier: Any) -> float | None:
        """Return the seconds from the moment `earlier` to this one. Return None if they are not known, or not yet. It
        never waits.
        """
        ...


@dataclass(frozen=True, slots=True)
class HostMoment:
    """The point in time when an engine on the CPU has finished its work, which is when its call returns. `at_s` is the
    time in seconds, or None if another device may still be computing then.
    """

    at_s: float | None

    def wait(self) -> None:
        """Do nothing: the CPU has finished, and torch itself waits for another device when it copies from it."""

    def seconds_since(self, earlier: HostMoment) -> float | None:
        return None if self.at_s is None or earlier.at_s is None else self.at_s - earlier.at_s


class LayerProgress:
    """A counter of the layers that a copy has finished. One or two threads copy, and other threads wait for the layer
    that they will read. When the copy ends, all waiting threads go on, even if some layers were not copied.
    """

    def __init__(self) -> None:
        self._done = 0
        self._behind: dict[int, int] = {}  # copied before an earlier layer was: from which layer to which
        self._has_ended = False
        self._changed = threading.Condition()

    def copied(self, layers: range) -> None:
        """Note that `layers` are copied. They are readable once all layers before them are copied too."""
        with self._changed:
            self._behind[layers.start] = layers.stop
            while self._done in self._behind:
                self._done = self._behind.pop(self._done)
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def wait(self, layer: int) -> None:
        """Wait until layer number `layer` is copied, or the copy has ended without it."""
        with self._changed:
            self._changed.wait_for(lambda: self._done > layer or self._has_ended)


class ModelCallTimes:
    """A reporter of a model's computing times to the object `choice`, which learns from them how many blocks to load.
    If `choice` is None, nothing is reported. A device may still be computing when the model's call returns; its time is
    then read at the next call, without waiting.
    """

    def __init__(self, choice: LoadChoice | None) -> None:
        self._choice = choice
        self._open: tuple[int, int, Moment, Moment] | None = None

    def ended(self, first: int, tokens: int, begin: Moment, end: Moment) -> None:
        """Note that the model computed `tokens` tokens from position `first` on between the moments `begin` and
        `end`.
        """
        self._open = first, tokens, begin, end
        self.report()

    def report(self) -> None:
        """Report the computing time of the model's latest call to the `LoadChoice`, if the device has finished that
        call. It never waits.
        """
        if self._choice is None or self._open is None:
            return
        first, tokens, begin, end = self._open
        seconds = end.seconds_since(begin)
        if seconds is not None:
            self._choice.observe_compute(first, tokens, seconds)
            self._open = None
