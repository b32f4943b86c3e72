"""In which order requests that share one compute and one link are served. Pure: what is left in, turns out.

Each rule gives a request a turn on either resource; the lowest goes first, ties by arrival. What is left of a request
is known exactly, so serving the shortest first is possible on both resources. With ageing a long request is passed over
for a bounded time only. The other rules are what it is compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

AGEING_CHUNKS_S = 16.0  # chunks of remaining work that a second of waiting counts for


@dataclass(frozen=True, slots=True)
class Remaining:
    """One request: when it arrived, and how many of its chunks are not present yet."""

    number: int
    arrived_s: float
    chunks: int


Turn = Callable[[Remaining, float], float]


@dataclass(frozen=True, slots=True)
class Rule:
    """The turns on compute and on the link; both take a request and the time in seconds."""

    name: str
    compute: Turn
    load: Turn


def _arrival(request: Remaining, now_s: float) -> float:
    return request.arrived_s


def _longest(request: Remaining, now_s: float) -> float:
    return -request.chunks


def _shortest(request: Remaining, now_s: float) -> float:
    return request.chunks


def ageing(chunks_s: float = AGEING_CHUNKS_S) -> Rule:
    """Shortest remaining on both; a second of waiting counts for `chunks_s` chunks."""

    def turn(request: Remaining, now_s: float) -> float:
        return request.chunks - chunks_s * (now_s - request.arrived_s)

    return Rule("shortest remaining, ageing", turn, turn)


FCFS = Rule("first come, first served", _arrival, _arrival)
LONGEST_LOADS = Rule("longest remaining loads", _arrival, _longest)  # CacheFlow, arXiv 2604.25080
SHORTEST = Rule("shortest remaining", _shortest, _shortest)
DEFAULT = ageing()


def in_turn(requests: Iterable[Remaining], turn: Turn, now_s: float) -> list[Remaining]:
    """The requests in the order in which they are served."""
    return sorted(requests, key=lambda request: (turn(request, now_s), request.arrived_s, request.number))
