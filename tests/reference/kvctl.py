"""kvctl as a user calls it, in this process: words in, exit code and captured output out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from kvctl.main import main
from kvctl.output import OK
from tests.reference.running_daemon import RunningDaemon


@dataclass
class Kvctl:
    """`capture` is pytest's capfdbinary: some commands write bytes to standard output. Words are split at blanks,
    unless given as a list.
    """

    daemon: RunningDaemon
    capture: Any

    def __call__(self, command: str | list[str], *, exit_code: int = OK) -> Any:
        words = command.split() if isinstance(command, str) else command
        self.capture.readouterr()
        code = main(["--socket-dir", str(self.daemon.socket_dir), "--timeout", "60", *words])
        printed = self.capture.readouterr()
        assert code == exit_code, (words, printed.out[-500:], printed.err)
        return SimpleNamespace(out=printed.out.decode(errors="replace"), bytes=printed.out, err=printed.err.decode())

    def json(self, command: str | list[str], *, exit_code: int = OK) -> Any:
        words = command.split() if isinstance(command, str) else command
        return json.loads(self([*words, "--json"], exit_code=exit_code).out)
