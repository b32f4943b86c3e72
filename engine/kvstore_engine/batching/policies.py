"""The order in which sequences are served, and yield: the contract of a policy, and the three policies.

A policy never sees tokens or blocks and acts on nothing. The implementation MUST be a pure function of its arguments;
MUST rank a sequence that waits long enough first (no starvation); and MUST NOT let two sequences displace each other in
turns: `displaces(a, b)` implies that b does not displace a until it has waited.
"""

from dataclasses import dataclass
from typing import Protocol

Rank = tuple[float, ...]
_AHEAD = 0.25


@dataclass(frozen=True, slots=True)
class SchedulingCandidate:
    """A sequence as a policy sees it.

    order: number of its arrival. since_s: the time when its present wait began. level: its priority when it was last
    admitted, raised by waiting; before that, its plain priority. remaining_s: predicted seconds until it ends, once it
    runs. served: the tokens that its tenant has been served so far (`VirtualTokens`).
    """

    order: int
    arrived_s: float
    since_s: float
    priority: int
    level: float
    remaining_s: float
    served: float


class SchedulingPolicy(Protocol):
    """An order of sequences. The smallest rank is first."""

    def turn(self, candidate: SchedulingCandidate, now_s: float) -> Rank:
        """Return the rank of a sequence that waits for admission, or for prompt tokens in a step."""
        ...

    def yields(self, candidate: SchedulingCandidate, now_s: float) -> Rank:
        """Return the rank of a running sequence: when blocks are short, the largest rank yields first."""
        ...

    def level(self, candidate: SchedulingCandidate, now_s: float) -> float:
        """Return the level of a sequence that is admitted now."""
        ...

    def displaces(self, waiting: SchedulingCandidate, running: SchedulingCandidate, now_s: float) -> bool:
        """Return whether `waiting` shall run instead of `running`, if not both can."""
        ...


class FirstCome:
    """A policy that serves requests in the order of arrival, within a tenant; the tenants take turns by the tokens they
    were served.

    No sequence is displaced; when blocks are short, the latest yields, so the oldest always finishes.
    """

    def turn(self, candidate: SchedulingCandidate, now_s: float) -> Rank:
        return candidate.served, candidate.order

    def yields(self, candidate: SchedulingCandidate, now_s: float) -> Rank:
        return (candidate.order,)

    def level(self, candidate: SchedulingCandidate, now_s: float) -> float:
        return candidate.priority

    def displaces(self, waiting: SchedulingCandidate, running: SchedulingCandidate, now_s: float) -> bool:
        return False


class ShortestRemaining:
    """A policy that serves the shortest remaining time first, with ageing.

    Schrage (1968) proved the rule best for the mean latency of one server; output lengths are predicted here, not
    known. Each second of waiting counts as `ageing` seconds less work, so that a long request eventually passes short
    ones: one of r seconds is ahead of all that arrive r / ageing seconds after it. A running sequence is displaced only
    by one that is ahead by more than a quarter of its remaining time, since displacing has a cost and predictions have
    errors.
    """

    def __init__(self, ageing: float) -> None:
        self._ageing = ageing

    def turn(self, candidate: SchedulingCandidate, now_s: float) -> Rank:
        return candidate.served, self._aged_s(candidate, now_s), candidate.order

    def yields(self, candidate: SchedulingCandidate, now_s: float) -> Rank:
        return self._aged_s(candidate, now_s), candidate.order

    def level(self, candidate: SchedulingCandidate, now_s: float) -> float:
        return candidate.priority

    def displaces(self, waiting: SchedulingCandidate, running: SchedulingCandidate, now_s: float) -> bool:
        gain_s = self._aged_s(running, now_s) - self._aged_s(waiting, now_s)
        return gain_s > _AHEAD * running.remaining_s and waiting.remaining_s < running.remaining_s

    def _aged_s(self, candidate: SchedulingCandidate, now_s: float) -> float:
        return candidate.remaining_s - self._ageing * (now_s - candidate.arrived_s)


class PriorityFirst:
    """A policy that serves a higher level first, and displaces a lower one for it. Within a level tenants take turns,
    then the first arrival is first.

    A waiting sequence rises by one level every `level_s` seconds, and keeps the level at which it is admitted. So
    arrivals of a higher priority do not overtake it for ever, and a displaced sequence does not displace another before
    it has waited.
    """

    def __init__(self, level_s: float) -> None:
        self._level_s = level_s

    def turn(self, candidate: SchedulingCandidate, now_s: float) -> Rank:
        return -self.level(candidate, now_s), candidate.served, candidate.order

    def yields(self, candidate: SchedulingCandidate, now_s: float) -> Rank:
        return -candidate.level, candidate.order

    def level(self, candidate: SchedulingCandidate, now_s: float) -> float:
        return candidate.level + (now_s - candidate.since_s) // self._level_s

    def displaces(self, waiting: SchedulingCandidate, running: SchedulingCandidate, now_s: float) -> bool:
        return self.level(waiting, now_s) > running.level


def choose_policy(name: str, *, ageing: float, level_s: float) -> SchedulingPolicy:
    """Return the policy `name`: "fcfs", "shortest" (with `ageing`) or "priority" (with `level_s`)."""
    match name:
        case "fcfs":
            return FirstCome()
        case "shortest":
            return ShortestRemaining(ageing)
        case "priority":
            return PriorityFirst(level_s)
    raise ValueError(f"policy {name!r} is unknown")
