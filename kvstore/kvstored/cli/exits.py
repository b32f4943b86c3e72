"""Exit statuses of the `kvstored` command, and the one line a mistake gets."""

from __future__ import annotations

import sys

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_DAMAGE = 0, 1, 2, 3


def mistake(message: str) -> int:
    """The user got something wrong: say what, on standard error."""
    print(f"kvstored: {message}", file=sys.stderr)
    return EXIT_USAGE


def failure(message: str) -> int:
    """It could not be done: say why, on standard error."""
    print(f"kvstored: {message}", file=sys.stderr)
    return EXIT_FAILED
