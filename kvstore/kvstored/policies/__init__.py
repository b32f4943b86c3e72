"""Policies: which block leaves a tier next, which may enter, and how hot each is."""

from kvstored.policies.admission import Admission
from kvstored.policies.base import ChainHint, Policy, PolicySettings, RequestContext, ResidencyClass, Share
from kvstored.policies.registry import ADMISSIONS, BEST, POLICIES, create, create_admission, has_worth, resolve
from kvstored.policies.telling import known_step, tell

__all__ = [
    "ADMISSIONS",
    "BEST",
    "POLICIES",
    "Admission",
    "ChainHint",
    "Policy",
    "PolicySettings",
    "RequestContext",
    "ResidencyClass",
    "Share",
    "create",
    "create_admission",
    "has_worth",
    "known_step",
    "resolve",
    "tell",
]
