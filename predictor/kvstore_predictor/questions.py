"""Questions that a predictor asks itself: its present guesses, compared with the outcome once a horizon is over.

The module owns the open questions, and the blocks that concern them. Bounded: `most` questions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar

HORIZONS_S = (10.0, 60.0, 300.0)  # asked about in turn
_LEAST_S = 1e-6
Name = tuple[int, bytes]  # tenant and block


class Dated(Protocol):
    """A question (a set of guesses about requests) that can be judged after the time `due_s`."""

    due_s: float


Question = TypeVar("Question", bound=Dated)


def nearest(horizon_s: float) -> int:
    """Return the position in HORIZONS_S of the horizon that is nearest to `horizon_s` seconds."""
    return min(range(len(HORIZONS_S)), key=lambda number: abs(math.log(max(horizon_s, _LEAST_S) / HORIZONS_S[number])))


class OpenQuestions(Generic[Question]):
    """The questions whose outcome is not known yet, at most `most`. A question is a set of guesses that a predictor
    made at one time and compares with the requests that follow. A guess is named by its position in its question.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: list[tuple[Question, list[Name]]] = []
        self._by_block: dict[int, dict[bytes, list[tuple[Question, int]]]] = {}
        self._due_s = math.inf  # when the first is over

    @property
    def has_room(self) -> bool:
        return len(self._open) < self._most

    def ask(self, question: Question, concerns: Iterable[tuple[Name, int]]) -> None:
        """Add `question`, a set of guesses. Each of `concerns` is a pair: a tenant and a block, and the position of the
        guess that comes true if that block is requested.
        """
        names: list[Name] = []
        for (tenant, key), at in concerns:
            self._by_block.setdefault(tenant, {}).setdefault(key, []).append((question, at))
            names.append((tenant, key))
        self._open.append((question, names))
        self._due_s = min(self._due_s, question.due_s)

    def taken(self, tenant: int, keys: Iterable[bytes] | None) -> Iterator[tuple[Question, int]]:
        """Yield, as pairs of a question and a position, the guesses that a request of the blocks `keys` of `tenant`
        makes come true, and remove these blocks from the questions. None for `keys` stands for all blocks of the
        tenant.
        """
        by_block = self._by_block.get(tenant)
        if by_block:
            for key in list(by_block if keys is None else filter(by_block.__contains__, keys)):
                yield from by_block.pop(key, ())

    def over(self, now_s: float) -> list[Question]:
        """Remove and return the questions whose time `due_s` has passed at `now_s`, so that their guesses can be
        judged.
        """
        if now_s <= self._due_s:
            return []
        over = [each for each in self._open if each[0].due_s < now_s]
        self._open = [each for each in self._open if each[0].due_s >= now_s]
        for _, names in over:
            for tenant, key in names:
                by_block = self._by_block.get(tenant, {})
                if left := [each for each in by_block.pop(key, ()) if each[0].due_s >= now_s]:
                    by_block[key] = left
        self._by_block = {tenant: by_block for tenant, by_block in self._by_block.items() if by_block}
        self._due_s = min((question.due_s for question, _ in self._open), default=math.inf)
        return [question for question, _ in over]
