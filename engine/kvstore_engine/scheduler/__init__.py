"""Who computes when: the order of requests, the tokens of a step, and who has to wait or to yield."""

from kvstore_engine.scheduler.admission import Admission, Overloaded
from kvstore_engine.scheduler.budget import StepBudget
from kvstore_engine.scheduler.choice import choose_policy
from kvstore_engine.scheduler.fairness import VirtualTokens
from kvstore_engine.scheduler.policy import Policy, Standing
from kvstore_engine.scheduler.prediction import LengthPredictor

__all__ = [
    "Admission",
    "LengthPredictor",
    "Overloaded",
    "Policy",
    "Standing",
    "StepBudget",
    "VirtualTokens",
    "choose_policy",
]
