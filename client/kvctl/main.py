"""The entry of kvctl, which reports an interrupt and a failure also while the modules of the commands are loaded."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from kvstore_console.command_line import run_program


def main(argv: Sequence[str] | None = None) -> int:
    """Run kvctl and return its exit code. An error is one line on standard error and, with --json, also one object on
    standard output.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC's own log lines are not for operators
    words = sys.argv[1:] if argv is None else argv
    # A terminal that has no arrows and bars shows a question mark for each, so that columns stay aligned.
    return run_program("kvctl", words, lambda: _run(words), unencodable="replace")


def _run(words: Sequence[str]) -> int:
    from kvctl.commands import run  # with NumPy and gRPC: a third of a second

    return run(words)


if __name__ == "__main__":
    sys.exit(main())
