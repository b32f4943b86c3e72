"""Recursive least squares: a linear cost refitted with every observation.

Owns a coefficient vector and its uncertainty. It does not know what the features mean.
Invariant: predictions are never negative and never NaN, regardless of what was observed.

Errors are relative (each sample is divided by its cost): a 2 ms chunk and a 2 s one count the same, which is
what comparing two costs needs. Older samples fade by the factor `memory`. Algorithm: Haykin, "Adaptive Filter
Theory", chapter on RLS; one sample's pull is bounded, so that a descheduled step cannot wreck the fit.
"""

import math
from collections.abc import Sequence
from operator import mul

_SMALLEST_COST_S = 1e-6
_MAX_VARIANCE = 1e6
_MAX_RELATIVE_ERROR = 1.0


class RecursiveLeastSquares:
    """cost_s ~ features @ coefficients, in seconds. Features should be scaled to be of the order of 1."""

    def __init__(self, prior: Sequence[float], uncertainty: float = 1.0, memory: float = 0.98) -> None:
        """Start from `prior` coefficients; `uncertainty` relative to each says how fast data may move it."""
        self.coefficients = [float(value) for value in prior]
        self.samples = 0
        self._memory = memory
        # Plain lists: products of so few are quicker without NumPy, and every step is observed.
        self._covariance = [[0.0] * len(prior) for _ in prior]
        for at, value in enumerate(self.coefficients):
            self._covariance[at][at] = (max(abs(value), _SMALLEST_COST_S) * uncertainty) ** 2

    def predict(self, features: Sequence[float]) -> float:
        """Seconds for `features`; at least 0."""
        return max(0.0, float(sum(map(mul, self.coefficients, features))))

    def observe(self, features: Sequence[float], cost_s: float) -> None:
        """Learn that `features` took `cost_s` seconds. A sample that is not finite is ignored."""
        if not (math.isfinite(cost_s) and all(map(math.isfinite, features))) or cost_s < 0:
            return
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
        self.samples += 1

    def state(self) -> dict[str, list[float] | int]:
        """What `restore` needs, as plain numbers."""
        return {"samples": self.samples, "coefficients": self.coefficients}

    def restore(self, samples: int, coefficients: Sequence[float]) -> None:
        """Continue from a saved fit. ValueError if it has another form."""
        values = [float(value) for value in coefficients]
        if len(values) != len(self.coefficients) or not all(map(math.isfinite, values)) or samples < 0:
            raise ValueError(f"not a fit of {len(self.coefficients)} finite coefficients")
        self.coefficients = values
        self.samples = samples
