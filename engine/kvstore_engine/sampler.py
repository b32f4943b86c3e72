"""Chooses the next token from a row of logits.

Owns temperature, top-k, top-p and the random numbers of one request. It never changes the logits it is given.
Invariants: the same seed, settings and logits give the same tokens on every machine (PCG64 and float64 sums);
at temperature 0 no random number is drawn. Ties go to the lowest id, as in llama.cpp's greedy sampler.

Top-k: Fan et al., "Hierarchical Neural Story Generation" (2018). Top-p: Holtzman et al., "The Curious Case of
Neural Text Degeneration" (2020). Order: top-k, then temperature, then top-p over what is left.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numpy.random import PCG64, Generator  # here: numpy loads it on first use, which takes 5 ms of the first token

from kvstore_engine.errors import UsageError


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How to choose. `temperature` 0: greedy; `top_k` 0, `top_p` 1: all tokens; `seed` None: random."""

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


class Sampler:
    """The sampler of one request: settings and a stream of random numbers."""

    def __init__(self, settings: SamplingSettings) -> None:
        self.settings = settings
        self._random = Generator(PCG64(settings.seed))

    def choose(self, logits: npt.NDArray[np.float32]) -> int:
        """The id chosen from `logits` (float32, 1-d). RuntimeError if the largest is not finite."""
        best = int(logits.argmax())  # numpy's argmax stops at the first NaN, so a NaN anywhere ends up here
        if not math.isfinite(logits[best]):
            raise RuntimeError(f"the model produced logits that cannot be sampled: the largest is {logits[best]}")
        settings = self.settings
        if settings.temperature == 0 or settings.top_k == 1 or settings.top_p == 0:
            return best
        ids = _largest(logits, settings.top_k)
        # float64, and the maximum taken out first: exp cannot overflow, and the cumulated sum ends at 1.
        weights = np.exp((logits[ids].astype(np.float64) - float(logits[best])) / settings.temperature)
        cumulated = np.cumsum(weights / weights.sum())
        if settings.top_p < 1:
            # The smallest set whose probability reaches top_p; never empty, since the first always belongs.
            cumulated = cumulated[: int(np.searchsorted(cumulated, settings.top_p)) + 1]
        draw = self._random.random() * cumulated[-1]
        return int(ids[min(int(np.searchsorted(cumulated, draw, side="right")), len(cumulated) - 1)])


def _largest(logits: npt.NDArray[np.float32], top_k: int) -> npt.NDArray[np.intp]:
    """Ids of the `top_k` largest logits (all if 0), largest first, ties by id."""
    if 0 < top_k < logits.size:
        threshold = np.partition(logits, logits.size - top_k)[logits.size - top_k]
        candidates = np.flatnonzero(logits >= threshold)
    else:
        candidates = np.arange(logits.size)
        top_k = logits.size
    order = np.argsort(-logits[candidates], kind="stable")
    return candidates[order[:top_k]]
