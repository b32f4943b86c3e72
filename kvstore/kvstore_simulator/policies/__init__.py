"""Policies for studies: the daemon's, and others that no daemon is configured with."""

from __future__ import annotations

from typing import Final

from kvstored.policy_names import POLICIES as DAEMON
from kvstored.policy_names import resolve
from kvstored.store.blocks import Residency
from kvstored.store.policies import EvictionPolicy, PolicySettings
from kvstored.store.policies import create as create_by_address

POLICIES: Final[dict[str, str]] = {
    **DAEMON,
    "fifo": f"{__name__}.fifo:Fifo",
    "lfu": f"{__name__}.gdsf:lfu",
    "sieve": f"{__name__}.fifo:Sieve",
    "arc": f"{__name__}.arc:Arc",
    "w-tinylfu": f"{__name__}.w_tinylfu:WTinyLfu",
    "gdsf": f"{__name__}.gdsf:Gdsf",
}


def address_of(name: str) -> str:
    """Return the import address of the eviction policy `name`, or the name itself if the daemon knows it."""
    name = resolve(name)
    return name if name in DAEMON else POLICIES.get(name, name)


def create(name: str, residency: Residency, tier: int, settings: PolicySettings | None = None) -> EvictionPolicy:
    """Return a new eviction policy `name` for tier number `tier` of `residency`. Raises ValueError for an unknown
    name.
    """
    return create_by_address(address_of(name), residency, tier, settings)
