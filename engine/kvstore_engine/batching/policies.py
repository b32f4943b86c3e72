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
    """The facts about one sequence that a scheduling policy may use. `order` numbers arrivals. `since_s` is the time at
    which its present wait began. `level` is the priority level with which it was last admitted. `remaining_s` is the
    predicted number of seconds that it still has to run. `served` is the number of tokens that were computed for its
    tenant.
    """

    order: int
    arrived_s: float
    since_s: float
    priority: int
    level: float
    remaining_s: float
    served: float


class SchedulingPolicy(Protocol):
    """A rule for the order in which sequences are served, and in which they lose their blocks when blocks are short.
    Its ranks are tuples that are compared; the smallest is first. `now_s` is the present time in seconds.
    """

    def turn(self, candidate: SchedulingCandidate, now_s: float) -> Rank:
        """Return the rank of `candidate`, a sequence that waits to run or has prompt tokens to compute. The sequence
        with the smallest rank is served first.
        """
        ...

    def yields(self, candidate: SchedulingCandidate, now_s: float) -> Rank:
        """Return the rank of the running sequence `candidate` for the case that blocks are short: the sequence with the
        largest rank loses its blocks first.
        """
        ...

    def level(self, candidate: SchedulingCandidate, now_s: float) -> float:
        """Return the priority level of `candidate` if it is admitted now; it keeps that level while it runs. A sequence
        with a higher level is served first.
        """
        ...

    def displaces(self, waiting: SchedulingCandidate, running: SchedulingCandidate, now_s: float) -> bool:
        """Return True if the running sequence `running` should lose its blocks so that `waiting` can run, when there is
        no room for both.
        """
        ...


class FirstCome:
    """A policy that serves the tenant that was served the fewest tokens first, and a tenant's requests in the order of
    arrival. A waiting sequence never displaces a running one. When blocks are short, the latest arrival loses its
    blocks, so the oldest always finishes.
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
    """A policy that serves the sequence with the shortest predicted remaining time first. Each second since a
    sequence's arrival counts as `ageing` seconds less remaining time, so that long requests are not delayed for ever. A
    waiting sequence displaces a running one only if its time is shorter by more than a quarter of the running one's
    time.
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
    """A policy that serves the highest priority level first, and lets a waiting sequence displace a running one of a
    lower level. Within a level the tenant that was served the fewest tokens, then the first arrival, goes first. A
    waiting sequence rises by one level every `level_s` seconds and keeps the level with which it begins to run.
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
    """Return the scheduling policy called `name`: "fcfs", "shortest" (with its parameter `ageing`) or "priority" (with
    its parameter `level_s`). Raises ValueError for another name.
    """
    match name:
        case "fcfs":
            return FirstCome()
        case "shortest":
            return ShortestRemaining(ageing)
        case "priority":
            return PriorityFirst(level_s)
    raise ValueError(f"policy {name!r} is unknown")
