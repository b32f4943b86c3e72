"""What is said of a name that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(names)}"
