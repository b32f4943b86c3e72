"""How many layers of a copy are done: one thread copies, others wait for the layer that they are to read."""

from __future__ import annotations

import threading
from collections.abc import Callable


class LayerProgress:
    """A copy ends once, whether all of its layers are done or not."""

    def __init__(self) -> None:
        self._done = 0
        self._has_ended = False
        self._changed = threading.Condition()

    @property
    def has_ended(self) -> bool:
        return self._has_ended

    def is_over(self, layer: int) -> bool:
        """The layer is done, or will never be."""
        return self._done > layer or self._has_ended

    def advance(self) -> None:
        """One more layer may be read."""
        with self._changed:
            self._done += 1
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def wait(self, happened: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(happened)
