"""Who computes when: the order of requests, the tokens of a step, and who has to wait or to yield."""

from kvstore_engine.policies.admission import Admission, Overloaded
from kvstore_engine.policies.budget import StepBudget
from kvstore_engine.policies.choice import choose_policy
from kvstore_engine.policies.fairness import VirtualTokens
from kvstore_engine.policies.policy import Candidate, Policy
from kvstore_engine.policies.prediction import LengthPredictor

__all__ = [
    "Admission",
    "LengthPredictor",
    "Overloaded",
    "Policy",
    "Candidate",
    "StepBudget",
    "VirtualTokens",
    "choose_policy",
]
