"""The contract of a policy: which sequence is served first, and which yields first.

A policy never sees tokens or blocks and acts on nothing. The implementation MUST be a pure function of its arguments;
MUST rank a sequence that waits long enough first (no starvation); and MUST NOT let two sequences displace each other in
turns: `displaces(a, b)` implies that b does not displace a until it has waited.
"""

from dataclasses import dataclass
from typing import Protocol

Rank = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """What a policy knows of a sequence.

    order:       number of its arrival.
    since_s:     when it began to wait, this time.
    level:       its priority when it was last admitted, raised by waiting; before that, its plain priority.
    remaining_s: predicted time until it ends, once it runs.
    served:      what its tenant has been served so far (`fairness`).
    """

    order: int
    arrived_s: float
    since_s: float
    priority: int
    level: float
    remaining_s: float
    served: float


class Policy(Protocol):
    """An order of sequences. The smallest rank is first."""

    def turn(self, candidate: Candidate, now_s: float) -> Rank:
        """The order of those that wait for admission, or for prompt tokens in a step."""
        ...

    def yields(self, candidate: Candidate, now_s: float) -> Rank:
        """The order of those that run: where blocks are short, the largest rank yields first."""
        ...

    def level(self, candidate: Candidate, now_s: float) -> float:
        """The level of a sequence that is admitted now."""
        ...

    def displaces(self, waiting: Candidate, running: Candidate, now_s: float) -> bool:
        """Whether `waiting` is to run instead of `running`, if not both can."""
        ...
