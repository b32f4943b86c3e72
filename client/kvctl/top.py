"""kvctl top: the daemon live, a frame a second; one frame where there is no terminal to draw on.

A daemon that goes away ends nothing: the last frame stays, says so, and goes on when there is one again.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path

from kvctl.admin import AdminSocket
from kvctl.dashboard import render
from kvctl.exit_codes import CommandError
from kvctl.output import Output
from kvctl.screen import Screen
from kvctl.snapshot import Snapshot, take
from kvstore_console.terminal import Line, is_terminal, plain_line, size_of, wants_colour

SHOWN_S = 60.0


def top(directory: Path, arguments: argparse.Namespace) -> Output:
    """Live until the user leaves, where there is a terminal; else one frame. Raises CommandError."""
    with AdminSocket(directory, arguments.timeout) as admin:
        shot = take(admin, since_s=SHOWN_S)
    if not (arguments.once or arguments.json):
        if is_terminal(sys.stdout):
            shot = _Live(directory, arguments, shot).run()
        else:
            print("kvctl: standard output is no terminal: one frame instead of a live view", file=sys.stderr)
    width = size_of(sys.stdout)[0]
    lines = render(shot, width=width, height=0, clock=_clock())
    return Output("\n".join(_text(lines, width)), shot.document(), painted=True)


class _Live:
    """The loop. The last frame is left in the terminal's history when it ends."""

    def __init__(self, directory: Path, arguments: argparse.Namespace, shot: Snapshot) -> None:
        self._directory = directory
        self._timeout_s: float = arguments.timeout
        self._interval_s: float = arguments.interval
        self._shot = shot

    def run(self) -> Snapshot:
        with contextlib.suppress(KeyboardInterrupt), Screen() as screen:
            while not self._watch(screen):
                pass
        return self._shot

    def _watch(self, screen: Screen) -> bool:
        """One connection's frames. True when the user wants no more; False when the daemon is gone."""
        try:
            with AdminSocket(self._directory, self._timeout_s) as admin:
                while True:
                    began_s = time.monotonic()
                    self._shot = take(admin, since_s=SHOWN_S)
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
