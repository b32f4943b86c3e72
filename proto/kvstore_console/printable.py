"""Text that came from a disk or a wire, made fit for a terminal and for a log: what is not printable is spelled out.

A terminal obeys escape sequences, and a line break in a name makes one log line look like two. JSON is safe by itself.
Owns that one rule. Invariant: what is returned holds printable characters and blanks only; printable text comes back
as it is, so that it may pass here twice.
"""

from __future__ import annotations

import logging
from types import TracebackType
from typing import TypeAlias

_Raised: TypeAlias = (
    tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
)  # of the standard library's logging


def printable(text: str) -> str:
    """On one line: controls, line breaks, formatting characters and lone surrogates as \\x1b, \\n, \\u202e, \\udcff."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def printable_lines(text: str) -> str:
    """The same for text of our own making that has lines."""
    return "\n".join(map(printable, text.split("\n")))


def log_to_stderr(level: int | str, layout: str) -> None:
    """Let this process log its lines by `layout`, where nothing was configured before."""
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter(layout))
    logging.basicConfig(level=level, handlers=[handler])


class PrintableFormatter(logging.Formatter):
    """A log record is one line, and no argument of it reaches the terminal unescaped; a traceback keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # the standard library's name
        return printable(super().formatMessage(record))

    def formatException(self, ei: _Raised) -> str:  # noqa: N802  # as above
        return printable_lines(super().formatException(ei))
