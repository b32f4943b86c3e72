"""Log records on one line each, with nothing in them that a terminal would obey."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import TypeAlias

from kvstore_console.printable import printable, printable_lines

_Raised: TypeAlias = (
    tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
)  # of the standard library's logging


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
