"""Progress says nothing at first; then a terminal shows one line and wipes it, and a pipe gets a line now and then."""

from __future__ import annotations

import io

import pytest

from kvstore_console.progress import EVERY_S, Progress
from kvstore_console.terminal import WIPE_LINE


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(out: io.StringIO) -> str:
    now = 0.0
    with Progress("kvctl bench", clock=lambda: now, out=out) as progress:
        for now in (0.5, 1.9, 2.1, 2.15, 3.2, EVERY_S, 1.5 * EVERY_S, 2 * EVERY_S):
            progress.say(f"at {now}")
    return out.getvalue()


def test_a_pipe_gets_a_line_now_and_then() -> None:
    assert run(io.StringIO()) == "kvctl bench: at 10.0\nkvctl bench: at 20.0\n"


def test_a_terminal_shows_one_line_and_wipes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    shown = [f"kvctl bench: at {at}" for at in (2.1, 3.2, 10.0, 15.0, 20.0)]
    assert run(_Terminal()).split(WIPE_LINE) == ["", *shown, ""]


def test_what_ends_at_once_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = _Terminal()
    with Progress("kvstored", clock=lambda: 0.0, out=terminal) as progress:
        progress.advance("lru", 1, 2)
    assert terminal.getvalue() == ""


def test_a_share_is_a_bar_on_a_terminal_and_nothing_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    seconds = iter([0.0, 15.0, 0.0])
    terminal, pipe = _Terminal(), io.StringIO()
    for out in (terminal, pipe):
        Progress("kvstored", clock=lambda: next(seconds), out=out).advance("lru", 5, 10)
    assert f"kvstored: lru {'█' * 15}{' ' * 15} 50%" in terminal.getvalue()
    assert pipe.getvalue() == ""
