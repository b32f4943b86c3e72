"""Progress of a long piece of work on standard error. A terminal shows nothing for two seconds, then one line that is
overwritten and finally wiped; any other output gets a line every ten seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Final, TextIO

from kvstore_console.printable import printable
from kvstore_console.terminal import WIPE_LINE, bar, is_terminal, size_of

QUIET_S: Final = 2.0
TERMINAL_EVERY_S: Final = 0.1
EVERY_S: Final = 10.0
_BAR_WIDTH: Final = 30


class Progress:
    """A display of the progress of long work on standard error: one line that is overwritten on a terminal, or a new
    line every ten seconds elsewhere. `prefix` begins each line. Call `say` or `advance` as often as you like; use it
    as a context manager, or call `clear` in the end. Tests give `clock` and `out`.
    """

    def __init__(self, prefix: str, *, clock: Callable[[], float] = time.monotonic, out: TextIO | None = None) -> None:
        self._prefix = prefix
        self._clock = clock
        self._out = sys.stderr if out is None else out
        self._overwrites = is_terminal(self._out)
        self._next_s = clock() + (QUIET_S if self._overwrites else EVERY_S)
        self._is_shown = False

    def say(self, text: str) -> None:
        if (now_s := self._clock()) < self._next_s:
            return
        self._next_s = now_s + (TERMINAL_EVERY_S if self._overwrites else EVERY_S)
        line = printable(f"{self._prefix}: {text}")
        if self._overwrites:
            self._is_shown = True
            self._out.write(f"{WIPE_LINE}{line[: size_of(self._out)[0] - 1]}")
        else:
            self._out.write(f"{line}\n")
        self._out.flush()

    def advance(self, label: str, done: int, total: int) -> None:
        """Show a bar for the part of the work called `label`, of which `done` of `total` steps are finished. Nothing is
        shown unless the output is a terminal.
        """
        if self._overwrites:
            share = done / total if total else 1.0
            self.say(f"{label} {bar(share, _BAR_WIDTH)} {share:.0%}")

    def clear(self) -> None:
        """Erase the line of progress, so that the next output begins on an empty line."""
        if self._is_shown:
            self._is_shown = False
            self._out.write(WIPE_LINE)
            self._out.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()
