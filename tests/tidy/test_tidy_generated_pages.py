"""The generated pages: docs/api.md is not committed, docs/measurements.md and state-directory.md are, and fresh."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
from pathlib import Path

import pytest

from tests.tidy.tree import ROOT

MADE = runpy.run_path(str(ROOT / "docs/make_measurements.py"))
RESULTS: list[Path] = MADE["result_files"]()


def test_the_api_reference_has_every_public_name() -> None:
    made = runpy.run_path(str(ROOT / "docs/make_api.py"))
    page = made["page"]()
    for module, names in made["MODULES"].items():
        part = page.partition(f"\n## {module}\n")[2].partition("\n## ")[0]
        assert [name for name in names if f"### {name}\n" not in part] == [], module


def test_the_api_reference_is_not_committed() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    listed = subprocess.run(["git", "ls-files", "docs/api.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert listed.stdout == ""


def test_the_measurements_are_what_the_results_say() -> None:
    assert (ROOT / "docs/measurements.md").read_text() == MADE["page"](), "run `make docs`"


def test_the_page_of_the_state_directory_is_what_the_code_says() -> None:
    page = runpy.run_path(str(ROOT / "docs/make_state.py"))["page"]
    assert (ROOT / "docs/state-directory.md").read_text() == page(), "run `make docs`"


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_says_where_when_and_by_which_command(path: Path) -> None:
    """Each row has what the page shows of it, in words that fit a line; what is not known is null, not left out."""
    result = json.loads(path.read_text())
    assert {"title", "machine", "date", "commit", "command", "rows"} <= set(result)
    machines = {None, *json.loads((path.parent / "machines.json").read_text())}
    for row in result["rows"]:
        said = result | (row if isinstance(row, dict) else {})
        assert said["machine"] in machines, row
        assert said["date"] is None or re.fullmatch(r"20\d\d-\d\d-\d\d", said["date"]), row
        assert said["commit"] is None or re.fullmatch(r"[0-9a-f]{7,40}(\.\.[0-9a-f]{7,40})?", said["commit"]), row
        assert _is_there(said["command"]), row
        cells = row if isinstance(row, list) else [row["figure"], row["measured"], row.get("note", "")]
        assert len(cells) == len(result.get("columns", cells)) and max(len(cell.split()) for cell in cells) <= 30, row


def _is_there(command: str | None) -> bool:
    program = (command or "kvstored").split()[0]
    return program in ("kvstored", "kvengine") or any(
        (ROOT / folder / program).is_file() for folder in (".", "benchmarks")
    )
