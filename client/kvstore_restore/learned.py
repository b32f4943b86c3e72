"""Costs fitted to what was measured, and saved over restarts.

Owns a fit of computing, one of each tier's link, and the two contention factors. Older samples fade. It plans nothing.
Samples of one kind of work beside the other move the contention factor; where they are too long or too short for that,
the machine itself has changed, and they move the fit. Not safe for use by two threads at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvstore_client.paths import write_json
from kvstore_restore.costs import Contention, RestoreCosts
from kvstore_restore.features import (
    COMPUTE_PRIOR,
    LINK_PRIOR,
    compute_cost,
    compute_features,
    link_cost,
    load_features,
)
from kvstore_restore.regression import RecursiveLeastSquares

_MOST_CONTENTION = 4.0
_SHARE = 0.1  # of a new sample in a contention factor
_PLAUSIBLE = 0.7, 2.5  # times as long as alone: what the other work may explain
_SURPRISE = 2.0  # times as long, or as short, as expected
_MOST_TIERS = 16
_VERSION = 3  # 1, 2: an engine's own file, at the same place

Pieces = Iterable[tuple[int, int]]
"""Parts of one step, each (tokens, position of the first)."""


class LearnedCosts:
    """Starts from priors that are wrong by a factor for most machines, until something was measured."""

    def __init__(self) -> None:
        self.compute = RecursiveLeastSquares(COMPUTE_PRIOR, uncertainty=10.0)
        self.links: dict[str, RecursiveLeastSquares] = {}
        self._contention = Contention()
        self._surprises: dict[str, int] = {}  # samples in a row that were far off, by tier

    def costs(self, *tiers: str) -> RestoreCosts:
        """The costs as of now; `tiers` are added with the prior if nothing was loaded from them yet."""
        fits = {tier: self.links.get(tier) for tier in dict.fromkeys((*self.links, *tiers))}
        links = {tier: link_cost(LINK_PRIOR if fit is None else fit.coefficients) for tier, fit in fits.items()}
        return RestoreCosts(compute_cost(self.compute.coefficients), links, self._contention)

    def batch_s(self, pieces: Pieces) -> float:
        """Seconds of one step of `pieces`, alone; 0 without tokens."""
        features = _features(pieces)
        return self.compute.predict(features) if features[1] else 0.0

    def prefill_s(self, start: int, end: int, step_tokens: int) -> float:
        """Seconds to compute positions [start, end) alone, in steps of at most `step_tokens`."""
        steps = ((min(step_tokens, end - first), first) for first in range(start, end, step_tokens))
        return sum(self.batch_s([step]) for step in steps)

    def load_s(self, tier: str, nbytes: int) -> float:
        """Seconds to load `nbytes` from `tier` in one piece, alone."""
        return self.costs(tier).links[tier].load_s(nbytes)

    def observe_batch(self, pieces: Pieces, seconds: float, *, beside_loading: bool = False) -> None:
        """A step of `pieces` took `seconds`."""
        features = _features(pieces)
        if not features[1]:
            return
        known = self._contention
        if not beside_loading or not self.compute.samples:
            self.compute.observe(features, seconds)
            return
        alone_s = self.compute.predict(features)
        if _is_plausible(seconds, alone_s):
            self._contention = Contention(_drawn(known.compute, seconds / alone_s), known.load)
        else:
            self.compute.observe(features, seconds / known.compute)

    def expect_load(self, tier: str, nbytes: int, seconds: float) -> None:
        """Loading `nbytes` from `tier` should take `seconds`: what holds until something was loaded from it."""
        if nbytes > 0 and 0 < seconds < math.inf and tier not in self.links and len(self.links) < _MOST_TIERS:
            self.links[tier] = _link_fit(nbytes, seconds)

    def observe_load(self, tier: str, nbytes: int, seconds: float, *, beside_computing: bool = False) -> None:
        """Loading `nbytes` from `tier` took `seconds`. At most 16 tiers are kept."""
        if nbytes < 1 or not 0 < seconds < math.inf:
            return
        if tier not in self.links and len(self.links) >= _MOST_TIERS:
            return
        features, known = load_features(nbytes), self._contention
        fit = self.links.get(tier)
        alone_s = 0.0 if fit is None else fit.predict(features)
        if beside_computing and fit is not None and fit.samples and _is_plausible(seconds, alone_s):
            self._contention = Contention(known.compute, _drawn(known.load, seconds / alone_s))
            return
        seconds /= known.load if beside_computing else 1.0
        is_surprise = not alone_s / _SURPRISE <= seconds <= alone_s * _SURPRISE
        surprises = self._surprises[tier] = self._surprises.get(tier, 0) + 1 if is_surprise else 0
        if fit is None or not fit.samples or surprises > 1:  # the fit itself would take many samples to follow
            fit = self.links[tier] = _link_fit(nbytes, seconds)
            self._surprises[tier] = 0
        fit.observe(features, seconds)

    def save(self, path: Path) -> None:
        """Save atomically; does nothing if the file cannot be written."""
        kept = {
            "version": _VERSION,
            "compute": self.compute.state(),
            "links": {tier: fit.state() for tier, fit in self.links.items()},
            "contention": [self._contention.compute, self._contention.load],
        }
        write_json(path, kept)

    @classmethod
    def load(cls, path: Path) -> LearnedCosts:
        """The saved costs; new ones if the file is missing, damaged or of another version."""
        try:
            kept = json.loads(path.read_text())
            return cls._of(kept) if kept["version"] == _VERSION else cls()
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
            return cls()

    @classmethod
    def _of(cls, kept: dict[str, Any]) -> LearnedCosts:
        costs = cls()
        costs.compute.restore(**kept["compute"])
        for tier, state in list(kept["links"].items())[:_MOST_TIERS]:
            fit = RecursiveLeastSquares(LINK_PRIOR, uncertainty=10.0)
            fit.restore(**state)
            costs.links[tier] = fit
        compute, load = (_bounded(float(value)) for value in kept["contention"])
        costs._contention = Contention(compute, load)
        return costs


def _features(pieces: Pieces) -> tuple[float, float, float]:
    tokens = attended = 0.0
    for count, first in pieces:
        tokens += count
        attended += count * (first + count / 2)
    return compute_features(tokens, attended)


def _link_fit(nbytes: int, seconds: float) -> RecursiveLeastSquares:
    """A fit that has seen no sample and expects this one, mostly by its size."""
    _, size = load_features(nbytes)
    return RecursiveLeastSquares((0.1 * seconds, 0.9 * seconds / size))


def _is_plausible(seconds: float, alone_s: float) -> bool:
    """Whether work that takes `alone_s` alone may take `seconds` beside other work."""
    least, most = _PLAUSIBLE
    return alone_s > 0 and least <= seconds / alone_s <= most


def _drawn(known: float, ratio: float) -> float:
    """A contention factor after one more sample."""
    return _bounded(known + _SHARE * (_bounded(ratio) - known))


def _bounded(factor: float) -> float:
    return min(max(factor, 1.0), _MOST_CONTENTION) if factor == factor else 1.0
