"""The one line that a mistake gets, and its exit status."""

from __future__ import annotations

import sys

from kvstore_proto.printable import printable_lines
from kvstored.exits import EXIT_FAILED, EXIT_USAGE


def mistake(message: str) -> int:
    """The user got something wrong: say what, on standard error."""
    print(f"kvstored: {printable_lines(message)}", file=sys.stderr)
    return EXIT_USAGE


def failure(message: str) -> int:
    """It could not be done: say why, on standard error."""
    print(f"kvstored: {printable_lines(message)}", file=sys.stderr)
    return EXIT_FAILED
