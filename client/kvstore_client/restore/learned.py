"""Costs fitted to what was measured, and saved over restarts.

Owns a fit of computing, one of each tier's link, and the two contention factors. Older samples fade. It plans nothing.
Not safe for use by two threads at once.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from kvstore_client.restore.costs import ComputeCost, Contention, LinkCost, RestoreCosts
from kvstore_client.restore.regression import RecursiveLeastSquares

# Features are scaled by these, so that coefficients are seconds per typical step and of one order of magnitude.
_TOKENS, _ATTENDED, _BYTES = 512.0, 512.0 * 1024.0, 16.0 * 1024 * 1024
_COMPUTE_PRIOR = (0.003, 0.5, 0.1)  # a small model on a laptop core; replaced by the first measurements
_LINK_PRIOR = (0.001, 0.004)
_MOST_CONTENTION = 4.0
_SHARE = 0.1  # of a new sample in a contention factor
_MOST_TIERS = 16
_VERSION = 1


class LearnedCosts:
    """Starts from priors that are wrong by a factor for most machines, until something was measured."""

    def __init__(self) -> None:
        self._compute = RecursiveLeastSquares(_COMPUTE_PRIOR, uncertainty=10.0)
        self._links: dict[str, RecursiveLeastSquares] = {}
        self._contention = Contention()

    def costs(self, *tiers: str) -> RestoreCosts:
        """The costs as of now; `tiers` are added with the prior if nothing was loaded from them yet."""
        fixed, token, attended = (max(0.0, value) for value in self._compute.coefficients)
        links = {}
        for tier in dict.fromkeys((*self._links, *tiers)):
            fit = self._links.get(tier)
            lead, rest = _LINK_PRIOR if fit is None else fit.coefficients
            links[tier] = LinkCost(max(0.0, lead), max(0.0, rest) / _BYTES)
        return RestoreCosts(ComputeCost(fixed, token / _TOKENS, attended / _ATTENDED), links, self._contention)

    def observe_compute(self, first: int, tokens: int, seconds: float, *, beside_loading: bool = False) -> None:
        """A step of `tokens` tokens from position `first` on took `seconds`."""
        if tokens < 1:
            return
        features = (1.0, tokens / _TOKENS, tokens * (first + tokens / 2) / _ATTENDED)
        known = self._contention
        if beside_loading:
            factor = _drawn(known.compute, seconds, self._compute.predict(features))
            self._contention = Contention(factor, known.load)
        else:
            self._compute.observe(features, seconds)

    def observe_load(self, tier: str, nbytes: int, seconds: float, *, beside_computing: bool = False) -> None:
        """Loading `nbytes` from `tier` took `seconds`. At most 16 tiers are kept."""
        if nbytes < 1 or (tier not in self._links and len(self._links) >= _MOST_TIERS):
            return
        fit = self._links.setdefault(tier, RecursiveLeastSquares(_LINK_PRIOR, uncertainty=10.0))
        features = (1.0, nbytes / _BYTES)
        known = self._contention
        if beside_computing and fit.samples:
            factor = _drawn(known.load, seconds, fit.predict(features))
            self._contention = Contention(known.compute, factor)
        else:
            fit.observe(features, seconds)

    def save(self, path: Path) -> None:
        """Save atomically; does nothing if the file cannot be written."""
        kept = {
            "version": _VERSION,
            "compute": self._compute.state(),
            "links": {tier: fit.state() for tier, fit in self._links.items()},
            "contention": [self._contention.compute, self._contention.load],
        }
        part = path.with_suffix(f".{os.getpid()}.part")
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(kept))
            part.replace(path)

    @classmethod
    def load(cls, path: Path) -> LearnedCosts:
        """The saved costs; new ones if the file is missing, damaged or of another version."""
        try:
            kept = json.loads(path.read_text())
            return cls._of(kept) if kept["version"] == _VERSION else cls()
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return cls()

    @classmethod
    def _of(cls, kept: dict[str, Any]) -> LearnedCosts:
        costs = cls()
        costs._compute.restore(**kept["compute"])
        for tier, state in list(kept["links"].items())[:_MOST_TIERS]:
            fit = RecursiveLeastSquares(_LINK_PRIOR, uncertainty=10.0)
            fit.restore(**state)
            costs._links[tier] = fit
        compute, load = (_bounded(float(value)) for value in kept["contention"])
        costs._contention = Contention(compute, load)
        return costs


def _drawn(known: float, seconds: float, alone_s: float) -> float:
    """A contention factor after one more sample."""
    if not alone_s > 0 or not seconds > 0:
        return known
    return _bounded(known + _SHARE * (_bounded(seconds / alone_s) - known))


def _bounded(factor: float) -> float:
    return min(max(factor, 1.0), _MOST_CONTENTION) if factor == factor else 1.0
