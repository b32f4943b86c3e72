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
    """Write log records of `level` and above to standard error, in the logging format `layout`. Do nothing if logging
    was configured before.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter(layout))
    logging.basicConfig(level=level, handlers=[handler])


class PrintableFormatter(logging.Formatter):
    """A formatter of log records that escapes unprintable characters, so that each record is one line. A traceback
    keeps its lines.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # the standard library's name
        return printable(super().formatMessage(record))

    def formatException(self, ei: _Raised) -> str:  # noqa: N802  # as above
        return printable_lines(super().formatException(ei))
