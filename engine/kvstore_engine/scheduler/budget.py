"""How many prompt tokens a step may compute beside the decodes.

Owns the limit on a step's length. It never chooses whose tokens they are. All decodes are in every step; what is left
goes to prompts, in whole blocks, so that steps cut a prompt where restoring does (graph.plan) and so that no prompt,
however long, makes the running answers stutter.
"""

from collections.abc import Sequence

from kvstore_engine.restore.costs import CostModel

_SMALLEST_SCALE = 0.3
_RECOVERY, _SLOW_RECOVERY = 1.02, 1.001
Pieces = Sequence[tuple[int, int]]


class StepBudget:
    """A step beside decodes may take `stretch` times as long as the decodes alone, or `floor_s` if that is longer.

    The cost model errs; what the steps really took corrects it by a factor.
    """

    def __init__(
        self, costs: CostModel, *, stretch: float, floor_s: float, most_tokens: int, block_tokens: int
    ) -> None:
        self._costs = costs
        self._stretch = stretch
        self._floor_s = floor_s
        self._most = most_tokens // block_tokens * block_tokens
        self._block = block_tokens
        self._scale = 1.0

    def tokens(self, decodes: Pieces, position: int) -> int:
        """Prompt tokens from `position` on that fit beside `decodes`: a multiple of the block, at least one block."""
        if not decodes:
            return self._most
        target_s = self._target_s(decodes) * self._scale
        few, many = 1, self._most // self._block
        while few < many:  # the cost grows with the tokens
            middle = (few + many + 1) // 2
            fits = self._costs.batch_s([*decodes, (middle * self._block, position)]) <= target_s
            few, many = (middle, many) if fits else (few, middle - 1)
        return few * self._block

    def observe(self, decodes: Pieces, prefill_tokens: int, seconds: float) -> None:
        """A step took `seconds`."""
        if not decodes or not prefill_tokens:
            return
        is_least = prefill_tokens <= self._block
        if seconds <= 1.1 * self._target_s(decodes):
            # One block says little of two. But without it a budget that a busy minute cut to one block would stay so.
            self._scale = min(1.0, self._scale * (_SLOW_RECOVERY if is_least else _RECOVERY))
        elif not is_least:
            self._scale = max(_SMALLEST_SCALE, self._scale * 0.9)

    def _target_s(self, decodes: Pieces) -> float:
        return max(self._stretch * self._costs.batch_s(decodes), self._floor_s)
