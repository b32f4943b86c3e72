"""The study's lines as text for people and as CSV for programs. Pure."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from kvstore_console.table import render_table
from study.tables import Line

_WORDS = {True: "met", False: "MISSED", None: "-"}


def hits_text(lines: Sequence[Line]) -> str:
    """A table for each trace and part: a policy a row, three columns a capacity."""
    parts = []
    for (trace, part), group in groupby(lines, key=lambda line: (line["trace"], line["part"])):
        found = list(group)
        capacities = list(dict.fromkeys(line["capacity"] for line in found))
        policies = list(dict.fromkeys(line["policy"] for line in found))
        by_name = {(line["policy"], line["capacity"]): line for line in found}
        count = found[0]["n"]
        head = [f"{trace}, {part} ({count})"]
        for capacity in capacities:
            head += [f"{capacity:.0%}", "±", "least", "most", "share"]
        rows = []
        for policy in policies:
            row = [policy]
            for capacity in capacities:
                line = by_name.get((policy, capacity))
                if line is None:
                    row += [""] * 5
                    continue
                row += [f"{line['mean']:.4f}", f"{line['std']:.4f}", f"{line['min']:.4f}", f"{line['max']:.4f}"]
                row.append("" if line["share"] is None else f"{line['share']:.2f}")
            rows.append(row)
        parts.append(render_table([head[0], *(f">{name}" for name in head[1:])], rows))
    return "\n\n".join(parts)


def lines_text(lines: Sequence[Line]) -> str:
    """One line a row, all of its facts."""
    return render_table(headings_of(lines), rows_of(lines))


def headings_of(lines: Sequence[Line]) -> list[str]:
    """As `render_table` takes them; nothing for no lines."""
    names = [name.replace("_", " ") for name in (lines[0] if lines else ())]
    return [name if at < 2 else f">{name}" for at, name in enumerate(names)]


def rows_of(lines: Sequence[Line]) -> list[list[str]]:
    """The cells below the headings."""
    return [[_cell(name, line.get(name)) for name in lines[0]] for line in lines]


def _cell(name: str, value: Any) -> str:
    if value is None or isinstance(value, bool):
        return _WORDS[value]
    if name == "capacity":
        return f"{value:.0%}"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def as_csv(sections: dict[str, list[Line]]) -> str:
    """All sections in one table; a column that a section lacks is empty."""
    names = list(dict.fromkeys(name for lines in sections.values() for line in lines for name in line))
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=["section", *names], lineterminator="\n")
    writer.writeheader()
    for section, lines in sections.items():
        writer.writerows({"section": section, **line} for line in lines)
    return out.getvalue()
