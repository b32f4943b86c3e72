"""The admission of blocks to tiers that they need not be in: a remote (key-addressed) tier, or device memory before
DRAM.

A gate says which blocks should be written to its tier, and how fast, where the lane has no budget of its own. One gate
serves evictions from the tier above and early copies alike, so that both together keep to the rate. A frequency
admission says whether a block may take the place of another one. Both ask admissions and the index, and write nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvstored.clock import NS_PER_S, Clock
from kvstored.policy_names import ALWAYS, EVICTED
from kvstored.store.blocks import ResidencyView
from kvstored.store.policies import Admission
from kvstored.store.transfer.link import TierLink
from kvstored.store.transfer.rates import TokenBucket
from kvstored.store.transfer.room import Room
from kvstored.telemetry import Counters

_BURST_S = 1.0
_TURNOVERS = 8
_NOTES_MAX = 4096  # victims that won; without its note a victim stays longer


class RemoteWrites(NamedTuple):
    """The rules for writes to a remote tier. `share` is `evicted` (write a block when the tier above evicts it, if
    `admission` wants it), `reused` (write early also blocks that were used twice or have several continuations) or
    `all` (write every block early). `bytes_per_s` 0 means no limit.
    """

    share: str = EVICTED
    admission: str = ALWAYS
    bytes_per_s: int = 0


class TierGate:
    """The judge of which blocks one tier should get. `admission` is the rule for blocks that are evicted from the tier
    above, `early` the rule for blocks that may be copied before that (None: no block is). `refuses(row)` returns True
    for a block that must not be written."""

    def __init__(
        self, residency: ResidencyView, admission: Admission, early: Admission | None, bytes_per_s: int, clock: Clock,
        counters: Counters, refuses: Callable[[int], bool],
    ) -> None:  # fmt: skip
        self._refuses = refuses
        self._residency = residency
        self._admission = admission
        self._early = early
        self._bucket = TokenBucket(bytes_per_s or None, round(_BURST_S * bytes_per_s))
        self._clock = clock
        self._counters = counters

    def admits(self, row: int) -> bool:
        """Return whether the block at `row`, which is being evicted, should get a copy in this tier, and whether the
        rate allows it now.
        """
        if self._refuses(row):
            return False
        if not self._admission.admit(row, self._clock.monotonic_ns()):
            self._counters.add("remote_unworthy_blocks")
            return False
        if not self.has_budget():
            self._counters.add("remote_over_rate_blocks")
            return False
        return True

    def shares(self, row: int) -> bool:
        """Return whether the block at `row` should get a copy in this tier before it is evicted."""
        if self._early is None or self._refuses(row):
            return False
        return self._early.admit(row, self._clock.monotonic_ns())

    @property
    def shares_early(self) -> bool:
        return self._early is not None

    def has_budget(self) -> bool:
        return self._bucket.ready(self._clock.monotonic_ns())

    def wait_s(self) -> float:
        """Return in how many seconds the rate allows the next write."""
        now_ns = self._clock.monotonic_ns()
        return (self._bucket.ready_at_ns(now_ns) - now_ns) / NS_PER_S

    def spend(self, nbytes: int) -> None:
        """Charge a write of `nbytes` to the tier's rate."""
        self._bucket.ready(self._clock.monotonic_ns())
        self._bucket.spend(nbytes)


class FrequencyAdmission:
    """A rule for a full tier: a block is copied there only if it was used more often than the block that would leave
    for it.

    The comparison with the victim is TinyLFU's (Einziger, Friedman, Manes, ACM TOS 13(4), 2017). The index counts uses,
    over evictions too, so nothing is done at a use. A block that was popular once must give way in the end: a victim
    loses in any case once the tier has declined `_TURNOVERS` times its own blocks since the victim's last use that was
    seen here. Without this rule, blocks that are used in turn and do not all fit would be copied over and over.
    """

    def __init__(self, residency: ResidencyView, tier: int) -> None:
        self._residency = residency
        self._tier = tier
        self._declined = 0  # blocks
        self._won: dict[int, tuple[int, int]] = {}  # by token: its last use, and `_declined` when that was first seen

    def admits(self, row: int, victim: int, blocks: int = 1) -> bool:
        """Return whether the block at `row` should take the place of the block at `victim`. If not, count `blocks`
        blocks as declined: `row` and the blocks that cannot be used without it.
        """
        residency = self._residency
        token, last_use_ns = residency.token(victim), residency.rows.last_access_ns[victim]
        seen_ns, declined = self._won.pop(token, (-1, self._declined))
        if seen_ns != last_use_ns:
            declined = self._declined
        is_stale = self._declined - declined > _TURNOVERS * residency.tier_blocks(self._tier)
        if is_stale or residency.accesses(row) > residency.accesses(victim):
            return True
        self._won[token] = last_use_ns, declined
        if len(self._won) > _NOTES_MAX:
            del self._won[next(iter(self._won))]
        self._declined += blocks
        return False


class TierIntake(NamedTuple):
    """The objects by which a tier takes in blocks that no eviction sends to it. `link` leads to the tier, and `room`
    allocates slots there; `gate` says which blocks the tier should have. `frequency` decides whether a block may take
    another's place in a full tier; None lets it take any place."""

    link: TierLink
    room: Room
    gate: TierGate
    frequency: FrequencyAdmission | None = None
