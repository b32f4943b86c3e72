"""A process that answers questions, one line of JSON each way; it keeps the sides of a comparison apart.

The module owns the process and the protocol. A process has one ggml, so no two sides share one; a child that is not
asked waits for its input and takes no core from the side whose turn it is. A child's standard error is shown to the
user.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvstore_engine.errors import OperationError

_READY = "ready"
_END_S = 30.0


class ServerChild:
    """A child process that runs a Python module and answers questions over pipes. It has reported that it is ready when
    the object is made.
    """

    def __init__(
        self, module: str, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        self._name = " ".join([module.rpartition(".")[2], *arguments[:1]])
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        try:
            if self._read() != _READY:
                raise OperationError(f"{self._name} did not start as it should")
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, question: Mapping[str, object]) -> Any:
        """Send `question` as a line of JSON and return the answer. Raises OperationError if the child has ended."""
        assert self._process.stdin is not None
        try:
            print(json.dumps(question), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._ended() from None
        return self._read()

    def close(self) -> None:
        """Ask the child process to end, and kill it if it still runs after 30 seconds."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        return json.loads(line)

    def _ended(self) -> OperationError:
        return OperationError(f"{self._name} ended early, with exit code {self._process.wait(_END_S)}")


def answer_questions(respond: Callable[[dict[str, Any]], object]) -> None:
    """Run a child process: report that it is ready, then call `respond` with each question and send the answer, until
    the parent closes its end.
    """
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints must not be taken for an answer
    print(json.dumps(_READY), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(respond(json.loads(line))), file=out, flush=True)
