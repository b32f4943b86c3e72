"""Pure rules of scheduling: the order of sequences, the prompt tokens of a step, the load that is accepted."""

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
