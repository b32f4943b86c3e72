"""How much of what is tried many times `make test` tries: a share of a property's examples and of a long list of cases.
`make test-all` tries all.

Set once by `tests/conftest.py`, before any test's module is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

QUICK_SHARE = 0.25
is_thorough = True


def examples(number: int) -> int:
    """`number`, or that share of it where a run leaves out what is slow."""
    return number if is_thorough else max(1, round(QUICK_SHARE * number))


def each_nth(cases: Sequence[Any], every: int) -> list[Any]:
    """Parameters of a test: all cases, of which all but every n-th are slow. A tuple is one case."""
    return quick_are(cases, [at % every == 0 for at in range(len(cases))])


def first_of_each(cases: Sequence[Any], kind: Callable[[Any], object]) -> list[Any]:
    """As `each_nth`, where the first case of each kind is quick."""
    kinds = [kind(case) for case in cases]
    return quick_are(cases, [kinds.index(one) == at for at, one in enumerate(kinds)])


def quick_are(cases: Sequence[Any], is_quick: Sequence[bool]) -> list[Any]:
    return [
        case if quick else pytest.param(*(case if type(case) is tuple else (case,)), marks=pytest.mark.slow)
        for case, quick in zip(cases, is_quick, strict=True)
    ]
