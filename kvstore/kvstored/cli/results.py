"""The result of a simulation goes to standard output, and as a page to a file: the last step of every mode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvstored.exits import EXIT_OK, failure


def hand_over(print_all: Callable[[], None], plot: Path | None, page: Callable[[], str]) -> int:
    """The exit status. Raises BrokenPipeError, and OSError with what could not be written."""
    try:
        print_all()
    except BrokenPipeError:  # `| head`
        raise
    except OSError as error:
        raise OSError(error.errno, f"cannot write the result: {error.strerror}") from None
    if plot is not None:
        try:
            plot.write_text(page(), encoding="utf-8", errors="xmlcharrefreplace")
        except OSError as error:
            return failure(f"cannot write {plot}: {error.strerror}")
    return EXIT_OK
