"""A terminal taken over for a while, and given back as it was, however that ends.

Owns the alternate screen, the cursor and the keyboard's mode. Invariant: after `Screen` is left, also by an exception
or SIGTERM, the terminal is as before.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, TextIO

from kvstore_console.terminal import size_of

_ENTER = "\x1b[?1049h\x1b[?25l\x1b[2J"
_LEAVE = "\x1b[?25h\x1b[?1049l"
_QUIT_KEYS = {"q", "Q", "\x1b", "\x03"}


class Screen:
    """A context manager: `show` frames, `wait` for the time of the next one or a key that ends it."""

    def __init__(self, output: TextIO | None = None, keyboard: TextIO | None = None) -> None:
        self._output = output or sys.stdout
        self._keyboard = keyboard or sys.stdin
        self._keyboard_mode: list[Any] | None = None
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Screen:
        self._handlers = {
            signal.SIGTERM: signal.signal(signal.SIGTERM, _end),
            signal.SIGTSTP: signal.signal(signal.SIGTSTP, self._suspend),
        }
        self._take()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._give_back()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def size(self) -> tuple[int, int]:
        return size_of(self._output)

    def show(self, lines: Sequence[str]) -> None:
        """Draw over the last frame: no blank screen in between, so nothing flickers."""
        self._write("\x1b[H" + "\x1b[K\r\n".join(lines) + "\x1b[K\x1b[J")

    def wait(self, seconds: float) -> bool:
        """True when a key was pressed that means: enough."""
        if self._keyboard_mode is None:
            select.select([], [], [], seconds)
            return False
        ready, _, _ = select.select([self._keyboard], [], [], seconds)
        if not ready:
            return False
        pressed = os.read(self._keyboard.fileno(), 64).decode(errors="replace")
        return not pressed or pressed in _QUIT_KEYS

    def _take(self) -> None:
        if self._keyboard.isatty():
            with suppress(termios.error):
                self._keyboard_mode = termios.tcgetattr(self._keyboard)
                tty.setcbreak(self._keyboard)
        self._write(_ENTER)

    def _give_back(self) -> None:
        with suppress(OSError):
            self._write(_LEAVE)
        if self._keyboard_mode is not None:
            with suppress(termios.error):
                termios.tcsetattr(self._keyboard, termios.TCSADRAIN, self._keyboard_mode)

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-Z: the shell gets its terminal as it was; `fg` comes back to ours."""
        self._give_back()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._take()

    def _write(self, text: str) -> None:
        self._output.write(text)
        self._output.flush()


def _end(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
