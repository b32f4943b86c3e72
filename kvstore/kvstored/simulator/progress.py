"""A progress bar on standard error: drawn over itself on a terminal, silent anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

_WIDTH = 30
_EVERY_S = 0.1


class ProgressBar:
    """`advance(done, total)` as often as you like; `clear` takes the line away. `clock` and `out` are for tests."""

    def __init__(self, out: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = sys.stderr if out is None else out
        self._clock = clock
        self._next_s = 0.0
        self._is_shown = False
        self.label = ""

    def advance(self, done: int, total: int) -> None:
        if not self._out.isatty() or (self._clock() < self._next_s and done < total):
            return
        self._next_s = self._clock() + _EVERY_S
        share = done / total if total else 1.0
        bar = "█" * round(share * _WIDTH)
        self._out.write(f"\r\033[K{self.label} {bar:·<{_WIDTH}} {share:4.0%}")
        self._out.flush()
        self._is_shown = True

    def advance_in(self, label: str, done: int, total: int) -> None:
        """`advance`, of the part of the work that is called `label`."""
        self.label = label
        self.advance(done, total)

    def clear(self) -> None:
        if self._is_shown:
            self._out.write("\r\033[K")
            self._out.flush()
            self._is_shown = False
