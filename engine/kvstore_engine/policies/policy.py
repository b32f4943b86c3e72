"""Who goes first, and who has to yield: the contract of a policy.

Owns the terms in which a policy sees a sequence. A policy never sees tokens or blocks and acts on nothing.

The implementation MUST be a pure function of its arguments; MUST let every sequence that waits long enough come first
(no starvation); and MUST NOT let two sequences displace each other in turns: `displaces(a, b)` implies that b does not
displace a until it has waited on.
"""

from dataclasses import dataclass
from typing import Protocol

Rank = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """What a policy knows of a sequence.

    order:       number of its arrival.
    since_s:     since when it waits, this time.
    level:       its priority when it was admitted last, waiting included; its plain priority before.
    remaining_s: how long it would still run, as predicted.
    served:      what its tenant has been given so far (scheduler.fairness).
    """

    order: int
    arrived_s: float
    since_s: float
    priority: int
    level: float
    remaining_s: float
    served: float


class Policy(Protocol):
    """An order of sequences. Smaller ranks first."""

    def turn(self, candidate: Candidate, now_s: float) -> Rank:
        """For those that wait: for admission, or for prompt tokens in a step."""
        ...

    def yields(self, candidate: Candidate, now_s: float) -> Rank:
        """For those that run: where memory is short, the largest rank yields first."""
        ...

    def level(self, candidate: Candidate, now_s: float) -> float:
        """The level at which a sequence that is admitted now goes on."""
        ...

    def displaces(self, waiting: Candidate, running: Candidate, now_s: float) -> bool:
        """Whether `waiting` is to run instead of `running`, where not both can."""
        ...
