"""Lists on the command line: separated by commas, by blanks, or by both."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any


class ListAction(argparse.Action):
    """With nargs="+": `1 4 16`, `1,4,16` and `"1, 4"` are the same. `of` makes an item of a word."""

    def __init__(self, *, of: Callable[[str], Any] = str, **settings: Any) -> None:
        super().__init__(nargs="+", **settings)
        self._of = of

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        words = " ".join(map(str, values or ())).replace(",", " ").split()
        try:
            found = [self._of(word) for word in words]
        except ValueError:
            kind = {int: "whole numbers", float: "numbers"}.get(self._of, "names")  # type: ignore[call-overload]
            parser.error(f"argument {option_string}: {kind} are wanted, got {' '.join(words)!r}")
        if not found:
            parser.error(f"argument {option_string}: expected at least one")
        setattr(namespace, self.dest, found)
