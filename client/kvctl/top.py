"""kvctl top: the live daemon, one frame a second; a single frame if there is no terminal to draw on.

If the daemon goes away, the last frame stays and says so, and the display goes on when a daemon is there again. The
module owns the alternate screen, the cursor and the keyboard's mode. Invariant: after `Screen` is left, also by an
exception or SIGTERM, the terminal is as before.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from kvctl.connection import AdminSocket
from kvctl.dashboard import render
from kvctl.output import CommandError, Output
from kvctl.snapshot import DaemonSnapshot, take_snapshot
from kvstore_console.terminal import Line, is_terminal, plain_line, size_of, wants_colour

SHOWN_S = 60.0
_ENTER = "\x1b[?1049h\x1b[?25l\x1b[2J"
_LEAVE = "\x1b[?25h\x1b[?1049l"
_QUIT_KEYS = {"q", "Q", "\x1b", "\x03"}


def top(directory: Path, arguments: argparse.Namespace) -> Output:
    """Show the live daemon until the user leaves. Without a terminal, return a single frame. Raises CommandError."""
    with AdminSocket(directory, arguments.timeout) as admin:
        shot = take_snapshot(admin, since_s=SHOWN_S)
    if not (arguments.once or arguments.json):
        if is_terminal(sys.stdout):
            shot = _Live(directory, arguments, shot).run()
        else:
            print("kvctl: standard output is no terminal: one frame instead of a live view", file=sys.stderr)
    width = size_of(sys.stdout)[0]
    lines = render(shot, width=width, height=0, clock=_clock())
    return Output("\n".join(_text(lines, width)), shot.document(), painted=True)


class _Live:
    """The display loop. The last frame is left in the terminal's history when it ends."""

    def __init__(self, directory: Path, arguments: argparse.Namespace, shot: DaemonSnapshot) -> None:
        self._directory = directory
        self._timeout_s: float = arguments.timeout
        self._interval_s: float = arguments.interval
        self._shot = shot

    def run(self) -> DaemonSnapshot:
        with contextlib.suppress(KeyboardInterrupt), Screen() as screen:
            while not self._watch(screen):
                pass
        return self._shot

    def _watch(self, screen: Screen) -> bool:
        """Show the frames of one connection. Return True if the user wants to leave, False if the daemon is gone."""
        try:
            with AdminSocket(self._directory, self._timeout_s) as admin:
                while True:
                    began_s = time.monotonic()
                    self._shot = take_snapshot(admin, since_s=SHOWN_S)
                    self._draw(screen)
                    if screen.wait(max(0.05, self._interval_s - (time.monotonic() - began_s))):
                        return True
        except CommandError as error:
            self._draw(screen, f"waiting for the daemon: {error}")
            return screen.wait(self._interval_s)

    def _draw(self, screen: Screen, trouble: str = "") -> None:
        width, height = screen.size()
        lines = [plain_line(trouble, "red")] if trouble else []
        lines += render(self._shot, width=width, height=max(1, height - len(lines)), clock=_clock(), note="q quits")
        screen.show(_text(lines, width))


def _text(lines: list[Line], width: int) -> list[str]:
    return [line.render(width, colour=wants_colour(sys.stdout)) for line in lines]


def _clock() -> str:
    return time.strftime("%H:%M:%S")


class Screen:
    """A context manager for the terminal's screen. `show` draws a frame, and `wait` waits until the next frame is due
    or a key ends the display.
    """

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

    def __exit__(self, *_: object) -> None:
        self._give_back()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def size(self) -> tuple[int, int]:
        return size_of(self._output)

    def show(self, lines: Sequence[str]) -> None:
        """Draw `lines` over the last frame. The screen is not cleared first, so nothing flickers."""
        self._write("\x1b[H" + "\x1b[K\r\n".join(lines) + "\x1b[K\x1b[J")

    def wait(self, seconds: float) -> bool:
        """Wait for `seconds`, and return whether the user pressed a key that ends the display."""
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
        """Handle Ctrl-Z: restore the shell's terminal, stop, and after `fg` set up the display again."""
        self._give_back()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._take()

    def _write(self, text: str) -> None:
        self._output.write(text)
        self._output.flush()


def _end(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
