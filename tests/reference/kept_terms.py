"""Retention over an index of blocks on NVMe, as a start finds them, and what saves its terms; no tiers, no clients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvstored.clock import Clock
from kvstored.store.blocks import Residency
from kvstored.store.policies import create
from kvstored.store.policies.ranked import Priorities
from kvstored.store.retention import Retention
from kvstored.telemetry import Counters

Rows = dict[bytes, tuple[int, int, frozenset[str]]]


def retention_of(residency: Residency, clock: Clock) -> Retention:
    """Return the retention of an index, which notes later terms."""
    priorities = Priorities(residency)
    for tier in range(len(residency.tiers)):
        priorities.follow(create("lru", residency, tier))
    dram = SimpleNamespace(capacity_bytes=1 << 40, ceiling_bytes=1 << 40)
    limits = SimpleNamespace(pinned_per_tenant_bytes=1 << 40, pinned_per_owner_bytes=1 << 40)
    ground: Any = SimpleNamespace(
        residency=residency, clock=clock, counters=Counters(), config=SimpleNamespace(limits=limits), tiers=[dram] * 2
    )
    idle: Any = SimpleNamespace(tick=lambda _: None)
    discard = [lambda slot, tenant: None] * len(residency.tiers)
    found = Retention(ground, priorities, idle, discard, lambda token: False)
    found.later.follow()
    return found


def terms_in_index(retention: Retention, residency: Residency) -> Rows:
    """Return expiry (monotonic seconds), priority and owners of the blocks that have terms, by key."""
    found = {}
    for row in range(residency.rows.capacity):
        if residency.tier_mask(row):
            owners = frozenset(retention.pins.names(row))
            assert bool(owners) == bool(residency.pin_count(row)) == bool(residency.pinned_by(row))
            if residency.terms_of(row) != (0, 0, 0):
                found[residency.key(row)] = residency.expires_s(row), residency.priority(row), owners
    return found
