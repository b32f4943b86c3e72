"""By priority, with preemption of running sequences and ageing.

Who waits rises by one level every `level_s` seconds, and keeps the level at which it is admitted. So a lower priority
is overtaken by whatever arrives, but not for ever; and who was displaced does not displace in turn before having
waited on.
"""

from kvstore_engine.policies.policy import Candidate, Rank


class PriorityFirst:
    """A higher level displaces a lower one; of one level the tenants take turns, then the first come."""

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
