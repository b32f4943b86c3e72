"""Reuse distances and the miss-ratio curves of LRU that follow from them, by tenant and type of request.

The distance of a block access is the number of other blocks used since that block was used last, as they stand when the
request begins: at a capacity above it LRU hits, at any other it misses (Mattson, Gecsei, Slutz, Traiger: "Evaluation
techniques for storage hierarchies", IBM Systems Journal 9(2), 1970). One pass gives every capacity at once. Chains are
used from the tail to the head, as the policies do, so the hits of a curve are prefix-closed by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore_simulator.trace import Op, Trace

NEVER = -1
_POINTS = 24


@dataclass(frozen=True, slots=True)
class MissRatioCurve:
    """The miss-ratio curve of LRU for the block accesses of one group of requests, such as a tenant. `miss_ratio[i]` is
    the share of accesses that miss in a tier of `capacity_blocks[i]` blocks.
    """

    tenant: int | None
    kind: str | None
    accesses: int
    first_uses: int
    median_distance: int | None
    capacity_blocks: list[int]
    miss_ratio: list[float]


def reuse_distances(trace: Trace) -> npt.NDArray[np.int64]:
    """Return the reuse distance of each block access of `trace`: the number of different blocks used since the block's
    last use, or NEVER for its first use. A recorded put comes right after its request and counts as a use of its whole
    chain. Raises ValueError for a trace with GETs, which use only the stored blocks, so that the distance depends on
    the capacity.
    """
    if np.any(trace.ops == Op.GET):
        raise ValueError(
            "reuse distances are computed for whole requests: leave out --as-recorded, or --reuse-distance"
        )
    order = _tail_first(trace)
    touched = trace.blocks[order].astype(np.int64)
    count = len(touched)
    by_block = np.lexsort((np.arange(count), touched))
    before: npt.NDArray[np.int64] = np.full(count, NEVER, dtype=np.int64)
    again = touched[by_block][1:] == touched[by_block][:-1]
    before[by_block[1:][again]] = by_block[:-1][again]
    # Between its last use p and its request's start, a block was overtaken by every access j whose own last use is not
    # after p. Accesses of the same request before it are of its descendants, whose last use is never after its own.
    start = np.repeat(trace.starts[:-1], np.diff(trace.starts))
    again = before >= 0
    fresh = np.cumsum(~again)
    used_again = np.flatnonzero(again)
    overtaking = _smaller_before(before[used_again]) + fresh[used_again]
    place = used_again - start[used_again]
    distances: npt.NDArray[np.int64] = np.full(count, NEVER, dtype=np.int64)
    distances[used_again] = overtaking - place - (before[used_again] + 1)
    found = np.empty_like(distances)
    found[order] = distances
    return found


def curves(trace: Trace, distances: npt.NDArray[np.int64], count_from: int = 0) -> list[MissRatioCurve]:
    """Return miss-ratio curves of LRU: one for all accesses from request `count_from` on, and, if there are several,
    one for each tenant and each type of request. Puts look nothing up and are not counted.
    """
    request_of = np.repeat(np.arange(trace.requests), np.diff(trace.starts))
    is_asked = (trace.ops != Op.PUT)[request_of] & (request_of >= count_from)
    request_of, distances = request_of[is_asked], distances[is_asked]
    made = [_curve(trace, distances, None, None)]
    of_access = trace.tenants[request_of]
    tenants = np.unique(of_access).tolist()
    if len(tenants) > 1:
        made += [_curve(trace, distances[of_access == tenant], tenant, None) for tenant in tenants]
    kinds = trace.kinds[request_of]
    asked_kinds = np.unique(kinds).tolist()
    if len(asked_kinds) > 1:
        made += [_curve(trace, distances[kinds == at], None, trace.kind_names[at]) for at in asked_kinds]
    return made


def _curve(trace: Trace, distances: npt.NDArray[np.int64], tenant: int | None, kind: str | None) -> MissRatioCurve:
    known = np.sort(distances[distances != NEVER])
    points = np.unique(np.geomspace(1, trace.distinct_blocks, _POINTS).round().astype(np.int64))
    hits = np.searchsorted(known, points, side="left")
    total = max(1, len(distances))
    return MissRatioCurve(
        tenant, kind, len(distances), len(distances) - len(known),
        int(known[len(known) // 2]) if len(known) else None,
        points.tolist(), [round(1 - int(hit) / total, 6) for hit in hits],
    )  # fmt: skip


def _tail_first(trace: Trace) -> npt.NDArray[np.int64]:
    """Return the block accesses in the order of use: requests in order, each from its tail."""
    lengths = np.diff(trace.starts)
    ends = np.repeat(trace.starts[1:], lengths)
    starts = np.repeat(trace.starts[:-1], lengths)
    order: npt.NDArray[np.int64] = ends - 1 - (np.arange(trace.accesses) - starts)
    return order


def _smaller_before(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return, for each of distinct `values`, how many smaller ones stand before it: a merge sort, level by level."""
    count = len(values)
    found: npt.NDArray[np.int64] = np.zeros(count, dtype=np.int64)
    ranks = np.empty(count, dtype=np.int64)
    ranks[np.argsort(values)] = np.arange(count)
    # At each level runs of `width` are ordered by value; the right one of a pair counts what is smaller in the left.
    order = np.arange(count)
    width = 1
    while width < count:
        pair = np.arange(count) // (2 * width)
        is_right = order // width % 2 == 1
        merged = np.lexsort((ranks[order], pair))
        order = order[merged]
        is_right = is_right[merged]
        lefts = np.cumsum(~is_right)
        first = np.concatenate([[0], lefts])[pair * 2 * width]
        found[order[is_right]] += (lefts - first)[is_right]
        width *= 2
    return found
