"""What kvctl's exit status says, and the one exception that carries it to `main`."""

from __future__ import annotations

from typing import Any, Final

OK: Final = 0
FAILED: Final = 1
USAGE: Final = 2
UNREACHABLE: Final = 3
DENIED: Final = 4
MISS: Final = 5

MEANINGS: Final = {
    OK: "done",
    FAILED: "the daemon refused or failed",
    USAGE: "wrong usage",
    UNREACHABLE: "no daemon reachable",
    DENIED: "permission denied",
    MISS: "not stored, or not all of it",
}


class CommandError(Exception):
    """A command that ends without success: a message for people, an exit code, and facts for `--json`."""

    def __init__(self, exit_code: int, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.facts = facts
