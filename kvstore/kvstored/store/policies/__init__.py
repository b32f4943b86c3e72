"""Policies: which block leaves a tier next, which may enter, and how hot each is."""

from kvstore_predictor.base import State
from kvstored.policy_names import ADMISSIONS, BEST, POLICIES, WITH_WORTH, resolve
from kvstored.store.policies.admission import Admission
from kvstored.store.policies.base import (
    ChainHint,
    EvictionPolicy,
    Learns,
    Listens,
    Origin,
    PolicySettings,
    RequestContext,
    ResidencyClass,
    Share,
    Weighs,
    deliver_hint,
)
from kvstored.store.policies.factory import create, create_admission, create_empty, eviction_order, joined, succeed

__all__ = [
    "ADMISSIONS",
    "BEST",
    "POLICIES",
    "WITH_WORTH",
    "Admission",
    "ChainHint",
    "Learns",
    "Listens",
    "Origin",
    "EvictionPolicy",
    "PolicySettings",
    "RequestContext",
    "ResidencyClass",
    "Share",
    "State",
    "Weighs",
    "create",
    "create_admission",
    "create_empty",
    "deliver_hint",
    "eviction_order",
    "joined",
    "resolve",
    "succeed",
]
