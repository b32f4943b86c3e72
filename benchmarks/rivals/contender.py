"""One side of a comparison: a child process that carries out requests and reports how long they took.

Owns the child's life and the line protocol of `workers/serving.py`. Never measures, and never knows whose child it is:
ours and a rival's are started, asked and ended by the same code.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Command = Sequence[str | Path]

WORKERS = Path(__file__).resolve().with_name("workers")
STOP_TIMEOUT_S = 20.0
LOG_TAIL_LINES = 15


class ContenderError(RuntimeError):
    """A contender could not do its work; the message has the end of what it printed."""


class Contender:
    """`ask` gives the result of one operation."""

    def __init__(self, name: str, child: subprocess.Popen[str], log: Path) -> None:
        self.name = name
        self._child = child
        self._log = log
        self.operations: tuple[str, ...] = tuple(self._answer()["ready"])

    def ask(self, operation: str, **arguments: object) -> Any:
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps({"do": operation, **arguments}) + "\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            raise self._failed("ended") from None
        answer = self._answer()
        if "error" in answer:
            raise self._failed(f"could not {operation}: {answer['error']}")
        return answer["result"]

    def _answer(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise self._failed("ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failed(self, what: str) -> ContenderError:
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
        return ContenderError(f"{self.name} {what}\n{tail}")


@contextmanager
def _child(
    command: Command, environment: Mapping[str, str] | None, **pipes: int
) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A child and the path of its log; it ends when its input does, or is killed. `pipes`: other than to the log."""
    with tempfile.TemporaryDirectory(prefix="kvrival-") as directory:
        log = Path(directory) / "log"
        with log.open("wb") as output:
            files: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output} | pipes
            env = {**os.environ, **(environment or {})}
            child = subprocess.Popen([str(part) for part in command], cwd=directory, text=True, env=env, **files)
            try:
                yield child, log
            finally:
                end(child)


@contextmanager
def contender(name: str, command: Command, environment: Mapping[str, str] | None = None) -> Iterator[Contender]:
    """A child that has said it is ready."""
    with _child(command, environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as (child, log):
        yield Contender(name, child, log)


@contextmanager
def server(name: str, command: Command, environment: Mapping[str, str] | None = None) -> Iterator[Path]:
    """A rival's server while the context lasts; gives the path of its log."""
    with _child(command, environment) as (child, log):
        try:
            yield log
        finally:
            child.terminate()
            end(child)
            if child.returncode not in (0, -15, None):
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
                print(f"{name} ended with {child.returncode}:\n{tail}")


def end(child: subprocess.Popen[Any]) -> None:
    """Close its input, wait, and kill what does not end by itself."""
    if child.stdin is not None:
        child.stdin.close()
    try:
        child.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
