"""How much of what is tried many times `make test` tries: a share of a property's examples and of a long list of cases.
`make test-all` tries all.

Set once by `tests/conftest.py`, before any test's module is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

QUICK_SHARE = 0.25
is_thorough = True


def examples(number: int) -> int:
    """`number`, or that share of it where a run leaves out what is slow."""
    return number if is_thorough else max(1, round(QUICK_SHARE * number))


def each_nth(cases: Sequence[Any], every: int) -> list[Any]:
    """Parameters of a test: all cases, of which all but every n-th are slow. A tuple is one case."""
    return [
        case if at % every == 0 else pytest.param(*(case if type(case) is tuple else (case,)), marks=pytest.mark.slow)
        for at, case in enumerate(cases)
    ]
