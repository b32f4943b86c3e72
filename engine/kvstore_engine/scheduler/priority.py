"""By priority, with preemption of running sequences and ageing.

Who waits rises by one level every `level_s` seconds, and keeps the level at which it is admitted. So a lower priority
is overtaken by whatever arrives, but not for ever; and who was displaced does not displace in turn before having
waited on.
"""

from kvstore_engine.scheduler.policy import Rank, Standing


class PriorityFirst:
    """A higher level displaces a lower one; of one level the tenants take turns, then the first come."""

    def __init__(self, level_s: float) -> None:
        self._level_s = level_s

    def turn(self, standing: Standing, now_s: float) -> Rank:
        return -self.level(standing, now_s), standing.served, standing.order

    def yields(self, standing: Standing, now_s: float) -> Rank:
        return -standing.level, standing.order

    def level(self, standing: Standing, now_s: float) -> float:
        return standing.level + (now_s - standing.since_s) // self._level_s

    def displaces(self, waiting: Standing, running: Standing, now_s: float) -> bool:
        return self.level(waiting, now_s) > running.level
