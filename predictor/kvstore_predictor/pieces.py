"""States as pieces: tables copied a few rows at a time, and one learner's state within another's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from kvstore_predictor.base import Array, State


def parts(rows: Iterable[tuple[Any, ...]], dtype: np.dtype[np.void], most: int) -> Iterator[Array]:
    """`rows` as arrays of `dtype` and at most `most` rows, each made when it is asked for; an empty one first, so that
    a table without rows is there, too."""
    yield np.empty(0, dtype)
    left = iter(rows)
    while part := list(islice(left, most)):
        yield np.array(part, dtype)


def within(state: State, prefix: str) -> dict[str, Array]:
    """The tables whose names begin with `prefix`, by the rest of their names."""
    return {name.removeprefix(prefix): table for name, table in state.items() if name.startswith(prefix)}
