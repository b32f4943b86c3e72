"""The gate before a key-addressed tier, or one before DRAM: which blocks are worth a write there, and how fast they may
be written, where the lane has no budget of its own.

Owns that byte rate. Asks admissions and residency, writes nothing. One gate a tier, for what is evicted from the tier
above it and for what is shared early, so that both together keep to the rate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvstored.clock import NS_PER_S, Clock
from kvstored.policy_names import ALWAYS, EVICTED
from kvstored.store.blocks import ResidencyView
from kvstored.store.policies import Admission
from kvstored.store.transfer.rates import TokenBucket
from kvstored.telemetry import Counters

_BURST_S = 1.0


@dataclass(frozen=True, slots=True)
class RemoteWrites:
    """What is written to a key-addressed tier. `share`: `evicted` writes a block when it is evicted from the tier
    above, if `admission` wants it; `reused` also writes early what was used twice or continues in several ways, `all`
    every block. `bytes_per_s`: 0 is no limit."""

    share: str = EVICTED
    admission: str = ALWAYS
    bytes_per_s: int = 0


class RemoteGate:
    """`admission` judges what is evicted; `early` what may be written before, None: nothing. `refuses(tenant)`: whether
    that tenant's blocks must not be written."""

    def __init__(
        self, residency: ResidencyView, admission: Admission, early: Admission | None, bytes_per_s: int, clock: Clock,
        counters: Counters, refuses: Callable[[int], bool],
    ) -> None:  # fmt: skip
        self._refuses = refuses
        self._residency = residency
        self.admission = admission
        self._early = early
        self._bucket = TokenBucket(bytes_per_s or None, round(_BURST_S * bytes_per_s))
        self._clock = clock
        self._counters = counters

    def admits(self, row: int) -> bool:
        """Whether a block that is evicted should get a copy, and may now."""
        if self._refuses(self._residency.tenant_of(row)):
            return False
        if not self.admission.admit(row, self._clock.monotonic_ns()):
            self._counters.add("remote_unworthy_blocks")
            return False
        if not self.has_budget():
            self._counters.add("remote_over_rate_blocks")
            return False
        return True

    def shares(self, row: int) -> bool:
        """Whether a block should get a copy before it is evicted."""
        if self._early is None or self._refuses(self._residency.tenant_of(row)):
            return False
        return self._early.admit(row, self._clock.monotonic_ns())

    @property
    def shares_early(self) -> bool:
        return self._early is not None

    def has_budget(self) -> bool:
        return self._bucket.ready(self._clock.monotonic_ns())

    def wait_s(self) -> float:
        """How long until there is budget."""
        now_ns = self._clock.monotonic_ns()
        return (self._bucket.ready_at_ns(now_ns) - now_ns) / NS_PER_S

    def spend(self, row: int) -> None:
        """The block is being written."""
        self._bucket.ready(self._clock.monotonic_ns())
        self._bucket.spend(self._residency.slot_bytes(row))
