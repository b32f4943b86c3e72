"""Decides how much of a stored prefix to compute and how much to load, both at once.

Pure: it takes costs and returns a plan. It is for engines that compute and load side by side; a connector that loads
first and computes then uses `choice.py`.

The prefix is cut into chunks. The leading ones are computed and the rest loaded: then nothing that is computed depends
on a load, and what is computed costs least, since later chunks cost more. Both ends are among the plans: loading alone
and computing alone. So no plan is predicted to be worse than either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from kvstore_restore.costs import ComputeCost, LinkCost, RestoreCosts

Axis = Literal["load", "compute", "tokens"]
ERROR = 0.2  # of the costs of computing or of loading, which are estimates


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """A stored prefix that is to be restored, in chunks of `chunk_tokens` tokens and `chunk_bytes` bytes. Chunk i is in
    the tier `tiers[i]`, and the first one begins at position `first`. A pipeline stage computes a chunk from hidden
    states: `input_bytes` bytes that are loaded from `input_tier`, or 0 if they need no load. Raises ValueError for
    sizes below 1.
    """

    tiers: Sequence[str]
    chunk_tokens: int
    chunk_bytes: int
    first: int = 0
    input_bytes: int = 0
    input_tier: str = ""

    def __post_init__(self) -> None:
        if min(self.chunk_tokens, self.chunk_bytes) < 1:
            raise ValueError("a chunk needs at least one token and one byte")

    def compute_s(self, chunk: int, costs: RestoreCosts) -> float:
        """Return the predicted seconds to compute chunk number `chunk` of the prefix, by `costs`."""
        return costs.compute.chunk_s(self.first + chunk * self.chunk_tokens, self.chunk_tokens)

    def load_s(self, chunk: int, costs: RestoreCosts) -> float:
        """Return the predicted seconds to load chunk number `chunk` of the prefix from its tier, by `costs`."""
        return costs.links[self.tiers[chunk]].load_s(self.chunk_bytes)

    def with_inputs(self, loads: dict[str, float], chunks: int, costs: RestoreCosts) -> dict[str, float]:
        """Return `loads` (the seconds of loading, by tier), increased by the seconds to load the hidden states from
        which `chunks` chunks are computed.
        """
        if not self.input_bytes or not chunks:
            return loads
        seconds = chunks * costs.links[self.input_tier].load_s(self.input_bytes)
        return {**loads, self.input_tier: loads.get(self.input_tier, 0.0) + seconds}


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """A plan to restore a prefix that is cut into chunks: compute the first `whole` chunks, and load the other chunks
    at the same time. It is predicted to take `finish_s` seconds. `axis` says whether the plan only loads, only
    computes, or does both ("tokens").
    """

    axis: Axis
    finish_s: float
    whole: int


def plan(prefix: StoredPrefix, costs: RestoreCosts, *, error: float = ERROR) -> RestorePlan:
    """Return the plan to restore `prefix` that is predicted to finish first, by `costs`. A plan that computes and loads
    at once is chosen only if it gains more over the better single way than it could lose to that way if the costs were
    wrong by the share `error`.
    """
    plans = plans_by_axis(prefix, costs)
    single = min((plans["load"], plans["compute"]), key=_finish)
    best = min(plans.values(), key=_finish)
    if best is single or not error:
        return best
    worst_of_both = worst_of_single = 1.0
    for compute, load in product((1 + error, 1 / (1 + error)), repeat=2):
        slowed = _scaled(costs, compute, load)
        others = plans_by_axis(prefix, slowed)
        least_s = min(map(_finish, others.values()))
        worst_of_both = max(worst_of_both, _met_s(prefix, slowed) / least_s)
        worst_of_single = max(worst_of_single, others[single.axis].finish_s / least_s)
    return best if worst_of_both <= worst_of_single else single


def plans_by_axis(prefix: StoredPrefix, costs: RestoreCosts) -> dict[Axis, RestorePlan]:
    """Return the best plan of each kind: one that only loads, one that only computes, and one that does both."""
    found: dict[Axis, RestorePlan] = {}
    for each in _plans(prefix, costs):
        known = found.get(each.axis)
        if known is None or each.finish_s < known.finish_s:
            found[each.axis] = each
    return found


def _plans(prefix: StoredPrefix, costs: RestoreCosts) -> Iterator[RestorePlan]:
    chunks, finish = len(prefix.tiers), costs.contention.finish_s
    computed = [0.0]
    for chunk in range(chunks):
        computed.append(computed[-1] + prefix.compute_s(chunk, costs))
    loaded = [dict.fromkeys(prefix.tiers, 0.0)]
    for chunk in reversed(range(chunks)):
        tier = prefix.tiers[chunk]
        loaded.append({**loaded[-1], tier: loaded[-1][tier] + prefix.load_s(chunk, costs)})
    loaded = [prefix.with_inputs(loads, whole, costs) for whole, loads in enumerate(reversed(loaded))]
    yield RestorePlan("load", _slowest(loaded[0]), 0)
    yield RestorePlan("compute", finish(computed[chunks], _slowest(loaded[chunks])), chunks)
    for whole in range(1, chunks):
        yield RestorePlan("tokens", finish(computed[whole], _slowest(loaded[whole])), whole)


def _met_s(prefix: StoredPrefix, costs: RestoreCosts) -> float:
    """Return the predicted seconds until all is done if neither stops before they meet, as happens if wrong costs are
    believed.
    """
    links = dict.fromkeys(prefix.tiers, 0.0)
    for chunk, tier in enumerate(prefix.tiers):
        links[tier] += prefix.load_s(chunk, costs)
    seconds, met_s = 0.0, float("inf")
    for chunk, tier in enumerate(prefix.tiers):
        seconds += prefix.compute_s(chunk, costs) * costs.contention.compute
        links[tier] -= prefix.load_s(chunk, costs)
        links = prefix.with_inputs(links, 1, costs)
        met_s = min(met_s, max(seconds, _slowest(links) * costs.contention.load))
    return met_s


def _scaled(costs: RestoreCosts, compute: float, load: float) -> RestoreCosts:
    """Return the costs of a machine that computes and loads by these factors more slowly."""
    known = costs.compute
    slower = ComputeCost(known.fixed_s * compute, known.token_s * compute, known.attended_s * compute)
    links = {tier: LinkCost(link.fixed_s * load, link.byte_s * load) for tier, link in costs.links.items()}
    return RestoreCosts(slower, links, costs.contention)


def _slowest(links: dict[str, float]) -> float:
    return max(links.values(), default=0.0)


def _finish(each: RestorePlan) -> float:
    return each.finish_s
