"""Policies that learn, made to believe at once what they have learnt."""

from dataclasses import replace

from kvstored.store.policies import EvictionPolicy
from kvstored.store.policies.chain_hazard import ChainHazard


def trust_at_once(policy: EvictionPolicy) -> None:
    """A policy that learns decides by its tables from the first request on; others are left as they are."""
    if isinstance(policy, ChainHazard):
        follower = policy.follower
        follower.learning = replace(follower.learning, requests_min=0, declining_min=0, returns_min=0)


def victims(policy: EvictionPolicy, now_ns: int, limit: int) -> list[int]:
    """Up to `limit` rows that may leave right now, in eviction order. Parents of these follow only after them."""
    seen: list[int] = []
    while len(seen) < limit and (row := policy.next_victim(now_ns, exclude=seen)) >= 0:
        seen.append(row)
    return seen
