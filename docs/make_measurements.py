"""Write docs/measurements.md from the result files in benchmarks/results: `make docs`.

A result file is one section, in the order of the files' names. It has a `title`, perhaps an `about`, and `rows`:

- Without `columns` a row is an object with `figure`, `measured`, and perhaps `target`, `missed` (true: the target was
  not reached) and `note` (one short sentence).
- With `columns` a row is a list of cells.

`machine`, `date`, `commit` and `command` stand in the file for all of its rows, or in a row. null means: not recorded.
The machines are described in benchmarks/results/machines.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from string import ascii_lowercase
from typing import Any

RESULTS = Path(__file__).parent.parent / "benchmarks/results"
TARGET = Path(__file__).with_name("measurements.md")
_MACHINES = "machines.json"
_HEAD = """# Measurements

Written by `make docs` from `benchmarks/results/`: change a result file, not this page. [status.md](status.md) has the
dozen figures that matter most.

**Bold**: the target, which was set before the measurement, was missed. A command is `python benchmarks/COMMAND`, most
with `--quick` and `--json`; `make bench` runs most of them, `make bench-rivals` those with other stores. Compare
ratios, not milliseconds: client, daemon and all else share two cores.
"""
_TAIL = """## Figures on other pages

[Matrix products](engine.md#products), [logits](engine.md#compared-with-llamacpp), [lookups](lookup-index.md#measured),
[predictors](prediction.md#figures), [decisions](adr/).
"""


def page(results: Path = RESULTS) -> str:
    """Return the text of the page for a folder of result files."""
    sections = [json.loads(path.read_text()) for path in result_files(results)]
    return "\n".join([_HEAD, *_machines(results), *(line for each in sections for line in _section(each)), _TAIL])


def result_files(results: Path = RESULTS) -> list[Path]:
    """Return the result files in the order of the page."""
    return [path for path in sorted(results.glob("*.json")) if path.name != _MACHINES]


def _machines(results: Path) -> Iterator[str]:
    rows = json.loads((results / _MACHINES).read_text()).items()
    yield from _table(("machine", "what it is"), [list(row) for row in rows])
    yield ""


def _section(result: dict[str, Any]) -> Iterator[str]:
    yield f"## {result['title']}\n"
    if about := result.get("about"):
        yield f"{about}\n"
    if columns := result.get("columns"):
        yield from _table(columns, result["rows"])
        yield f"\n{_origin(result)}.\n"
        return
    rows = [{**result, **row} for row in result["rows"]]
    origins = list(dict.fromkeys(map(_origin, rows)))
    letters = dict(zip(origins, ascii_lowercase, strict=False))
    named = len(origins) > 1
    yield from _table(
        ("figure", "target", "measured", *(("run",) if named else ())),
        [
            [row["figure"], row.get("target", ""), _measured(row), *((letters[_origin(row)],) if named else ())]
            for row in rows
        ],
    )
    yield f"\n{'; '.join(f'{letters[each]}: {each}' if named else each for each in origins)}.\n"


def _measured(row: dict[str, Any]) -> str:
    measured = f"**{row['measured']}**" if row.get("missed") else row["measured"]
    return f"{measured}. {row['note']}" if "note" in row else measured


def _origin(said: dict[str, Any]) -> str:
    """Return machine, date, commit and command of a row, each as recorded."""
    machine = said["machine"] or "machine not recorded"
    commit = f"commit `{said['commit']}`" if said["commit"] else ""
    command = f"`{said['command']}`" if said["command"] else "no command"
    return ", ".join(filter(None, (machine, said["date"] or "date not recorded", commit, command)))


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


if __name__ == "__main__":
    TARGET.write_text(page())
