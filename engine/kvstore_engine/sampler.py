"""Chooses the next token from a row of logits.

The module owns temperature, top-k, top-p and the random numbers of one request. It does not change the given logits.
Invariants: equal seeds, settings and logits give equal tokens on every machine (PCG64 and float64 sums); at temperature
0 no random number is drawn. Ties go to the lowest id, as in llama.cpp's greedy sampler.

Top-k: Fan et al., "Hierarchical Neural Story Generation" (2018). Top-p: Holtzman et al., "The Curious Case of Neural
Text Degeneration" (2020). Order: top-k, then temperature, then top-p over the rest.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numpy.random import PCG64, Generator  # here: numpy loads it on first use, which takes 5 ms of the first token

from kvstore_engine.errors import UsageError

_BINS_A_UNIT, _BINS = 8, 1024  # of logits, by their distance from the largest in units of the temperature


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """The settings by which the next token of an answer is drawn. With `temperature` 0 it is always the likeliest one;
    `top_k` 0 and `top_p` 1 exclude no token; with `seed` None each answer is drawn differently.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UsageError(f"temperature must be 0 (greedy) or more, got {self.temperature}")
        if self.top_k < 0:
            raise UsageError(f"top_k must be 0 (off) or more, got {self.top_k}")
        if not 0 <= self.top_p <= 1:
            raise UsageError(f"top_p must be between 0 and 1 (off), got {self.top_p}")
        if self.seed is not None and self.seed < 0:
            raise UsageError(f"the seed must be 0 or more, got {self.seed}")

    @property
    def is_greedy(self) -> bool:
        """True if the likeliest token is always chosen."""
        return self.temperature == 0 or self.top_k == 1 or self.top_p == 0


class TokenSampler:
    """A chooser of the tokens of one answer, with settings and a stream of random numbers."""

    def __init__(self, settings: SamplingSettings) -> None:
        self.settings = settings
        self._random = Generator(PCG64(settings.seed))

    def choose(self, logits: npt.NDArray[np.float32]) -> int:
        """Return the id of a token drawn by the settings from `logits`, float32 [vocabulary]. Raises RuntimeError if
        the largest logit is not finite.
        """
        best = int(logits.argmax())  # numpy's argmax stops at the first NaN, so a NaN anywhere ends up here
        if not math.isfinite(logits[best]):
            raise RuntimeError(f"the model produced logits that cannot be sampled: the largest is {logits[best]}")
        settings = self.settings
        if settings.is_greedy:
            return best
        return _drawn(logits, float(logits[best]), settings, self._random.random())


def _drawn(logits: npt.NDArray[np.float32], most: float, settings: SamplingSettings, draw: float) -> int:
    """Return the id at `draw` of 1 along the probabilities of the remaining ids, in their order. This needs no sorting,
    which would take ten times as long as everything else. `most`: the largest logit.
    """
    ids = _largest(logits, settings.top_k) if 0 < settings.top_k < logits.size else None
    kept = logits if ids is None else logits[ids]
    # float64, and the maximum taken out first: exp cannot overflow.
    scaled = (kept.astype(np.float64) - most) / settings.temperature
    weights = np.exp(scaled)
    if settings.top_p < 1:
        weights[~_nucleus(scaled, weights, settings.top_p * weights.sum())] = 0
    cumulated = np.cumsum(weights)
    # Below the sum, so that a token without weight is never drawn.
    place = min(draw * cumulated[-1], float(np.nextafter(cumulated[-1], 0)))
    at = int(np.searchsorted(cumulated, place, side="right"))
    return at if ids is None else int(ids[at])


def _nucleus(scaled: npt.NDArray[np.float64], weights: npt.NDArray[np.float64], least: float) -> npt.NDArray[np.bool_]:
    """Return which ids are in the smallest set of the likeliest whose weight reaches `least`; of equal ones the lowest
    ids.

    `scaled`: 0 and less, logits in units of the temperature. Only the ids in one bin with the least likely member are
    sorted.
    """
    bins = np.minimum(scaled * -_BINS_A_UNIT, _BINS - 1).astype(np.int64)
    reached = np.cumsum(np.bincount(bins, weights=weights, minlength=_BINS))
    last = min(int(np.searchsorted(reached, least)), _BINS - 1)
    members = bins < last
    border = np.flatnonzero(bins == last)
    border = border[np.argsort(-scaled[border], kind="stable")]
    before = reached[last - 1] if last else 0.0
    count = int(np.searchsorted(before + np.cumsum(weights[border]), least)) + 1
    members[border[:count]] = True
    return members


def _largest(logits: npt.NDArray[np.float32], top_k: int) -> npt.NDArray[np.intp]:
    """Return the ids of the `top_k` largest logits, in ascending order; of equal ones the lowest ids."""
    threshold = np.partition(logits, logits.size - top_k)[logits.size - top_k]
    above, equal = np.flatnonzero(logits > threshold), np.flatnonzero(logits == threshold)
    return np.sort(np.concatenate([above, equal[: top_k - above.size]]))
