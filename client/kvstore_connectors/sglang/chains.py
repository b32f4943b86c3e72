"""Which page is before which: SGLang names the pages of a prompt in order when it asks for them, and stores a part of
them later without saying what is before it.

Owns a bounded memory of that, by SGLang's hashes. A page whose predecessor is not known begins a chain of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

MOST_PAGES = 1 << 16  # about 16 MiB of hashes


class Chains:
    """Used by one thread."""

    def __init__(self, most: int = MOST_PAGES) -> None:
        self._most = most
        self._before: OrderedDict[str, str] = OrderedDict()

    def saw(self, hashes: Sequence[str]) -> None:
        """These pages follow each other."""
        for before, after in pairwise(hashes):
            self._before[after] = before
            self._before.move_to_end(after)
        while len(self._before) > self._most:
            self._before.popitem(last=False)

    def before(self, page: str) -> str | None:
        return self._before.get(page)
