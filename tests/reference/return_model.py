"""A learned model of return that is made by hand."""

from __future__ import annotations

import numpy as np

from kvstore_predictor.base import Array
from kvstore_predictor.return_trees import COLUMNS, ReturnTrees, without_trees


def small_arrays(up: float = 0.5, down: float = -0.25) -> dict[str, Array]:
    """Two trees: young chains are a little likelier, by `up`, than session-return says, old ones less, by `down`; and
    later turns likelier than first ones."""
    age, turn = COLUMNS.index("age"), COLUMNS.index("turn")
    return without_trees().as_arrays() | {
        "column": np.array([age, 0, 0, turn, 0, 0], np.int32),
        "threshold": np.array([2.0, 0.0, 0.0, 0.5, 0.0, 0.0]),
        "left": np.array([1, 1, 2, 4, 4, 5], np.int32),
        "right": np.array([2, 1, 2, 5, 4, 5], np.int32),
        "value": np.array([0.0, up, down, 0.0, down, up]),
        "roots": np.array([0, 3], np.int32),
    }


def small_trees() -> ReturnTrees:
    return ReturnTrees(small_arrays())
