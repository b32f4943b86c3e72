"""First come, first served. Within a tenant: the tenants take turns by what they were served."""

from kvstore_engine.policies.policy import Candidate, Rank


class FirstCome:
    """No sequence is displaced; where blocks are short, the latest yields, so the oldest always finishes."""

    def turn(self, candidate: Candidate, now_s: float) -> Rank:
        return candidate.served, candidate.order

    def yields(self, candidate: Candidate, now_s: float) -> Rank:
        return (candidate.order,)

    def level(self, candidate: Candidate, now_s: float) -> float:
        return candidate.priority

    def displaces(self, waiting: Candidate, running: Candidate, now_s: float) -> bool:
        return False
