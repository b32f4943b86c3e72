"""How much of the budget each tenant has had lately: while it is scarce, no tenant gets more than a fair portion.

While more than half a day's worth is left, the first to ask is served: budget that no other tenant wants should not be
held back. Below that, a tenant that has written more than its part of what all active ones wrote lately waits
for the others to catch up, or for the bucket to rise again. So a noisy tenant can burn half the bucket, never the half
that is kept for the others. Pure: times are arguments.
"""

from __future__ import annotations

import math

from kvstored.clock import NS_PER_S

ACTIVE_S = 600.0  # a tenant that asked within this time counts among those that share
MEMORY_S = 21_600.0  # what was written longer ago counts less and less
_DECAY_STEP_S = 60.0


class FairShares:
    """Usage by tenant number. `slack_bytes`: by how much one may be ahead, so that single blocks do not decide."""

    def __init__(self, slack_bytes: int) -> None:
        self._slack_bytes = slack_bytes
        self._used: dict[int, float] = {}
        self._asked_ns: dict[int, int] = {}
        self._decayed_ns: int | None = None

    def asked(self, tenant: int, now_ns: int) -> None:
        self._asked_ns[tenant] = now_ns

    def used(self, tenant: int, nbytes: int, now_ns: int) -> None:
        self._decay(now_ns)
        self._used[tenant] = max(0.0, self._used.get(tenant, 0.0) + nbytes)

    def is_over(self, tenant: int, now_ns: int) -> bool:
        """Whether the tenant has had more than a fair portion of what the active ones wrote."""
        self._decay(now_ns)
        horizon_ns = now_ns - round(ACTIVE_S * NS_PER_S)
        active = {number for number, at_ns in self._asked_ns.items() if at_ns >= horizon_ns} | {tenant}
        if len(active) == 1:
            return False
        fair = sum(self._used.get(number, 0.0) for number in active) / len(active)
        return self._used.get(tenant, 0.0) > fair + self._slack_bytes

    def _decay(self, now_ns: int) -> None:
        if self._decayed_ns is None:
            self._decayed_ns = now_ns
        elapsed_s = (now_ns - self._decayed_ns) / NS_PER_S
        if elapsed_s < _DECAY_STEP_S:
            return
        keep = math.exp(-elapsed_s / MEMORY_S)
        self._used = {tenant: used * keep for tenant, used in self._used.items() if used * keep >= 1}
        horizon_ns = now_ns - round(ACTIVE_S * NS_PER_S)
        self._asked_ns = {tenant: at_ns for tenant, at_ns in self._asked_ns.items() if at_ns >= horizon_ns}
        self._decayed_ns = now_ns
