"""A linear cost with a scale of its own, for costs that differ by orders of magnitude between machines and change at
once when a machine gets busy.

The scale is that of the first sample, and moves when a later one costs more than twice or less than half of what is
predicted; the fit below it learns what costs how much in comparison. One sample's pull on that fit is bounded, so alone
it would take hundreds of samples to arrive at a cost a hundred times that of its prior.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvstore_restore.regression import RecursiveLeastSquares

_SHARE = 0.3  # of a new sample in the scale
_MOST = 1e6
_MEMORY = 0.995  # requests of one kind follow each other: a shorter one would forget what others cost


class ScaledFit:
    """cost_s ~ scale * features @ coefficients. Features should be scaled to be of the order of 1."""

    def __init__(self, prior: Sequence[float]) -> None:
        self._fit = RecursiveLeastSquares(prior, uncertainty=10.0, memory=_MEMORY)
        self._scale = 1.0

    @property
    def samples(self) -> int:
        return self._fit.samples

    @property
    def coefficients(self) -> list[float]:
        """Seconds for each unit of a feature, none of them negative."""
        return [self._scale * max(0.0, value) for value in self._fit.coefficients]

    def observe(self, features: Sequence[float], cost_s: float, *, is_to_scale: bool = False) -> None:
        """Learn that `features` took `cost_s` seconds. A sample that is not finite or not positive is ignored.
        `is_to_scale`: samples before were wrong by one factor, which this one corrects."""
        if not (math.isfinite(cost_s) and cost_s > 0 and all(map(math.isfinite, features))):
            return
        predicted_s = self._fit.predict(features)
        ratio = cost_s / (self._scale * predicted_s) if predicted_s > 0 else 1.0
        is_to_scale = is_to_scale or not self.samples
        if is_to_scale or not 0.5 <= ratio <= 2.0:
            scale = self._scale * ratio ** (1.0 if is_to_scale else _SHARE)
            self._scale = min(max(scale, 1 / _MOST), _MOST)
        self._fit.observe(features, cost_s / self._scale)

    def rescale(self, factor: float) -> None:
        """All that is predicted becomes `factor` times as much."""
        self._scale = min(max(self._scale * factor, 1 / _MOST), _MOST)

    def state(self) -> dict[str, list[float] | int | float]:
        """What `restore` needs, as plain numbers."""
        return {**self._fit.state(), "scale": self._scale}

    def restore(self, samples: int, coefficients: Sequence[float], scale: float) -> None:
        """Continue from a saved fit. ValueError if it has another form."""
        if not 1 / _MOST <= float(scale) <= _MOST:
            raise ValueError("not a scale")
        self._fit.restore(samples, coefficients)
        self._scale = float(scale)
