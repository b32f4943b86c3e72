"""Terminal output: colour, the size of the screen, pieces of text with a style, bars, sparklines.

The module owns the escape codes. Invariant: the width of a `Line` on the screen never depends on its colours and is
never above the width that it was cut to.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TextIO

from kvstore_console.printable import printable

WIPE_LINE = "\r\x1b[K"
_CODES = {"": "", "bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34", "cyan": "36"}
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_SPARKS = "▁▂▃▄▅▆▇█"


def is_terminal(stream: TextIO) -> bool:
    """Return whether `stream` writes to a terminal that understands escape codes."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def wants_colour(stream: TextIO) -> bool:
    """Return whether output to `stream` should be coloured: it must be a terminal, and the user must not have set
    NO_COLOR (https://no-color.org).
    """
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def size_of(stream: TextIO) -> tuple[int, int]:
    """Return the columns and lines of the terminal behind `stream`, or 80 and 24 if it is no terminal."""
    with suppress(OSError, ValueError):
        size = os.get_terminal_size(stream.fileno())
        if size.columns and size.lines:
            return size.columns, size.lines
    return 80, 24


@dataclass(slots=True)
class Line:
    """A line of terminal output, made of pieces of text with a style each, such as "bold" or "red"."""

    spans: list[tuple[str, str]] = field(default_factory=list)

    def add(self, text: str, style: str = "") -> Line:
        if text:
            self.spans.append((printable(text), style))
        return self

    @property
    def width(self) -> int:
        return sum(len(text) for text, _ in self.spans)

    def render(self, width: int, *, colour: bool) -> str:
        """Return the first `width` characters of the line, with escape codes for the styles if `colour` is True."""
        parts: list[str] = []
        left = width
        for text, style in self.spans:
            shown = text[:left]
            left -= len(shown)
            if shown:
                parts.append(f"\x1b[{_CODES[style]}m{shown}\x1b[0m" if colour and style else shown)
        return "".join(parts) if colour else "".join(parts).rstrip()


def plain_line(text: str, style: str = "") -> Line:
    return Line().add(text, style)


def bar(share: float, width: int) -> str:
    """Return a horizontal bar of block characters, `width` characters wide, filled to the share `share` (0 to 1) in
    eighths of a character. Any share above 0 fills at least one eighth.
    """
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    if share > 0:
        eighths = max(1, eighths)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(width)


def sparkline(values: Sequence[float], width: int, *, top: float = 0.0) -> str:
    """Return `values` as a row of small bars, at most `width` characters, scaled to `top` or to the highest value. If
    there are more values than characters, neighbours are averaged. NaN is a gap.
    """
    if width <= 0:
        return ""
    columns = min(width, len(values))
    edges = [len(values) * column // columns for column in range(columns)] + [len(values)] if columns else [0]
    shown = [mean(values[first:last]) for first, last in pairwise(edges)]
    highest = top or max(known(shown), default=0.0)
    return "".join(_spark(value, highest) for value in shown).rjust(width)


def known(values: Sequence[float]) -> list[float]:
    """Return the values in `values` that are not NaN."""
    return [value for value in values if not math.isnan(value)]


def mean(values: Sequence[float]) -> float:
    """Return the mean of the values in `values` that are not NaN, or NaN if there are none."""
    numbers = known(values)
    return sum(numbers) / len(numbers) if numbers else math.nan


def _spark(value: float, highest: float) -> str:
    if math.isnan(value):
        return " "
    if highest <= 0 or value <= 0:
        return _SPARKS[0]
    return _SPARKS[min(len(_SPARKS) - 1, max(1, math.ceil(value / highest * len(_SPARKS)) - 1))]
