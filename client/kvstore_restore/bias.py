"""How wrong the daemon's estimates of loads were lately, by tier.

A bias is measured by predicted time, kept with the prediction that it corrects. Where the daemon now predicts what was
measured, it has learned by itself: such a prediction is not corrected a second time. A bias above 1 halves every ten
minutes, since what made loads slow may have passed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

_FIRST_SHARE, _SHARE, _LEAST, _MOST = 0.8, 0.4, 0.25, 32.0
_HALF_LIFE_S = 600.0
_MOST_TIERS = 16


@dataclass(slots=True)
class _Bias:
    """`factor` of a prediction of `predicted` seconds a byte, measured at `at_s`."""

    factor: float
    at_s: float
    predicted: float


class Biases:
    """`clock`: seconds that go on over restarts. Predictions are seconds a byte."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._by_tier: dict[str, _Bias] = {}

    def of(self, tier: str, predicted: float) -> float:
        """What to multiply a prediction by."""
        known = self._by_tier.get(tier)
        if known is None:
            return 1.0
        factor = known.factor
        if factor > 1.0:
            age_s = max(0.0, self._clock() - known.at_s)
            factor = 1.0 + (factor - 1.0) * math.exp2(-age_s / _HALF_LIFE_S)
        if known.predicted <= 0.0 or predicted <= 0.0:
            return factor
        learned = factor * known.predicted / predicted  # makes the prediction what was measured
        if factor > 1.0 and predicted > known.predicted:
            return max(learned, 1.0)
        if factor < 1.0 and predicted < known.predicted:
            return min(learned, 1.0)
        return factor

    def observe(self, tier: str, predicted: float, factor: float, *, gave_up: bool = False) -> None:
        """A load took `factor` times its prediction; `gave_up`: it would have taken longer than that."""
        known = self.of(tier, predicted)
        if gave_up:
            factor = max(2 * factor, known)
        is_new = tier not in self._by_tier
        if is_new and len(self._by_tier) >= _MOST_TIERS:
            return
        share = _FIRST_SHARE if is_new else _SHARE
        factor = math.exp((1 - share) * math.log(known) + share * math.log(_bounded(factor)))
        self._by_tier[tier] = _Bias(_bounded(factor), self._clock(), predicted)

    def state(self) -> dict[str, list[float]]:
        """For a file."""
        return {tier: [bias.factor, bias.at_s, bias.predicted] for tier, bias in self._by_tier.items()}

    def restore(self, state: Mapping[str, Sequence[float]]) -> None:
        """Raises ValueError, TypeError or AttributeError for what `state` cannot have returned."""
        self._by_tier = {
            str(tier): _Bias(_bounded(float(factor)), min(float(at_s), self._clock()), float(predicted))
            for tier, (factor, at_s, predicted) in list(state.items())[:_MOST_TIERS]
        }


def _bounded(factor: float) -> float:
    return min(max(factor, _LEAST), _MOST) if factor == factor else 1.0
