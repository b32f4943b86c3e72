"""The earliest finish of all regions, known costs given: what plans and pointers are compared with, never a plan.

A dynamic programme over chunks. A label is (computing, loading by tier) in seconds; labels at (chunk, height) come from
those of the chunk before at the same height or a greater one. A label that another one dominates is dropped, as is one
that cannot finish before the bound. Takes milliseconds for one tier, longer for several.
"""

from __future__ import annotations

from kvstore_restore.costs import RestoreCosts
from kvstore_restore.plan import Prefix, plans_by_axis

Label = tuple[float, ...]


def optimum_s(prefix: Prefix, costs: RestoreCosts) -> float:
    """Seconds until the prefix is restored, by the best region there is."""
    if not prefix.tiers:
        return 0.0
    tiers = sorted({*prefix.tiers, *([prefix.input_tier] if prefix.input_bytes else [])})
    bound = min(each.finish_s for each in plans_by_axis(prefix, costs).values())
    finish = costs.contention.finish_s
    start: Label = (0.0,) * (len(tiers) + 1)
    by_height: list[list[Label]] = [[] for _ in range(prefix.layers)] + [[start]]
    for chunk, tier in enumerate(prefix.tiers):
        place = 1 + tiers.index(tier)
        reachable: list[Label] = []
        for height in range(prefix.layers, -1, -1):
            reachable = _pareto(reachable + by_height[height])
            computing = prefix.compute_s(chunk, height, costs)
            loading = prefix.load_s(chunk, prefix.layers - height, costs)
            added = [_add(label, computing, place, loading) for label in reachable]
            for used, seconds in prefix.with_inputs({}, int(height > 0), costs).items():
                added = [_add(label, 0.0, 1 + tiers.index(used), seconds) for label in added]
            by_height[height] = [label for label in added if finish(label[0], max(label[1:])) <= bound]
    ends = [finish(label[0], max(label[1:])) for labels in by_height for label in labels]
    return min([bound, *ends])


def _add(label: Label, computing: float, place: int, loading: float) -> Label:
    values = list(label)
    values[0] += computing
    values[place] += loading
    return tuple(values)


def _pareto(labels: list[Label]) -> list[Label]:
    kept: list[Label] = []
    for label in sorted(set(labels)):  # by computing, so that only a label before this one can dominate it
        rest = label[1:]
        if len(rest) == 1:
            dominated = bool(kept) and kept[-1][1] <= rest[0]
        else:
            dominated = any(all(a <= b for a, b in zip(known[1:], rest, strict=True)) for known in kept)
        if not dominated:
            kept.append(label)
    return kept
