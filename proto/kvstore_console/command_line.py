"""Command lines, alike in the three programs: help, reports of mistakes, types of options, and how a program ends.

Invariant: a mistake of the user and a failure are one line on standard error and an exit status, never a traceback;
with --json among the words of the command line also one object on standard output.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any, Final, NoReturn, TypeAlias

from kvstore_console.printable import printable, printable_lines
from kvstore_console.units import parse_size

OK: Final = 0
FAILED: Final = 1
USAGE: Final = 2
INTERRUPTED: Final = 130  # 128 + SIGINT, as shells report it
MAX_SECONDS: Final = 86_400


class WrongUsage(Exception):
    """The error of a command line that is wrong. `program` is the program or subcommand that was called."""

    def __init__(self, program: str, message: str) -> None:
        super().__init__(message)
        self.program = program


_given: list[str] = []  # the words of the command line that is obeyed
_REST = {argparse.PARSER, argparse.REMAINDER}
_AS_USUAL = {"-h", "--help", "--"}  # words with which argparse cannot parse in two passes


class Parser(argparse.ArgumentParser):
    """An argument parser whose help keeps the line breaks of descriptions and examples. It raises WrongUsage for a
    mistake, which `parse` reports.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **settings)
        self._is_intermixed = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse `args` as argparse does, and take an optional positional argument behind options, too.

        argparse takes as many positional arguments as it can at the first of them: in `put --file FILE NAME`, where
        NAME is optional, it takes none and then does not know NAME.
        """
        given = sys.argv[1:] if args is None else list(args)
        wanted = {each.nargs for each in self._get_positional_actions()}
        is_plain = not _AS_USUAL.isdisjoint(given) or wanted.isdisjoint("?*") or not wanted.isdisjoint(_REST)
        if self._is_intermixed or is_plain:
            return super().parse_known_args(given, namespace)
        self._is_intermixed = True
        try:
            return self.parse_known_intermixed_args(given, namespace)
        finally:
            self._is_intermixed = False

    def error(self, message: str) -> NoReturn:
        raise WrongUsage(self.prog, message)


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"  # what `add_subparsers` returns


def parse(
    parser: Parser,
    argv: Sequence[str] | None = None,
    check: Callable[[argparse.Namespace], None] | None = None,
) -> argparse.Namespace:
    """Parse the command line `argv` (by default the program's) and return the options. `check` may refuse them by
    `parser.error`. A mistake ends the program with the status USAGE.
    """
    given = sys.argv[1:] if argv is None else argv
    try:
        options = parser.parse_args(given)
        if check is not None:
            check(options)
    except WrongUsage as wrong:
        _given[:] = given
        _print_object(str(wrong), USAGE)
        parser.exit(USAGE, printable_lines(f"{wrong.program}: {wrong}\ntry: {wrong.program} --help\n"))
    return options


def report_error(program: str, message: str, status: int, **facts: Any) -> int:
    """Print the program's name and `message` as one line on standard error, and return the exit status `status`. Where
    the command line has --json, print the message, the status and `facts` on standard output, too."""
    _print_object(message, status, **facts)
    print(printable(f"{program}: {message}"), file=sys.stderr)
    return status


def _print_object(error: str, exit_code: int, **facts: Any) -> None:
    if "--json" in _given:
        import json

        print(json.dumps({"error": error, "exit_code": exit_code, **facts}))


def run_program(
    program: str, argv: Sequence[str] | None, run: Callable[[], int], *, unencodable: str = "backslashreplace"
) -> int:
    """Call `run`, which obeys the command line `argv` (by default the program's), and return its exit status. A closed
    output, an interrupt by the user and an OSError such as a full
    disk become a status too, without a traceback. `unencodable` is the error handler, as `codecs` names it, for
    letters that the output's encoding lacks.
    """
    _prepare_streams(unencodable)
    _given[:] = sys.argv[1:] if argv is None else argv
    try:
        status = run()
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `... | head`
        _discard_output()
        return OK
    except OSError as error:  # what a command has not explained better itself: a full disk behind a redirection
        _discard_output()
        place = f": {error.filename}" if error.filename else ""
        return report_error(program, f"{error.strerror or error}{place}", FAILED)


def size(text: str) -> int:
    """Return the bytes of an option's `text`, such as 4096, 64KiB or 1.5MiB. Raises ArgumentTypeError for other
    text.
    """
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def whole_number(lowest: int, highest: int) -> Callable[[str], int]:
    """Return a converter for an option that takes a whole number from `lowest` to `highest`, both included. The
    converter raises ArgumentTypeError for other text.
    """

    def convert(text: str) -> int:
        if not text.isdecimal() or not lowest <= int(text) <= highest:
            raise argparse.ArgumentTypeError(f"must be a whole number from {lowest} to {highest}, got {text!r}")
        return int(text)

    return convert


def seconds(text: str) -> float:
    """Return the seconds of an option's `text`: a number above 0 and at most a day. Raises ArgumentTypeError for other
    text.
    """
    value = _number(text)
    if not 0 < value <= MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"seconds must be above 0 and at most {MAX_SECONDS}, got {text!r}")
    return value


def words(text: str) -> list[str]:
    """Split the `text` of a command line's list at commas and blanks, and return its words."""
    return text.replace(",", " ").split()


def one_of(option: str, text: str, known: Collection[str]) -> str:
    """Return `text`, the value of `option`, if it is one of the words in `known`. Raises ValueError with one line that
    names the option.
    """
    names = some_of(option, text, known)
    if len(names) > 1:
        raise ValueError(f"{option} {text}: one of {', '.join(known)}")
    return names[0]


def some_of(option: str, text: str, known: Collection[str], every: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Split `text`, the value of `option`, at commas and blanks, and return its words, each once. The word "all" stands
    for the words `every`. Raises ValueError with one line if a word is not in `known`.
    """
    if text == "all" and every:
        return every
    names = tuple(dict.fromkeys(words(text) or [text]))
    for name in names:
        if name not in known:
            from difflib import get_close_matches

            near = get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{option}: {name!r} is unknown; known: {', '.join(known)}{hint}")
    return names


class ListAction(argparse.Action):
    """An argparse action for an option that takes a list, written as `1 4 16`, `1,4,16` or `"1, 4"`. `of` converts a
    word to an item of the list, and raises ValueError for a wrong word.
    """

    def __init__(self, *, of: Callable[[str], Any] = str, **settings: Any) -> None:
        super().__init__(nargs="+", **settings)
        self._of = of

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        given = words(" ".join(map(str, values or ())))
        try:
            found = [self._of(word) for word in given]
        except ValueError:
            kind = {int: "whole numbers", float: "numbers"}.get(self._of, "names")  # type: ignore[call-overload]
            parser.error(f"argument {option_string}: {kind} are wanted, got {' '.join(given)!r}")
        if not found:
            parser.error(f"argument {option_string}: expected at least one")
        setattr(namespace, self.dest, found)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def _prepare_streams(unencodable: str) -> None:
    """Set how the standard streams write letters they cannot encode; a stream that was closed before the start discards
    its output.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # for as long as the process lives
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=unencodable)


def _discard_output() -> None:
    """Discard what standard output still holds; otherwise the interpreter would try to write it again at its end."""
    with suppress(OSError):  # what stands in for it may have no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
