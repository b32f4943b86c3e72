"""The listings of a page: its ```console blocks, the commands in them, and what they are said to print.

Runs the commands of a page one after the other in one shell, as a reader would, and says where the page and the
output differ. Numbers, sizes, times, hashes and bars may differ; words, columns and their order may not. `[...]`
stands for any text in a line, and for any lines where it is alone.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r"^```console\n(.*?)^```", re.DOTALL | re.MULTILINE)
_BARS = re.compile("[▀-▟]+")
_HASH = re.compile(r"\b(?=[a-f]*\d)[0-9a-f]{8,}\b")
_VERSION = re.compile(r"\b\d+\.\d+\.\d+(?:\.?[a-z]+\d+)*(?:\+[\w.]+)?|\b\d+\+\w+")
_DURATION = re.compile(r"\d+ (?:d|h|min) \d+ (?:h|min|s)\b")
_RUN = re.compile(r"\b\d+-\d+\b")  # of rows that say the same
_AMOUNT = re.compile(r"\d[\d,.:]*(?: (?:[KMGT]?i?B|ns|us|µs|ms|s|min|h|d)(?:/s)?(?![\w-]))?")
_NOTHING = re.compile(r"(?<!\S)-(?!\S)")  # a cell of a table that has no number this time
_PLURAL = re.compile(r"\b(block|client|lease|sample|slot|warning|ping)s?\b")
_CLASS = re.compile(r"\b(?:hot|warm|cold)\b")  # what the policy expects of a block: it learns
_PROGRESS = re.compile(r"kvctl \w+: \w+ \d+(?: of \d+)?")  # of a long command; a terminal wipes it
_VARYING = (
    (_BARS, ""), (_VERSION, "#"), (_HASH, "#"), (_DURATION, "#"), (_RUN, "#"), (_AMOUNT, "#"), (_NOTHING, "#"),
    (_PLURAL, r"\1s"), (_CLASS, "class"),
)  # fmt: skip
_ANYTHING = "[...]"
_CAUSES = "missed for "


@dataclass(frozen=True, slots=True)
class Command:
    """A command as it is typed after a `$`, and the lines that the page shows below it."""

    typed: str
    shown: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """One listing. Lines after a `#` are for root: `typed_by_root`."""

    commands: tuple[Command, ...]
    typed_by_root: tuple[str, ...]

    @property
    def name(self) -> str:
        """Return the name of the first command, without the comment behind it."""
        first = [*(command.typed for command in self.commands), *self.typed_by_root][0]
        return first.partition("  #")[0].rstrip()


def blocks_of(page: Path) -> list[Block]:
    return [_parsed(match[1]) for match in _BLOCK.finditer(page.read_text())]


def _parsed(text: str) -> Block:
    commands: list[Command] = []
    by_root: list[str] = []
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith("# "):
            by_root.append(line[2:])
        elif line.startswith("$ "):
            typed = line[2:]
            while typed.endswith("\\"):
                typed += "\n" + next(lines)
            commands.append(Command(typed, ()))
        elif commands:
            last = commands.pop()
            commands.append(Command(last.typed, (*last.shown, line)))
    return Block(tuple(commands), tuple(by_root))


class Shell:
    """A bash that lives as long as the page, so that what is exported stays. Standard error is read with the output."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self._bash = subprocess.Popen(
            ["bash", "--norc"], cwd=directory, env=environment, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def __enter__(self) -> Shell:
        return self

    def __exit__(self, *_: object) -> None:
        self._bash.kill()
        self._bash.communicate()

    def run(self, typed: str) -> tuple[str, int]:
        """Run the commands; return what they printed and the exit status, which the next command finds in `$?`."""
        assert self._bash.stdin is not None
        assert self._bash.stdout is not None
        self._bash.stdin.write(f'{typed}\n{{ s=$?; printf "\\n\\001%s\\n" $s; (exit $s); }}\n')
        self._bash.stdin.flush()
        printed = []
        for line in self._bash.stdout:
            if line.startswith("\x01"):
                return "".join(printed).removesuffix("\n"), int(line[1:])
            printed.append(line)
        raise AssertionError(f"the shell ended at: {typed}\n{''.join(printed)}")


def run_in_background(typed: str, directory: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """A command that serves until it is stopped. What it prints goes to `serve.log` in the directory."""
    with open(directory / "serve.log", "ab") as log:
        return subprocess.Popen(["bash", "-c", f"exec {typed}"], cwd=directory, env=environment, stdout=log, stderr=log)


def environment_with(commands: Path, **variables: str) -> dict[str, str]:
    """This process's environment with `commands` first on the PATH, and nothing of ours in it."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("KVSTORED_", "KVENGINE_"))}
    return plain | {"PATH": f"{commands}:{os.environ['PATH']}", "NO_COLOR": "1"} | variables


def difference(shown: tuple[str, ...], printed: str, *, outline: bool = False) -> str:
    """Empty where `printed` is what the page shows. With `outline` it is enough that the first cells of the lines
    shown are first cells of lines printed, in that order: for pictures of a busy daemon and of another machine.
    """
    lines = [line for line in printed.splitlines() if line.strip() and not _PROGRESS.fullmatch(line)]
    wanted = [line for line in shown if line.strip()]
    if outline:
        cells = iter([_first_cell(line) for line in lines])
        missing = [
            line
            for line in wanted
            if line.strip() != _ANYTHING and not any(_line_matches(_first_cell(line), cell) for cell in cells)
        ]
        return f"not printed, or not in this order: {missing[0]!r}" if missing else ""
    return "" if _matches([normal(line) for line in wanted], [normal(line) for line in lines]) else "another text"


def _matches(shown: list[str], printed: list[str]) -> bool:
    if not shown:
        return not printed
    if shown[0] == _ANYTHING:
        return any(_matches(shown[1:], printed[skipped:]) for skipped in range(len(printed) + 1))
    return bool(printed) and _line_matches(shown[0], printed[0]) and _matches(shown[1:], printed[1:])


def _line_matches(shown: str, printed: str) -> bool:
    return re.fullmatch(".*".join(re.escape(part) for part in shown.split(_ANYTHING)), printed) is not None


def normal(line: str) -> str:
    """A line without what may differ from run to run."""
    for pattern, instead in _VARYING:
        line = pattern.sub(instead, line)
    return " ".join(line.split())


def _first_cell(line: str) -> str:
    if line.startswith(_CAUSES):  # which ones there are depends on what ran before
        return _CAUSES
    cells = re.split(r"\s{2,}", line.strip())
    level, *rest = cells[0].split(maxsplit=1)
    if level in ("ok", "warn", "FAIL"):
        return rest[0] if rest else cells[1]
    return normal(cells[0])
