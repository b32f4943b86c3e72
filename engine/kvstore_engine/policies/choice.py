"""The policies by name."""

from kvstore_engine.policies.fcfs import FirstCome
from kvstore_engine.policies.policy import Policy
from kvstore_engine.policies.priority import PriorityFirst
from kvstore_engine.policies.shortest import ShortestRemaining


def choose_policy(name: str, *, ageing: float, level_s: float) -> Policy:
    """The policy `name`: "fcfs", "shortest" (with `ageing`) or "priority" (with `level_s`)."""
    match name:
        case "fcfs":
            return FirstCome()
        case "shortest":
            return ShortestRemaining(ageing)
        case "priority":
            return PriorityFirst(level_s)
    raise ValueError(f"policy {name!r} is unknown")
