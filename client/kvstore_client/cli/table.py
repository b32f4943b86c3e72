"""Aligned columns of text for a terminal or a pipe. Knows strings only; no colour, no wrapping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore_proto.printable import printable

GAP = "  "


@dataclass(frozen=True, slots=True)
class Column:
    """A heading, and whether its cells are numbers (set to the right)."""

    heading: str
    is_number: bool = False


def render_table(columns: Sequence[Column], rows: Sequence[Sequence[str]], *, empty: str) -> str:
    """A heading line and one line a row; `empty` instead when there are no rows."""
    if not rows:
        return empty
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(column.heading), *(len(row[index]) for row in rows)) for index, column in enumerate(columns)]
    lines = [_line(columns, widths, [column.heading for column in columns])]
    lines.extend(_line(columns, widths, row) for row in rows)
    return "\n".join(lines)


def render_facts(facts: Sequence[tuple[str, str]]) -> str:
    """Name and value, one pair a line, values aligned."""
    width = max((len(name) for name, _ in facts), default=0)
    return "\n".join(f"{name.ljust(width)}{GAP}{printable(value)}" for name, value in facts)


def _line(columns: Sequence[Column], widths: Sequence[int], cells: Sequence[str]) -> str:
    parts = [
        cell.rjust(width) if column.is_number else cell.ljust(width)
        for column, width, cell in zip(columns, widths, cells, strict=True)
    ]
    return GAP.join(parts).rstrip()
