"""Recursive least squares: a linear cost refitted with every observation.

The module owns a coefficient vector and its uncertainty. It does not know what the features mean. Invariant:
predictions are never negative and never NaN, for any observations.

Errors are relative (each sample is divided by its cost): a 2 ms chunk and a 2 s one count alike, which comparing two
costs needs. Older samples fade by the factor `memory`. Algorithm: Haykin, "Adaptive Filter Theory", chapter on RLS; one
sample's pull is bounded, so that a descheduled step cannot wreck the fit. With that bound alone it would take hundreds
of samples to arrive at a cost a hundred times the prior's; so the first sample scales the whole fit, and so does the
last of some in a row that are far off in one direction.
"""

import math
from collections.abc import Sequence
from operator import mul

_SMALLEST_COST_S = 1e-6
_MAX_VARIANCE = 1e6
_MAX_RELATIVE_ERROR = 1.0
_SURPRISE = 2.0  # times as long, or as short, as predicted
_MOST_SCALE = 1e9
_MEMORY = 0.995  # requests of one kind follow each other: a shorter one would forget what others cost


class Fit:
    """A linear model of a cost in seconds, `features @ coefficients`, refitted with every observation. Features should
    be of the order of 1.
    """

    def __init__(
        self, prior: Sequence[float], uncertainty: float = 10.0, memory: float = _MEMORY, patience: int = 2
    ) -> None:
        """Start from `prior` coefficients; `uncertainty` relative to each says how fast data may move it. `patience`:
        samples in a row that are far off before they move all of it.
        """
        self.coefficients = [float(value) for value in prior]
        self.samples = 0
        self._memory, self._patience = memory, patience
        self._scale = 1.0  # by which all was multiplied since
        self._surprises = 0  # samples in a row that were far off, below 0 those that were too short
        # Plain lists: products of so few are quicker without NumPy, and every step is observed.
        self._covariance = [[0.0] * len(prior) for _ in prior]
        for at, value in enumerate(self.coefficients):
            self._covariance[at][at] = (max(abs(value), _SMALLEST_COST_S) * uncertainty) ** 2

    def predict(self, features: Sequence[float]) -> float:
        """Return the predicted cost for `features` in seconds, at least 0."""
        return max(0.0, float(sum(map(mul, self.coefficients, features))))

    def observe(
        self, features: Sequence[float], cost_s: float, *, is_to_scale: bool = False, is_alike: bool = True
    ) -> None:
        """Learn that the cost for `features` was `cost_s` seconds. A value that is not finite or not positive is
        ignored. With `is_to_scale`, all predictions are first multiplied by the factor that makes the prediction for
        `features` right. Unless `is_alike`, the sample changes other predictions only as far as it shares features with
        them.
        """
        if not (math.isfinite(cost_s) and cost_s > 0 and all(map(math.isfinite, features))):
            return
        predicted_s = self.predict(features)
        if is_alike:
            way = (cost_s > predicted_s * _SURPRISE) - (cost_s < predicted_s / _SURPRISE)
            self._surprises = way + (self._surprises if way * self._surprises > 0 else 0)
        if predicted_s > 0 and (is_to_scale or not self.samples or abs(self._surprises) >= self._patience):
            self.rescale(cost_s / predicted_s)
            self._surprises = 0
        self._correct(features, cost_s)
        self.samples += 1

    def rescale(self, factor: float) -> None:
        """Multiply all predictions by `factor`."""
        factor = min(max(self._scale * factor, 1 / _MOST_SCALE), _MOST_SCALE) / self._scale
        self._scale *= factor
        self.coefficients = [factor * value for value in self.coefficients]
        self._covariance = [[factor * factor * value for value in line] for line in self._covariance]

    def state(self) -> dict[str, list[float] | int | float]:
        """Return the learned state as plain numbers, for `restore`."""
        return {"samples": self.samples, "coefficients": self.coefficients, "scale": self._scale}

    def restore(self, samples: int, coefficients: Sequence[float], scale: float) -> None:
        """Continue from the numbers that `state` of another fit returned. Raises ValueError if they are no such
        state.
        """
        values = [float(value) for value in coefficients]
        if len(values) != len(self.coefficients) or not all(map(math.isfinite, values)) or samples < 0:
            raise ValueError(f"not a fit of {len(self.coefficients)} finite coefficients")
        if not 1 / _MOST_SCALE <= float(scale) <= _MOST_SCALE:
            raise ValueError("not a scale")
        self.rescale(float(scale))
        self.coefficients = values
        self.samples = int(samples)

    def _correct(self, features: Sequence[float], cost_s: float) -> None:
        scale = max(cost_s, _SMALLEST_COST_S)
        row = [value / scale for value in features]
        error = cost_s / scale - sum(map(mul, row, self.coefficients))
        error = min(max(error, -_MAX_RELATIVE_ERROR), _MAX_RELATIVE_ERROR)
        covariance = self._covariance
        spread = [sum(map(mul, line, row)) for line in covariance]
        norm = self._memory + sum(map(mul, row, spread))
        self.coefficients = [value + each / norm * error for value, each in zip(self.coefficients, spread, strict=True)]
        for at, line in enumerate(covariance):
            for other in range(at + 1):
                value = (line[other] - spread[at] * spread[other] / norm) / self._memory
                # Directions that are never excited would grow without bound under forgetting.
                line[other] = covariance[other][at] = min(max(value, -_MAX_VARIANCE), _MAX_VARIANCE)
