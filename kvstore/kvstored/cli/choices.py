"""Names out of a list of known ones, as arguments give them."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches


def one_of(option: str, text: str, known: Collection[str]) -> str:
    """Raises ValueError with one line."""
    names = some_of(option, text, known)
    if len(names) > 1:
        raise ValueError(f"{option} {text}: one of {', '.join(known)}")
    return names[0]


def words(text: str) -> list[str]:
    """A list of the command line, separated by commas or blanks."""
    return text.replace(",", " ").split()


def some_of(option: str, text: str, known: Collection[str], every: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Separated by commas or blanks, each once; `every` is what all stands for. Raises ValueError with one line."""
    if text == "all" and every:
        return every
    names = tuple(dict.fromkeys(name.strip() for name in words(text) or [text]))
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{option}: {name!r} is unknown; known: {', '.join(known)}{hint}")
    return names
