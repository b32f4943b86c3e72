"""Ctrl-C while a program still loads its modules, which takes most of the time of a short command."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys

class Interrupted:
    def find_spec(self, name, *_):
        if name == "numpy":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupted())
from MODULE import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    "command", ["kvctl.main status", "kvstored.cli inspect /tmp slot 1:1", "kvstore_engine.cli.main info x"]
)
def test_an_interrupt_while_modules_load_is_no_traceback(command: str) -> None:
    module, *words = command.split()
    run = [sys.executable, "-c", PROGRAM.replace("MODULE", module), *words]
    ended = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")
