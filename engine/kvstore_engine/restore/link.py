"""What a stream of leases has shown of its link, and how long the rest is expected to take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

_LEAST_STALL_S, _STALL_CHUNKS = 0.1, 4  # without an arrival
_FEW_CHUNKS = 2  # that the expectation counts for beside what a stream has shown


@dataclass(slots=True, eq=False)
class Link:
    """What a stream has shown. `seconds`: at which time after the opening the last chunk of each tier came."""

    opened_s: float
    last_s: float
    expected_s: float = 0.0  # for what has come
    chunks: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)

    def note(self, tier: str, at_s: float, expected_s: float) -> None:
        """A chunk of `tier` has come, which was expected to take `expected_s`."""
        self.chunks[tier] += 1
        self.seconds[tier] = at_s - self.opened_s
        self.expected_s += expected_s


def left_s(link: Link | None, chunks: Mapping[str, int], chunk_s: Callable[[str], float], now_s: float) -> float:
    """In how many seconds `chunks`, so many of each tier, are expected; infinity where the stream stalls.

    `chunk_s`: what a chunk of a tier should take. `link` None: no stream is open yet.
    """
    seconds = max((count * chunk_s(tier) for tier, count in chunks.items()), default=0.0)
    if link is None or not chunks:
        return seconds
    one_s = max(map(chunk_s, chunks))
    few_s = _FEW_CHUNKS * one_s
    seconds *= (link.last_s - link.opened_s + few_s) / (link.expected_s + few_s) if few_s else 1.0
    silent_s = now_s - link.last_s
    if silent_s > max(_LEAST_STALL_S, _STALL_CHUNKS * one_s):
        return float("inf")
    return max(0.0, seconds - silent_s)
