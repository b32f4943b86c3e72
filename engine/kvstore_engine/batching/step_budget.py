"""Limits how many prompt tokens a step may compute beside the decodes.

The module owns the limit on a step's length. It does not choose whose tokens they are. All decodes are in every step;
the rest goes to prompts, in whole blocks, so that steps cut a prompt where restoring does (graph.plan) and no prompt,
however long, makes the running answers stutter.

An answer stutters when a step is longer than the steps before it. So while prompts arrive now and then, a step with one
is little longer than one without. If prompts keep arriving, most steps have a part of one, and short parts only make
prompts wait: then all steps grow, up to a second limit. (Sarathi-Serve, Agrawal et al., OSDI 2024, has one limit for
all steps, set by hand for a promised latency.)
"""

from collections import deque
from collections.abc import Sequence
from statistics import median

from kvstore_restore.learned import LearnedCosts

_SMALLEST_SCALE = 0.3
_RECOVERY, _SLOW_RECOVERY = 1.02, 1.001
_RECENT_STEPS = 64
Pieces = Sequence[tuple[int, int]]


class StepBudget:
    """A limit on the prompt tokens of a step, so that answers in progress are not delayed. A step may take the longest
    of three times: `stretch` times the time of the answers' next tokens alone, `stretch` times the median of recent
    steps, and `floor_s` seconds. The first two are at most `most_stretch` times a step in which all running sequences
    compute a next token.
    """

    def __init__(
        self,
        costs: LearnedCosts,
        *,
        stretch: float,
        most_stretch: float,
        floor_s: float,
        most_tokens: int,
        block_tokens: int,
    ) -> None:
        self._costs = costs
        self._stretch = stretch
        self._most_stretch = most_stretch
        self._floor_s = floor_s
        self._most = most_tokens // block_tokens * block_tokens
        self._block = block_tokens
        self._scale = 1.0
        self._recent_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._target_s = floor_s

    def tokens(self, decodes: Pieces, prompts: Pieces) -> int:
        """Return how many prompt tokens the next step may have: whole blocks, at least one. Both parameters list
        sequences as pairs of tokens and position. `decodes` are the sequences that compute the next token of an answer,
        `prompts` the ones with prompt tokens left, of which the first is computed first.
        """
        if not decodes:
            self._recent_s.clear()
            return self._most
        self._target_s = self._limit_s(decodes, prompts)
        fitting_s = self._target_s * self._scale
        position = prompts[0][1]
        few, many = 1, self._most // self._block
        while few < many:  # the cost grows with the tokens
            middle = (few + many + 1) // 2
            fits = self._costs.batch_s([*decodes, (middle * self._block, position)]) <= fitting_s
            few, many = (middle, many) if fits else (few, middle - 1)
        return few * self._block

    def observe(self, decodes: Pieces, prefill_tokens: int, seconds: float) -> None:
        """Learn for later steps that the step of `decodes` with `prefill_tokens` prompt tokens took `seconds`."""
        if not decodes:
            return
        self._recent_s.append(seconds)
        if not prefill_tokens:
            return
        is_least = prefill_tokens <= self._block
        if seconds <= 1.1 * self._target_s:
            # One block says little about two, but without it a budget once cut to one block would never grow.
            self._scale = min(1.0, self._scale * (_SLOW_RECOVERY if is_least else _RECOVERY))
        elif not is_least:
            self._scale = max(_SMALLEST_SCALE, self._scale * 0.9)

    def _limit_s(self, decodes: Pieces, prompts: Pieces) -> float:
        most_s = self._most_stretch * self._costs.batch_s([*decodes, *prompts])
        usual_s = self._stretch * median(self._recent_s) if self._recent_s else most_s
        least_s = self._stretch * self._costs.batch_s(decodes)
        return max(min(max(usual_s, least_s), most_s), self._floor_s)
