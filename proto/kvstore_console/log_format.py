"""Log records on one line each, free of terminal escape sequences."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import TypeAlias

from kvstore_console.printable import printable, printable_lines

_Raised: TypeAlias = (
    tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
)  # of the standard library's logging


def log_to_stderr(level: int | str, layout: str) -> None:
    """Log to standard error in the format `layout`, unless logging was configured before."""
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter(layout))
    logging.basicConfig(level=level, handlers=[handler])


class PrintableFormatter(logging.Formatter):
    """A formatter that writes a log record on one line and escapes its arguments; a traceback keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # the standard library's name
        return printable(super().formatMessage(record))

    def formatException(self, ei: _Raised) -> str:  # noqa: N802  # as above
        return printable_lines(super().formatException(ei))
