"""Which blocks leave a tier before the policy is asked: orphans, which nobody can reach as things are.

Owns the list as it was last found (residency/orphans.py), the deepest first, so that a chain is never left with a hole.
Precedence is that of a policy: a lease, a child that stays and a tenant's minimum keep an orphan where it is. An orphan
that became reachable since is one no more; until the next finding it may still be named, which costs a cached block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable

from kvstored.policies import Policy
from kvstored.residency import Residency

MAX_LOOKS = 64  # at entries that may not leave, for one question


class CutOff:
    """One for all tiers. Rows are kept as tokens: a row number may be used again."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._tokens: list[deque[int]] = [deque() for _ in residency.tiers]

    def replace(self, rows: Iterable[int]) -> None:
        """What was found now; rows by falling depth."""
        mask = self._residency.rows.mask
        for tokens in self._tokens:
            tokens.clear()
        for row in rows:
            for tier, tokens in enumerate(self._tokens):
                if mask[row] >> tier & 1:
                    tokens.append(self._residency.token(row))

    def next(self, policy: Policy, exclude: Container[int], tenant: int | None) -> int:
        """An orphan whose copy may leave the policy's tier now, or -1. With `tenant`, one of its own."""
        residency, tokens = self._residency, self._tokens[policy.tier]
        for _ in range(min(len(tokens), MAX_LOOKS)):
            row = residency.current(tokens[0])
            if row < 0 or not residency.has(row, policy.tier):
                tokens.popleft()
            elif row in exclude or not residency.may_leave(row, policy.tier) or not self._fits(policy, row, tenant):
                tokens.rotate(-1)
            else:
                return row
        return -1

    def _fits(self, policy: Policy, row: int, tenant: int | None) -> bool:
        """Whether its tenant may be asked for room: it is the one that needs it, or it stays above its minimum."""
        owner = self._residency.tenant_of(row)
        if tenant is not None:
            return owner == tenant
        share = policy.shares.get(owner)
        if share is None:
            return True
        left_bytes = self._residency.staying_bytes(owner, policy.tier) - self._residency.slot(row, policy.tier).nbytes
        return left_bytes >= share.min_bytes
