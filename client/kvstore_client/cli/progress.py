"""A word on standard error while something takes long: nothing for the first two seconds, then now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Final, TextIO

from kvstore_proto.printable import printable

QUIET_S: Final = 2.0
EVERY_S: Final = 1.0


class Progress:
    """`say(text)` as often as you like; `clock` and `out` are for tests."""

    def __init__(self, command: str, *, clock: Callable[[], float] = time.monotonic, out: TextIO | None = None) -> None:
        self._command = command
        self._clock = clock
        self._out = out if out is not None else sys.stderr
        self._next_s = clock() + QUIET_S

    def say(self, text: str) -> None:
        if self._clock() >= self._next_s:
            self._next_s = self._clock() + EVERY_S
            print(printable(f"kvctl {self._command}: {text}"), file=self._out, flush=True)
