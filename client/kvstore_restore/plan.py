"""Decides how much of a stored prefix to compute and how much to load, both at once.

Pure: it takes costs and returns a plan. It is for engines that compute and load side by side; a connector that loads
first and computes then uses `choice.py`.

The prefix is cut into chunks. Of chunk j the layers [0, h_j) are computed and the rest loaded, and h never grows with
j: then no computed layer depends on a load. The cells of a chunk cost equally much for every layer and later chunks
cost more, so the best region is: the leading chunks wholly, one chunk in part, the rest loaded. (A chunk in part pays
the fixed costs of both, and is chosen only if it pays.)

Loading alone and computing alone are among the plans. So no plan is predicted to be worse than either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from kvstore_restore.costs import ComputeCost, LinkCost, RestoreCosts

Axis = Literal["load", "compute", "tokens", "layers", "staircase"]
ERROR = 0.2  # of the costs of computing or of loading, which are estimates


@dataclass(frozen=True, slots=True)
class Prefix:
    """A stored prefix: for each chunk its tier. The chunks have `chunk_tokens` tokens and `chunk_bytes` bytes each, in
    `layers` layers; the first one begins at position `first`. Raises ValueError for sizes below 1.

    A pipeline stage computes a chunk from hidden states, `input_bytes` bytes that are loaded from `input_tier`; 0: no
    link loads them.
    """

    tiers: Sequence[str]
    chunk_tokens: int
    chunk_bytes: int
    layers: int = 1
    first: int = 0
    input_bytes: int = 0
    input_tier: str = ""

    def __post_init__(self) -> None:
        if min(self.chunk_tokens, self.chunk_bytes, self.layers) < 1:
            raise ValueError("a chunk needs at least one token, one byte and one layer")

    def compute_s(self, chunk: int, layers: int, costs: RestoreCosts) -> float:
        """Return the seconds to compute `layers` layers of a chunk."""
        if not layers:
            return 0.0
        whole = costs.compute.chunk_s(self.first + chunk * self.chunk_tokens, self.chunk_tokens)
        return costs.compute.fixed_s + (whole - costs.compute.fixed_s) * layers / self.layers

    def load_s(self, chunk: int, layers: int, costs: RestoreCosts) -> float:
        """Return the seconds to load `layers` layers of a chunk from its tier."""
        return costs.links[self.tiers[chunk]].load_s(self.chunk_bytes * layers / self.layers)

    def with_inputs(self, loads: dict[str, float], chunks: int, costs: RestoreCosts) -> dict[str, float]:
        """Return `loads`, seconds by tier, with the inputs of `chunks` computed chunks added."""
        if not self.input_bytes or not chunks:
            return loads
        seconds = chunks * costs.links[self.input_tier].load_s(self.input_bytes)
        return {**loads, self.input_tier: loads.get(self.input_tier, 0.0) + seconds}


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan: compute `whole` leading chunks, and the first `layers` layers of the next `partial` ones; load the
    rest.
    """

    axis: Axis
    finish_s: float
    whole: int
    layers: int = 0
    partial: int = 0


def plan(prefix: Prefix, costs: RestoreCosts, *, layerwise: bool = True, error: float = ERROR) -> Plan:
    """Return the plan that is predicted to finish first. `layerwise`: chunks may be computed in part of their layers.

    Computing and loading at once must be better than the better single path, by more than it could lose to that path if
    the costs of either were wrong by the share `error`.
    """
    plans = plans_by_axis(prefix, costs, layerwise=layerwise)
    single = min((plans["load"], plans["compute"]), key=_finish)
    best = min(plans.values(), key=_finish)
    if best is single or not error:
        return best
    worst_of_both = worst_of_single = 1.0
    for compute, load in product((1 + error, 1 / (1 + error)), repeat=2):
        slowed = _scaled(costs, compute, load)
        others = plans_by_axis(prefix, slowed, layerwise=layerwise)
        least_s = min(map(_finish, others.values()))
        worst_of_both = max(worst_of_both, _met_s(prefix, slowed) / least_s)
        worst_of_single = max(worst_of_single, others[single.axis].finish_s / least_s)
    return best if worst_of_both <= worst_of_single else single


