"""First come, first served. Within a tenant: the tenants take turns by what they were served."""

from kvstore_engine.scheduler.policy import Rank, Standing


class FirstCome:
    """Nobody is displaced; where memory is short, the latest yields. The oldest thus always finishes."""

    def turn(self, standing: Standing, now_s: float) -> Rank:
        return standing.served, standing.order

    def yields(self, standing: Standing, now_s: float) -> Rank:
        return (standing.order,)

    def level(self, standing: Standing, now_s: float) -> float:
        return standing.priority

    def displaces(self, waiting: Standing, running: Standing, now_s: float) -> bool:
        return False
