"""The prefix that the sequences of a step share most: the K and V that its attention reads again and again. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
_NONE = np.zeros(0, np.int32)


def most_shared(tables: Iterable[Int32Array]) -> Int32Array:
    """The leading blocks of some of `tables`, each sequence's block ids, of which most reads are repetitions: of n
    sequences that share m blocks, (n - 1) * m. Empty where nothing is shared.
    """
    order = sorted(tables, key=lambda table: table.tobytes())  # those with a common beginning are neighbours
    common = [_common(one, other) for one, other in pairwise(order)]
    # The greatest rectangle under `common`: neighbours i..j share min(common[i..j-1]) blocks.
    most, found = 0, _NONE
    rising: list[tuple[int, int]] = []  # where a height begins, and the height
    for at, height in enumerate([*common, 0]):
        begin = at
        while rising and rising[-1][1] >= height:
            begin, shared = rising.pop()
            if shared * (at - begin) > most:
                most, found = shared * (at - begin), order[begin][:shared]
        rising.append((begin, height))
    return found


def _common(one: Int32Array, other: Int32Array) -> int:
    """Leading blocks that both have."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length
