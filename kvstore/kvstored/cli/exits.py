"""The one line that a mistake or a failure gets, and its exit status."""

from __future__ import annotations

from kvstore_console.command_line import report_error
from kvstored.exits import EXIT_FAILED, EXIT_USAGE


def mistake(message: str) -> int:
    """The user got something wrong."""
    return report_error("kvstored", message, EXIT_USAGE)


def failure(message: str) -> int:
    """It could not be done."""
    return report_error("kvstored", message, EXIT_FAILED)
