"""By priority, with preemption of running sequences and ageing.

A waiting sequence rises by one level every `level_s` seconds, and keeps the level at which it is admitted. So arrivals
of a higher priority do not overtake it for ever, and a displaced sequence does not displace another before it has
waited.
"""

from kvstore_engine.policies.policy import Candidate, Rank


class PriorityFirst:
    """A higher level displaces a lower one. Within a level tenants take turns, then the first arrival is first."""

    def __init__(self, level_s: float) -> None:
        self._level_s = level_s

    def turn(self, candidate: Candidate, now_s: float) -> Rank:
        return -self.level(candidate, now_s), candidate.served, candidate.order

    def yields(self, candidate: Candidate, now_s: float) -> Rank:
        return -candidate.level, candidate.order

    def level(self, candidate: Candidate, now_s: float) -> float:
        return candidate.level + (now_s - candidate.since_s) // self._level_s

    def displaces(self, waiting: Candidate, running: Candidate, now_s: float) -> bool:
        return self.level(waiting, now_s) > running.level
