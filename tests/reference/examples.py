"""How many examples a property is tried with: all of them in `make test-all`, a share of them in `make test`.

Set once by `tests/conftest.py`, before any test's module is imported.
"""

from __future__ import annotations

QUICK_SHARE = 0.4
is_thorough = True


def examples(number: int) -> int:
    """`number`, or that share of it where a run leaves out what is slow."""
    return number if is_thorough else max(1, round(QUICK_SHARE * number))
