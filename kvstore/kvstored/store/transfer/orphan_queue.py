"""Which blocks are evicted from a tier before the policy is asked: orphans, which no client can reach as things are.

Owns the lists as they were last found (residency/orphans.py), the deepest first, so that a chain is never left with a
hole. They may be as long as the index, so they stay arrays: a number is made of an entry when it is looked at.
Precedence is that of a policy: a lease, a child that is kept and a tenant's minimum keep an orphan where it is. An
orphan that became reachable since is one no more; until the next finding it may still be named, which costs a cached
block.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import numpy as np

from kvstored.store.blocks import Residency
from kvstored.store.blocks.orphans import Tokens
from kvstored.store.policies import Policy

MAX_LOOKS = 64  # at entries that may not be evicted, for one question


class _Round:
    """One tier's list, gone through again and again. Entries that are gone are dropped on the way, the others
    are moved up to `kept`."""

    __slots__ = ("_at", "_kept", "_tokens")

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._at = self._kept = 0

    def __len__(self) -> int:
        return len(self._tokens) - self._at + self._kept

    def look(self) -> int:
        if self._at == len(self._tokens):
            self._tokens = self._tokens[: self._kept]
            self._at = self._kept = 0
        return int(self._tokens[self._at])

    def drop(self) -> None:
        self._at += 1

    def keep(self) -> None:
        self._tokens[self._kept] = self._tokens[self._at]
        self._kept += 1
        self._at += 1


class OrphanQueue:
    """One for all tiers. Blocks are kept as tokens: a row number may be used again."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._rounds = [_Round(np.empty(0, np.uint64)) for _ in residency.tiers]

    def replace(self, by_tier: Sequence[Tokens]) -> None:
        """What was found now, for each tier, by falling depth. The arrays are its own from here on."""
        self._rounds = [_Round(tokens) for tokens in by_tier]

    def next(self, policy: Policy, exclude: Container[int], tenant: int | None) -> int:
        """An orphan whose copy may be evicted from the policy's tier now, or -1. With `tenant`, one of its own."""
        residency, orphans = self._residency, self._rounds[policy.tier]
        for _ in range(min(len(orphans), MAX_LOOKS)):
            row = residency.current(orphans.look())
            if row < 0 or not residency.has(row, policy.tier):
                orphans.drop()
            elif row in exclude or not residency.is_evictable(row, policy.tier) or not self._fits(policy, row, tenant):
                orphans.keep()
            else:
                return row
        return -1

    def _fits(self, policy: Policy, row: int, tenant: int | None) -> bool:
        """Whether its tenant may be asked for room: it is the one that needs it, or it stays above its minimum."""
        return self._residency.tenant_of(row) == tenant if tenant is not None else policy.spares_minimum(row)
