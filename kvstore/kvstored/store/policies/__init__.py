"""Policies: which block leaves a tier next, which may enter, and how hot each is."""

from kvstored.policy_names import ADMISSIONS, POLICIES, WITH_WORTH
from kvstored.store.policies.admission import Admission
from kvstored.store.policies.base import ChainHint, Policy, PolicySettings, RequestContext, ResidencyClass, Share
from kvstored.store.policies.registry import BEST, create, create_admission, resolve
from kvstored.store.policies.telling import tell

__all__ = [
    "ADMISSIONS",
    "BEST",
    "POLICIES",
    "WITH_WORTH",
    "Admission",
    "ChainHint",
    "Policy",
    "PolicySettings",
    "RequestContext",
    "ResidencyClass",
    "Share",
    "create",
    "create_admission",
    "resolve",
    "tell",
]
