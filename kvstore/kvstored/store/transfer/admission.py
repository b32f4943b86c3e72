"""The admission of blocks to tiers that they need not be in: a key-addressed one, or one before DRAM.

A gate says which blocks are worth a write there, and how fast they may be written, where the lane has no budget of its
own; there is one for a tier, for what is evicted from the tier above it and for what is copied early, so that both
together keep to the rate. A frequency admission says whether a block may take the place of another one. Both ask
admissions and residency, and write nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class RemoteWrites:
    """Rules for writes to a key-addressed tier. `share` is `evicted` (write a block when the tier above evicts it, if
    `admission` wants it), `reused` (write early also blocks that were used twice or have several continuations) or
    `all` (write every block early). `bytes_per_s` 0 means no limit.
    """

    share: str = EVICTED
    admission: str = ALWAYS
    bytes_per_s: int = 0


class TierGate:
    """The gate of one tier. `admission` judges what is evicted; `early` what may be written before, None: nothing.
    `refuses(row)` says whether a block must not be written."""

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
        """Say whether a block that is evicted should get a copy, and may now."""
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
        """Say whether a block should get a copy before it is evicted."""
        if self._early is None or self._refuses(row):
            return False
        return self._early.admit(row, self._clock.monotonic_ns())

    @property
    def shares_early(self) -> bool:
        return self._early is not None

    def has_budget(self) -> bool:
        return self._bucket.ready(self._clock.monotonic_ns())

    def wait_s(self) -> float:
        """Return the seconds until the budget allows the next write."""
        now_ns = self._clock.monotonic_ns()
        return (self._bucket.ready_at_ns(now_ns) - now_ns) / NS_PER_S

    def spend(self, nbytes: int) -> None:
        """Charge the slot of a block that is being written to the budget."""
        self._bucket.ready(self._clock.monotonic_ns())
        self._bucket.spend(nbytes)


class FrequencyAdmission:
    """The admission to the full tier at position `tier` by frequency of use: a block is copied there only if it was
    used more often than the one that would leave for it.

    Admission by comparison with the victim is TinyLFU's (Einziger, Friedman, Manes, ACM TOS 13(4), 2017). Uses are
    counted by residency, over evictions too, and not by a sketch: nothing is done at a use. A block that was popular
    once must give way in the end, so a victim loses in any case once the tier has declined `_TURNOVERS` times its own
    blocks since the last use of the victim that was seen here. Without this admission a set of blocks that are used in
    turn, larger than the tier, is copied there over and over, and hardly one is read from it.
    """

    def __init__(self, residency: ResidencyView, tier: int) -> None:
        self._residency = residency
        self._tier = tier
        self._declined = 0  # blocks
        self._won: dict[int, tuple[int, int]] = {}  # by token: its last use, and `_declined` when that was first seen

    def admits(self, row: int, victim: int, blocks: int = 1) -> bool:
        """Return whether `row` takes the place of `victim`. If it does not, `blocks` blocks are counted as declined:
        `row` and the blocks that need it.
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
    """The parts that a tier needs to take in blocks that no eviction sends to it. `link` leads to the tier of `room`;
    `gate` says which blocks the tier should have. `frequency` decides about places in a tier before DRAM; where it is
    None, a block may take the place of any other.
    """

    link: TierLink
    room: Room
    gate: TierGate
    frequency: FrequencyAdmission | None = None
