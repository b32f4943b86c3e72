"""The last step of every mode of `kvstored simulate`: results go to standard output, and as a page to a file."""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvstored.exits import EXIT_OK, failure, mistake

if TYPE_CHECKING:
    from kvstore_simulator.page_trace import PageTrace
    from kvstore_simulator.trace import Trace

Advance = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Results:
    """The results of a study of `trace` with the model size `model`: `facts` and `rows` for machines, `text` and an
    HTML `page` for people. `note` is text that no row has, printed beside --csv.
    """

    trace: Trace | PageTrace
    model: str
    facts: dict[str, Any]
    rows: list[dict[str, Any]]
    text: str
    page: Callable[[], str] = str
    note: str = ""


def carry_out(arguments: argparse.Namespace, find: Callable[[Advance], Results]) -> int:
    """Call `find`, which runs a study, and print its results in the form that `arguments` choose. Write the HTML page
    if the user wants one. Return the exit status. Raises BrokenPipeError, and OSError with the file that could not be
    written.
    """
    from kvstore_console.progress import Progress

    try:
        with Progress("kvstored simulate") as progress:
            found = find(progress.advance)
    except ValueError as error:
        return mistake(str(error))
    except OSError as error:
        return mistake(f"cannot read {error.filename or arguments.trace}: {error.strerror or error}")
    trace = found.trace
    if trace.cut_after is not None:
        print(f"{trace.name} is cut off after line {trace.cut_after}: later requests are not counted", file=sys.stderr)
    try:
        _print(arguments, found)
    except BrokenPipeError:  # `| head`
        raise
    except OSError as error:
        raise OSError(error.errno, f"cannot write the result: {error.strerror}") from None
    if arguments.plot is not None:
        try:
            arguments.plot.write_text(found.page(), encoding="utf-8", errors="xmlcharrefreplace")
        except OSError as error:
            return failure(f"cannot write {arguments.plot}: {error.strerror}")
    return EXIT_OK


def _print(arguments: argparse.Namespace, found: Results) -> None:
    from kvstore_simulator.report import as_csv

    if arguments.json:
        trace = found.trace
        about = {
            "trace": trace.name, "format": trace.format, "seed": arguments.seed, "part": arguments.part,
            "block_tokens": trace.block_tokens, "model": found.model,
        }  # fmt: skip
        print(json.dumps(about | found.facts | {"rows": found.rows}))
    elif arguments.csv:
        print(as_csv(found.rows), end="")
        if found.note:
            print(found.note, file=sys.stderr)
    else:
        print(found.text)
    sys.stdout.flush()


def keep() -> None:
    """Exclude all present objects, such as the trace, from garbage collection, as the daemon does with its long-lived
    objects.
    """
    gc.freeze()
