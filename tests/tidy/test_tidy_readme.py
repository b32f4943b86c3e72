"""The README's first steps work as they are printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from demo.first_light import Answer, Result
from demo.next_turn import Turn
from demo.report import as_text
from tests.reference.running_daemon import running_daemon
from tests.tidy.tree import ROOT

_README = ROOT / "README.md"


def _between(marker: str) -> str:
    found = re.search(rf"<!-- {marker} -->\n(.*?)<!-- /{marker} -->", _README.read_text(), re.DOTALL)
    assert found is not None, f"README.md has no place marked {marker}"
    return found[1]


def test_the_python_example_prints_what_it_says(tmp_path: Path) -> None:
    code = re.search(r"```python\n(.*?)```", _between("example"), re.DOTALL)
    printed = re.search(r"```text\n(.*?)```", _between("example"), re.DOTALL)
    assert code is not None
    assert printed is not None
    script = tmp_path / "example.py"
    script.write_text(code[1])
    with running_daemon() as daemon:
        environment = {**os.environ, "KVSTORED_SOCKET_DIR": str(daemon.socket_dir)}
        run = subprocess.run(
            [sys.executable, "-W", "error", script], env=environment, capture_output=True, text=True, timeout=60
        )
    assert run.returncode == 0, run.stderr
    assert run.stdout == printed[1]


def test_the_output_shown_has_the_columns_of_the_demo() -> None:
    shown = _between("demo-output")
    result = Result("any model")
    for name in ("cold", "dram", "nvme", "restart", "damaged"):
        result.answers.append(Answer(name, "", [], 1, 1.0, 1.0, 0, 0, 0, 0))
    header, *rows = [
        line
        for line in as_text(result, Turn(1.0, 1.0, 1.0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0)).split("\n\n")[0].splitlines()
        if line
    ]
    assert header.split("  ")[-1].strip() in shown
    assert re.sub(r"\s+", " ", header).strip() in re.sub(r"[ ]+", " ", shown), "run `make demo` and show what it prints"
    for row in rows:
        assert re.split(r"\s{2,}|\d", row)[0].strip() in shown


def test_the_first_screen_is_short_and_names_both_commands() -> None:
    first = _README.read_text().partition("<!-- demo-output -->")[0]
    assert len(first.splitlines()) < 20
    assert "$ make demo" in first
    assert "$ make test" in first
