"""Carries what a policy has learned over to another policy as a file carries it over a restart."""

from __future__ import annotations

import numpy as np

from kvstore_predictor.base import State
from kvstored.store.policies import EvictionPolicy, Learns
from kvstored.store.policies.base import Origin


def exported(policy: EvictionPolicy) -> dict[str, np.ndarray]:
    """The pieces of `policy`, joined."""
    assert isinstance(policy, Learns)
    pieces: dict[str, list[np.ndarray]] = {}
    for name, piece in policy.export_state():
        pieces.setdefault(name, []).append(piece)
    return {name: np.concatenate(parts) for name, parts in pieces.items()}


def same_clock(now_ns: int, tenants: int = 1) -> Origin:
    return Origin(np.arange(tenants), 0, now_ns)


def carried(state: State, policy: EvictionPolicy, now_ns: int, tenants: int = 1) -> None:
    """Let `policy`, of a residency with the same tenants and clock, go on from `state`."""
    assert isinstance(policy, Learns)
    policy.import_state(state, same_clock(now_ns, tenants))
