"""Says how much of what is tried many times `make test` tries: a share of a property's examples and of a long list of
cases. `make test-all` tries all, but of cases that would take hours a few that chance chooses: all of them with
KVSTORED_TEST_EVERY_CASE=1.

Set once by `tests/conftest.py`, before any test's module is imported.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest

QUICK_SHARE = 0.15
EVERY_CASE = os.environ.get("KVSTORED_TEST_EVERY_CASE", "") == "1"
is_thorough = True
Case = TypeVar("Case")


def examples(number: int) -> int:
    """`number`, or that share of it where a run leaves out what is slow."""
    return number if is_thorough else max(1, round(QUICK_SHARE * number))


def fewer(number: int, share: float) -> int:
    """`number` with KVSTORED_TEST_EVERY_CASE=1, else that share of it, which two cores do in a few minutes."""
    return number if EVERY_CASE else max(1, round(share * number))


def chosen(cases: Sequence[Case], most: int) -> list[Case]:
    """Cases inside a test: `most` of them, others in each run, in their order. A failure has to name its case."""
    if EVERY_CASE or len(cases) <= most:
        return list(cases)
    return [cases[at] for at in sorted(random.SystemRandom().sample(range(len(cases)), most))]


def each_nth(cases: Sequence[Any], every: int) -> list[Any]:
    """Parameters of a test: all cases, of which all but every n-th are slow. A tuple is one case."""
    return quick_are(cases, [at % every == 0 for at in range(len(cases))])


def first_of_each(cases: Sequence[Any], kind: Callable[[Any], object]) -> list[Any]:
    """Return cases as `each_nth` does, where the first case of each kind is quick."""
    kinds = [kind(case) for case in cases]
    return quick_are(cases, [kinds.index(one) == at for at, one in enumerate(kinds)])


def quick_are(cases: Sequence[Any], is_quick: Sequence[bool]) -> list[Any]:
    return [
        case if quick else pytest.param(*(case if type(case) is tuple else (case,)), marks=pytest.mark.slow)
        for case, quick in zip(cases, is_quick, strict=True)
    ]
