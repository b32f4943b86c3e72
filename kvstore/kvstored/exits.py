"""Exit statuses of the `kvstored` command, and the one-line messages for a mistake or a failure."""

from __future__ import annotations

# docs/kvstored.md lists them.
EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_DAMAGE, EXIT_HANGS = 0, 1, 2, 3, 4


def mistake(message: str) -> int:
    """Print `message`, about a user's mistake, and return the exit status for it."""
    return _report(message, EXIT_USAGE)


def failure(message: str) -> int:
    """Print `message`, about a failure, and return the exit status for it."""
    return _report(message, EXIT_FAILED)


def _report(message: str, status: int) -> int:
    from kvstore_console.command_line import report_error  # which small processes of the daemon do without

    return report_error("kvstored", message, status)