def plans_by_axis(prefix: Prefix, costs: RestoreCosts, *, layerwise: bool = True) -> dict[Axis, Plan]:
    """Return the best plan along each axis."""
    found: dict[Axis, Plan] = {}
    for each in _plans(prefix, costs, layerwise and prefix.layers > 1):
        known = found.get(each.axis)
        if known is None or each.finish_s < known.finish_s:
            found[each.axis] = each
    return found


def _plans(prefix: Prefix, costs: RestoreCosts, layerwise: bool) -> Iterator[Plan]:
    chunks, layers = len(prefix.tiers), prefix.layers
    finish = costs.contention.finish_s
    computed = [0.0]
    for chunk in range(chunks):
        computed.append(computed[-1] + prefix.compute_s(chunk, layers, costs))
    loaded = [dict.fromkeys(prefix.tiers, 0.0)]
    for chunk in reversed(range(chunks)):
        loaded.append(_with(loaded[-1], prefix.tiers[chunk], prefix.load_s(chunk, layers, costs)))
    loaded.reverse()
    loaded = [prefix.with_inputs(loads, whole, costs) for whole, loads in enumerate(loaded)]
    yield Plan("load", _slowest(loaded[0]), 0)
    yield Plan("compute", finish(computed[chunks], _slowest(loaded[chunks])), chunks)
    for whole in range(1, chunks):
        yield Plan("tokens", finish(computed[whole], _slowest(loaded[whole])), whole)
    if not layerwise:
        return
    for whole in range(chunks):
        for height in range(1, layers):
            links = _with(loaded[whole + 1], prefix.tiers[whole], prefix.load_s(whole, layers - height, costs))
            seconds = computed[whole] + prefix.compute_s(whole, height, costs)
            yield Plan("staircase", finish(seconds, _slowest(links)), whole, height, 1)
    for height in range(1, layers):
        links = dict.fromkeys(prefix.tiers, 0.0)
        for chunk, tier in enumerate(prefix.tiers):
            links[tier] += prefix.load_s(chunk, layers - height, costs)
        links = prefix.with_inputs(links, chunks, costs)
        seconds = sum(prefix.compute_s(chunk, height, costs) for chunk in range(chunks))
        yield Plan("layers", finish(seconds, _slowest(links)), 0, height, chunks)


def _met_s(prefix: Prefix, costs: RestoreCosts) -> float:
    """Return the predicted seconds until all is done if neither stops before they meet, as happens if wrong costs are
    believed.
    """
    links = dict.fromkeys(prefix.tiers, 0.0)
    for chunk, tier in enumerate(prefix.tiers):
        links[tier] += prefix.load_s(chunk, prefix.layers, costs)
    seconds, met_s = 0.0, float("inf")
    for chunk, tier in enumerate(prefix.tiers):
        seconds += prefix.compute_s(chunk, prefix.layers, costs) * costs.contention.compute
        links[tier] -= prefix.load_s(chunk, prefix.layers, costs)
        links = prefix.with_inputs(links, 1, costs)
        met_s = min(met_s, max(seconds, _slowest(links) * costs.contention.load))
    return met_s


def _scaled(costs: RestoreCosts, compute: float, load: float) -> RestoreCosts:
    """Return the costs of a machine that computes and loads by these factors more slowly."""
    known = costs.compute
    slower = ComputeCost(known.fixed_s * compute, known.token_s * compute, known.attended_s * compute)
    links = {tier: LinkCost(link.fixed_s * load, link.byte_s * load) for tier, link in costs.links.items()}
    return RestoreCosts(slower, links, costs.contention)


def _with(links: dict[str, float], tier: str, seconds: float) -> dict[str, float]:
    return {**links, tier: links[tier] + seconds}


def _slowest(links: dict[str, float]) -> float:
    return max(links.values(), default=0.0)


def _finish(each: Plan) -> float:
    return each.finish_s
