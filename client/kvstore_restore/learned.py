"""Costs fitted to measurements, and saved over restarts: one model for engines and connectors.

The module owns a fit of computing, one of each tier's link, the two contention factors, and the recent errors of the
daemon's estimates of loads. Older samples fade. It plans nothing. Samples of one kind of work beside the other move the
contention factor; if they are too long or too short for that, the machine itself has changed, and they move the fit.
Not safe for use by two threads at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import time
from typing import Any

from kvstore_client.paths import write_json
from kvstore_restore.costs import ComputeCost, Contention, LinkCost, RestoreCosts
from kvstore_restore.fit import Fit

MAPPED = "host"  # the tier that is read in place
_COMPUTE_PRIOR = (0.003, 0.5, 0.1)  # a small model on a laptop core; replaced by the first measurements
_LINK_PRIOR = (0.001, 0.004)
_MOST_CONTENTION = 4.0
_CONTENTION_SHARE = 0.1  # of a new sample in a contention factor
_PLAUSIBLE = 0.7, 2.5  # times as long as alone: what the other work may explain
_EVERY_SHARE = 0.2  # of a new short step in what every step takes
_MOST_EVERY = 2.0  # a short step counts for so many times what every step took until then: some wait for others
_LARGEST_PART = 0.5  # of a long step is what every step takes, at most
_MOST_TOKENS_KEPT = 0.99  # after each step; prompts may become shorter
_STEPS_PATIENCE = 4  # a step may wait for others
_MOST_TIERS = 16
_VERSION = 4

Pieces = Iterable[tuple[int, float]]
"""Parts of one step, each (tokens, position of the first)."""


class LearnedCosts:
    """The costs of loading and computing on this machine, learned from measured times. Until something is measured they
    are guesses, wrong by a factor for most machines. `clock` returns seconds that go on over restarts.
    """

    def __init__(self, clock: Callable[[], float] = time) -> None:
        self.steps = StepFit()
        self.links: dict[str, Fit] = {}
        self.biases = Biases(clock)
        self._contention = Contention()
        self._path: Path | None = None

    def costs(self, *tiers: str) -> RestoreCosts:
        """Return the present costs as plain values. A tier in `tiers` from which nothing was loaded yet has a guessed
        cost.
        """
        links = {tier: self._link(tier) for tier in dict.fromkeys((*self.links, *tiers))}
        return RestoreCosts(self.steps.cost, links, self._contention)

    def batch_s(self, pieces: Pieces) -> float:
        """Return the predicted seconds of one step that computes `pieces`, while nothing is loaded. Return 0 if they
        have no tokens.
        """
        return self.steps.cost.step_s(*_tokens_attended(pieces))

    def prefill_s(self, start: float, end: float, step_tokens: int = 0) -> float:
        """Return the predicted seconds to compute the tokens at positions `start` to `end` - 1, without loading beside
        it, in steps of at most `step_tokens` tokens. 0 stands for one step.
        """
        tokens, cost = int(end - start), self.steps.cost
        further = -(-tokens // step_tokens) - 1 if step_tokens and tokens else 0
        return cost.chunk_s(start, tokens) + further * cost.fixed_s

    def load_s(self, tier: str, nbytes: int) -> float:
        """Return the predicted seconds to load `nbytes` bytes from `tier` in one piece, without computing beside it."""
        return self._link(tier).load_s(nbytes)

    def observe_batch(
        self, pieces: Pieces, seconds: float, *, least_tokens: int = 0, beside_loading: bool = False
    ) -> bool:
        """Learn that a step that computed `pieces` took `seconds`. A step of fewer than `least_tokens` tokens only
        teaches the fixed cost of every step. `beside_loading` is True if a load ran meanwhile. Return whether the step
        taught the cost of tokens.
        """
        tokens, attended = _tokens_attended(pieces)
        if tokens < 1 or not 0 < seconds < math.inf:
            return False
        known = self._contention
        if beside_loading and self.steps.is_known:
            alone_s = self.steps.cost.step_s(tokens, attended)
            if _is_plausible(seconds, alone_s):
                self._contention = Contention(_drawn(known.compute, seconds / alone_s), known.load)
                return False
            seconds /= known.compute
        return self.steps.observe(tokens, attended, seconds, least_tokens)

    def expect_load(self, tier: str, nbytes: int, seconds: float) -> None:
        """Use `seconds` as the prediction for loading `nbytes` bytes from `tier`, until a load from that tier is
        observed. At most 16 tiers are kept.
        """
        if nbytes > 0 and 0 < seconds < math.inf and tier not in self.links and len(self.links) < _MOST_TIERS:
            _, size = LinkCost.features(nbytes)
            self.links[tier] = Fit((0.1 * seconds, 0.9 * seconds / size))  # mostly by the size

    def observe_load(self, tier: str, nbytes: int, seconds: float, *, beside_computing: bool = False) -> None:
        """Learn that loading `nbytes` bytes from `tier` took `seconds`. `beside_computing` is True if the engine
        computed a step meanwhile.
        """
        self.expect_load(tier, nbytes, seconds)
        if nbytes < 1 or not 0 < seconds < math.inf or tier not in self.links:
            return
        features, known, fit = LinkCost.features(nbytes), self._contention, self.links[tier]
        alone_s = fit.predict(features)
        if beside_computing and fit.samples:
            if _is_plausible(seconds, alone_s):
                self._contention = Contention(known.compute, _drawn(known.load, seconds / alone_s))
                return
            seconds /= known.load
        fit.observe(features, seconds)

    def save(self, path: Path | None = None) -> None:
        """Save the costs in the file `path`, by default the one that they were loaded from. Do nothing if it cannot be
        written.
        """
        if path := path or self._path:
            kept = {
                "version": _VERSION,
                "steps": self.steps.state(),
                "links": {tier: fit.state() for tier, fit in self.links.items()},
                "contention": [self._contention.compute, self._contention.load],
                "biases": self.biases.state(),
            }
            write_json(path, kept)

    @classmethod
    def load(cls, path: Path, clock: Callable[[], float] = time) -> LearnedCosts:
        """Return the costs that were saved in the file `path`, or new ones if it is missing, damaged or of another
        version.
        """
        costs = cls(clock)
        try:
            costs._restore(json.loads(path.read_text()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            costs = cls(clock)
        costs._path = path
        return costs

    def _restore(self, kept: dict[str, Any]) -> None:
        if kept["version"] != _VERSION:
            return
        self.steps.restore(**kept["steps"])
        for tier, state in list(kept["links"].items())[:_MOST_TIERS]:
            self.links[tier] = Fit(_LINK_PRIOR)
            self.links[tier].restore(**state)
        compute, load = (_contended(float(value)) for value in kept["contention"])
        self._contention = Contention(compute, load)
        self.biases.restore(kept["biases"])

    def _link(self, tier: str) -> LinkCost:
        fit = self.links.get(tier)
        return LinkCost.fitted(_LINK_PRIOR if fit is None else fit.coefficients)


class StepFit:
    """A model of the seconds that one step of an engine takes, learned from measured steps: `every step + fixed + token
    * tokens + attended * pairs of a token and a token that it attends to`.

    The part behind "every step" is fitted to long steps. Short steps teach only the first part, which long steps alone
    do not show, and which is most of the time behind a loaded prefix. The first step of a process also warms the engine
    up, so it counts only until the second. `cost` is the cost of one step, and `count` the number of long steps in this
    process. `is_provisional` is True while the first step is the only sample.
    """

    def __init__(self) -> None:
        self.count = 0
        self.is_provisional = False
        self._fit = Fit(_COMPUTE_PRIOR, patience=_STEPS_PATIENCE)
        self._every_s = 0.0
        self._long = (0.0, 0.0)  # tokens and pairs of the latest long step
        self._most_tokens = 0.0  # of a step lately
        self._note_cost()

    @property
    def samples(self) -> int:
        return self._fit.samples

    @property
    def is_known(self) -> bool:
        return self._fit.samples > 0

    def observe(self, tokens: float, attended: float, seconds: float, least_tokens: int) -> bool:
        """Learn that one step of `tokens` tokens, with `attended` pairs of a token and a token that it attends to, took
        `seconds`. It is a short step if it has fewer than `least_tokens` tokens. Return whether the step taught the
        cost of tokens.
        """
        if self.is_known and tokens < least_tokens:
            self._observe_short(seconds - self._own.step_s(tokens, attended))
            return False
        self.count += 1
        if self.count == 1 and self.is_known:
            return False
        own_s = max(seconds - self._every_s, (1 - _LARGEST_PART) * seconds)
        is_alike = tokens >= self._most_tokens / 2  # a decode says nothing of the scale of a prompt's step
        self._most_tokens = max(tokens, _MOST_TOKENS_KEPT * self._most_tokens)
        is_to_scale = self.is_provisional and is_alike
        features = ComputeCost.features(tokens, attended)
        self._fit.observe(features, own_s, is_to_scale=is_to_scale, is_alike=is_alike)
        if is_alike or not self.is_provisional:
            self._long = tokens, attended
            self.is_provisional = self.count == 1
        self._note_cost()
        return True

    def state(self) -> dict[str, object]:
        """Return the learned state as plain numbers, for `restore`."""
        return {"fit": self._fit.state(), "every_s": self._every_s, "long": list(self._long)}

    def restore(self, fit: dict[str, Any], every_s: float, long: list[float]) -> None:
        """Continue from the three values that `state` of another object returned. Raises ValueError or TypeError if
        they have another form.
        """
        tokens, attended = long
        if not (0 <= float(every_s) < 1e6 and 0 <= tokens < 1e12 and 0 <= attended < 1e18):
            raise ValueError("not the costs of steps")
        self._fit.restore(**fit)
        self._every_s, self._long, self._most_tokens = float(every_s), (float(tokens), float(attended)), float(tokens)
        self._note_cost()

    def _observe_short(self, every_s: float) -> None:
        """Learn the part of every step, and keep the prediction of the latest long step: its tokens take
        correspondingly less.
        """
        before_s, own_s = self._every_s, self._own.step_s(*self._long)
        if before_s:
            every_s = before_s + _EVERY_SHARE * (min(every_s, _MOST_EVERY * before_s) - before_s)
        self._every_s = min(max(every_s, 0.0), _LARGEST_PART * (own_s + before_s))
        if own_s:
            self._fit.rescale((own_s + before_s - self._every_s) / own_s)
        self._note_cost()

    def _note_cost(self) -> None:
        own = self._own = ComputeCost.fitted(self._fit.coefficients)
        self.cost = ComputeCost(own.fixed_s + self._every_s, own.token_s, own.attended_s)


_FIRST_SHARE, _SHARE, _LEAST, _MOST = 0.8, 0.4, 0.25, 32.0
_HALF_LIFE_S = 600.0


@dataclass(slots=True)
class _Bias:
    """`factor` of a prediction of `predicted` seconds a byte, measured at `at_s`."""

    factor: float
    at_s: float
    predicted: float


class Biases:
    """The factors by which loads from each tier lately took longer than the daemon had estimated. Estimates are given
    in seconds a byte, and `clock` returns seconds.

    Each factor is kept with the estimate that it corrects: if the daemon now estimates the measured time, it has
    learned by itself, and the factor is not applied. A factor above 1 halves every ten minutes, since the cause of slow
    loads may have passed.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._by_tier: dict[str, _Bias] = {}

    def of(self, tier: str, predicted: float) -> float:
        """Return the factor by which to multiply an estimate of `predicted` seconds a byte for a load from `tier`."""
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
        """Learn that a load from `tier` took `factor` times its estimate of `predicted` seconds a byte. With `gave_up`
        the load was ended at that time, and would have taken longer.
        """
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
        """Return the learned state as plain numbers, for `restore`."""
        return {tier: [bias.factor, bias.at_s, bias.predicted] for tier, bias in self._by_tier.items()}

    def restore(self, state: Mapping[str, Sequence[float]]) -> None:
        """Continue from `state`, which `state` of another object returned. Raises ValueError, TypeError or
        AttributeError if it has another form.
        """
        self._by_tier = {
            str(tier): _Bias(_bounded(float(factor)), min(float(at_s), self._clock()), float(predicted))
            for tier, (factor, at_s, predicted) in list(state.items())[:_MOST_TIERS]
        }


def _tokens_attended(pieces: Pieces) -> tuple[float, float]:
    tokens = attended = 0.0
    for count, first in pieces:
        tokens += count
        attended += count * (first + count / 2)
    return tokens, attended


def _is_plausible(seconds: float, alone_s: float) -> bool:
    """Return whether work that takes `alone_s` alone may take `seconds` beside other work."""
    least, most = _PLAUSIBLE
    return alone_s > 0 and least <= seconds / alone_s <= most


def _drawn(known: float, ratio: float) -> float:
    """Return a contention factor after one more sample."""
    return _contended(known + _CONTENTION_SHARE * (_contended(ratio) - known))


def _contended(factor: float) -> float:
    return min(max(factor, 1.0), _MOST_CONTENTION) if factor == factor else 1.0


def _bounded(factor: float) -> float:
    return min(max(factor, _LEAST), _MOST) if factor == factor else 1.0
