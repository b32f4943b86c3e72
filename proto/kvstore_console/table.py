"""Aligned columns of text for a terminal or a pipe, without colour or wrapping."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore_console.printable import printable

_GAP = "  "


def render_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, empty: str = "") -> str:
    """Return a text table: a line of `headings`, then one line for each of `rows`, with aligned columns. Return `empty`
    if there are no rows. A heading that begins with ">" aligns its column right, for numbers.
    """
    if not rows:
        return empty
    is_number = [heading.startswith(">") for heading in headings]
    lines = [[heading.removeprefix(">") for heading in headings], *([printable(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        _GAP.join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, is_number, strict=True)
        ).rstrip()
        for line in lines
    )


def render_facts(pairs: Sequence[tuple[str, str]], indent: str = "") -> str:
    """Return one line of text for each of `pairs`, a name and a value, with the values aligned. Each line begins with
    `indent`.
    """
    width = max((len(name) for name, _ in pairs), default=0)
    return "\n".join(f"{indent}{name.ljust(width)}{_GAP}{printable(value)}" for name, value in pairs)
