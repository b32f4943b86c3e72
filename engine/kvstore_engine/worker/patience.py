"""The time that a step may take before its worker counts as hung.

The module owns the limit: a multiple of the time of earlier steps of that size, and at least some seconds, since a
machine that swaps or a process that was stopped for a while is no reason to load the model again.

A step's time is bounded by the slowest of the steps that were no smaller, in tokens and in the tokens that these attend
to. A fitted model of the costs would answer for every size, but its answer for a new size is a guess, and a guess must
not kill a worker: a step larger than all before has the longest time.
"""

from collections.abc import Sequence

from kvstore_engine.errors import UsageError
from kvstore_engine.graph.step import SequenceSlice

LEAST_S = 20.0
MOST_S = 300.0
_STRETCH = 30.0
_MEMORY = 0.99  # a step that was slow once counts less with each that is not


class StepPatience:
    """The time limits after which a step counts as hanging, learned from the times of earlier steps. A limit is at
    least `least_s` seconds and at most `MOST_S`, or `least_s` if that is more.
    """

    def __init__(self, least_s: float = LEAST_S) -> None:
        if not least_s > 0:
            raise UsageError(f"a step has to have some seconds before its worker is taken for hung, got {least_s:g}")
        self._least_s, self._most_s = least_s, max(least_s, MOST_S)
        self._slowest: dict[tuple[int, int], float] = {}  # by size, in powers of two

    def limit_s(self, slices: Sequence[SequenceSlice]) -> float:
        """Return the seconds that a step of `slices` may take before it counts as hanging: a multiple of the time of
        earlier steps that were as large or larger. A step larger than all earlier ones gets the longest limit.
        """
        tokens, attended = _size(slices)
        known = self._slowest.items()
        predicted = [seconds for size, seconds in known if size[0] >= tokens and size[1] >= attended]
        if not predicted:
            return self._most_s
        return min(max(self._least_s, _STRETCH * min(predicted)), self._most_s)

    def took(self, slices: Sequence[SequenceSlice], seconds: float) -> None:
        """Remember that a step of `slices` took `seconds`, for the limits of later steps."""
        size = _size(slices)
        self._slowest[size] = max(seconds, _MEMORY * self._slowest.get(size, 0.0))


def _size(slices: Sequence[SequenceSlice]) -> tuple[int, int]:
    """Return the powers of two of the tokens, and of the positions that they attend to."""
    tokens = sum(len(piece.tokens) for piece in slices)
    attended = sum(len(piece.tokens) * (piece.start + len(piece.tokens)) for piece in slices)
    return tokens.bit_length(), attended.bit_length()
