"""Recursive least squares: a linear cost refitted with every observation.

Owns a coefficient vector and its uncertainty. It knows nothing of what the features mean.
Invariant: predictions are never negative and never NaN, whatever was observed.

Errors are relative (each sample is divided by its cost): a 2 ms chunk and a 2 s one count the same, which is
what comparing two costs needs. Older samples fade by the factor `memory`. Algorithm: Haykin, "Adaptive Filter
Theory", chapter on RLS; one sample's pull is bounded, so that a descheduled step cannot wreck the fit.
"""

import math
from collections.abc import Sequence
from operator import mul

import numpy as np
import numpy.typing as npt

_SMALLEST_COST_S = 1e-6
_MAX_VARIANCE = 1e6
_MAX_RELATIVE_ERROR = 1.0


class RecursiveLeastSquares:
    """cost_s ~ features @ coefficients, in seconds. Features should be scaled to be of the order of 1."""

    def __init__(self, prior: Sequence[float], uncertainty: float = 1.0, memory: float = 0.98) -> None:
        """Start from `prior` coefficients; `uncertainty` relative to each says how fast data may move it."""
        self._take(np.array(prior, np.float64))
        self.samples = 0
        self._memory = memory
        self._covariance = np.diag(np.maximum(np.abs(self._fit), _SMALLEST_COST_S) * uncertainty) ** 2

    def predict(self, features: Sequence[float]) -> float:
        """Seconds for `features`; at least 0."""
        return max(0.0, float(sum(map(mul, self.coefficients, features))))

    def observe(self, features: Sequence[float], cost_s: float) -> None:
        """Learn that `features` took `cost_s` seconds. A sample that is not finite is ignored."""
        if not (math.isfinite(cost_s) and all(map(math.isfinite, features))) or cost_s < 0:
            return
        scale = max(cost_s, _SMALLEST_COST_S)
        row = np.array(features, np.float64) / scale
        error = cost_s / scale - float(row @ self._fit)
        error = min(max(error, -_MAX_RELATIVE_ERROR), _MAX_RELATIVE_ERROR)
        spread = self._covariance @ row
        gain = spread / (self._memory + float(row @ spread))
        self._take(self._fit + gain * error)
        covariance = (self._covariance - np.outer(gain, spread)) / self._memory
        # Directions that are never excited would grow without bound under forgetting.
        self._covariance = np.clip((covariance + covariance.T) / 2, -_MAX_VARIANCE, _MAX_VARIANCE)
        self.samples += 1

    def state(self) -> dict[str, list[float] | int]:
        """What `restore` needs, as plain numbers."""
        return {"samples": self.samples, "coefficients": self.coefficients}

    def restore(self, samples: int, coefficients: Sequence[float]) -> None:
        """Continue from a saved fit. ValueError if it is not one of ours."""
        values = np.array(coefficients, np.float64)
        if values.shape != self._fit.shape or not np.isfinite(values).all() or samples < 0:
            raise ValueError(f"not a fit of {self._fit.size} finite coefficients")
        self._take(values)
        self.samples = samples

    def _take(self, fit: npt.NDArray[np.float64]) -> None:
        self._fit = fit
        self.coefficients: list[float] = fit.tolist()  # a product of so few is quicker without NumPy
