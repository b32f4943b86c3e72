"""The gate before NVMe: what may be written, what it costs, and why not; and the backlog of what is being written.

The gate joins four judges, in this order: the breaker (does the tier take writes), the admission (is the block worth
one; when the endurance budget is scarce, only proven blocks are), the disk's own pace, and the budget itself (may it be
afforded). A block is charged together with its ancestors that have to be written with it: after a restart it
can be had only through the blocks before it. The gate remembers refusals for `kvctl explain`, a bounded number; the one
noted longest ago falls off, and a block that is written after all is forgotten. The gate writes nothing: write-back
enters writes in the backlog and ends them.
Invariant: a block has one write at a time.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvstored.clock import Clock
from kvstored.store.blocks import Residency, ResidencyView
from kvstored.store.degraded.breaker import TierBreaker
from kvstored.store.endurance.account import TOO_MUCH, EnduranceAccount
from kvstored.store.endurance.budget import COMMIT_BYTES, WriteVerdict, medium_bytes
from kvstored.store.policies import Admission
from kvstored.store.transfer.moves import BlockMove
from kvstored.telemetry import Counters

MAX_BEHIND_S = 10.0  # of writing that waits; beyond it the disk is too slow for what is put
# An allotment of the budget is a small write and a sync; a medium that takes longer takes no blocks.
ALLOTMENT_WAIT_S = 2.0
MAX_PATH_BLOCKS = 1024
MAX_CHAIN_BLOCKS = 1 << 32
REMEMBERED = 16_384  # refusals
_USES_WHEN_SCARCE = 2
_QUEUE_FROM_BYTES = 8 << 20  # less is no queue


class Refusal(Enum):
    """The reason why a block was not written to NVMe. The values are sent to kvctl, which has a sentence for each."""

    ADMISSION = "admission"  # not worth a write yet
    WORTH = "worth"  # nor is its chain, by what is known of such chains
    SCARCE = "scarce"  # the budget runs low, and the block was used once
    BUDGET = "budget"  # the budget is spent
    SHARE = "share"  # the budget is scarce, and the tenant has had its portion
    TIER = "tier"  # the tier is degraded and takes no writes
    BEHIND = "behind"  # the disk is too far behind with what it was given
    ROOM = "room"  # no room on NVMe, and nothing there may be evicted
    WRITE_FAILED = "write-failed"
    OTHER_TENANT = "other-tenant"  # NVMe has a block of this key of another tenant


_COUNTERS = {
    Refusal.ADMISSION: "admission_refused_blocks",
    Refusal.WORTH: "admission_refused_blocks",
    Refusal.SCARCE: "budget_refused_blocks",
    Refusal.BUDGET: "budget_refused_blocks",
    Refusal.SHARE: "budget_refused_blocks",
    Refusal.TIER: "shed_blocks",
    Refusal.BEHIND: "shed_blocks",
}


class WriteState(Enum):
    """The progress of a write to NVMe. BEGUN: the tier has it. WRITTEN: it is durable after the next sync."""

    QUEUED = "queued"
    BEGUN = "begun"
    WRITTEN = "written"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class Write(BlockMove):
    """A move of one block to the durable tier. `settled` resolves to True when the copy is durable, False when it will
    not be.
    """

    settled: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    state: WriteState = WriteState.QUEUED


class Backlog:
    """The writes on their way to the durable tier. `writes` has them by the token of the block; the ones in `gathering`
    wait for the next batch. `bytes_per_s()` returns the write rate that the disk has shown."""

    def __init__(self, bytes_per_s: Callable[[], float]) -> None:
        self._bytes_per_s = bytes_per_s
        self.writes: dict[int, Write] = {}
        self.gathering: list[Write] = []  # of those
        self.begun = 0  # of those: the tier has them
        self.nbytes = 0

    def __contains__(self, token: int) -> bool:
        return token in self.writes

    @property
    def queued(self) -> int:
        """The number of writes that have been started and that the tier does not have yet."""
        return len(self.writes) - len(self.gathering) - self.begun

    @property
    def has_more(self) -> bool:
        """True when the tier will get more writes: queued ones, or writes that gather for the next batch."""
        return self.queued > 0 or bool(self.gathering)

    @property
    def seconds(self) -> float:
        """The seconds that the disk needs for the backlog."""
        return self.nbytes / self._bytes_per_s() if self.nbytes > _QUEUE_FROM_BYTES else 0.0


def missing_path(
    residency: ResidencyView, row: int, is_coming: Callable[[int], bool], most: int = MAX_CHAIN_BLOCKS
) -> list[int] | None:
    """Return the rows to write so that the block at `row` can be used after a restart: the block and its ancestors that
    NVMe does not have and that are not being written, the first of the chain first.

    The path ends at an ancestor without a readable copy, which cannot be written. A block of a sliding-window or
    recurrent layer group is the whole path, since it is of use alone. A path longer than `MAX_PATH_BLOCKS` is cut at
    its end, so call again for `row` later. `is_coming(row)` returns whether a write is under way. Return None when more
    than `most` blocks are missing."""
    path: list[int] = []
    durable = residency.durable
    while row >= 0 and residency.fastest_in_memory(row) >= 0 and not residency.has(row, durable) and not is_coming(row):
        if len(path) >= most:
            return None
        path.append(row)
        if residency.stands_alone(row):
            break
        row = residency.parent(row)
    path.reverse()
    return path[:MAX_PATH_BLOCKS]


class WriteGate:
    """The judge of writes to the durable tier: it says which blocks are written, and pays for them from the endurance
    budget. A put in mode `always` waits up to `throttle_ms` for budget.
    """

    def __init__(
        self,
        residency: Residency,
        admission: Admission,
        endurance: EnduranceAccount,
        breaker: TierBreaker,
        counters: Counters,
        backlog: Backlog,
        clock: Clock,
        *,
        throttle_ms: int,
    ) -> None:
        self._residency = residency
        self.admission = admission
        self.backlog = backlog
        self._clock = clock
        self._throttle_s = throttle_ms / 1000
        self.endurance = endurance
        self.breaker = breaker
        self._counters = counters
        self._refusals: OrderedDict[int, Refusal] = OrderedDict()  # by token
        self._is_commit_paid = False

    def admits(self, row: int) -> bool:
        """Return whether the block at `row` should be written although no client insists on it. A refusal is remembered
        with its reason.
        """
        refusal = self._why_not(row)
        if refusal is not None:
            self.refuse(self._residency.token(row), refusal)
        return refusal is None

    def is_coming(self, row: int) -> bool:
        """Return whether a write of the block at `row` waits or is under way."""
        return self._residency.token(row) in self.backlog

    def _why_not(self, row: int) -> Refusal | None:
        if not self.breaker.takes_writes:
            return Refusal.TIER
        now_ns = self._clock.monotonic_ns()
        if not self.admission.admit(row, now_ns):
            return Refusal.WORTH if self.admission.judges_by_worth(row, now_ns) else Refusal.ADMISSION
        if self.endurance.is_scarce and not self._is_proven(row):
            return Refusal.SCARCE
        if self.backlog.seconds > MAX_BEHIND_S:
            return Refusal.BEHIND
        return None

    def _is_proven(self, row: int) -> bool:
        """Say whether a block may be written while the budget is scarce: it was used again, or a chain on NVMe hangs on
        it."""
        return (
            self._residency.accesses(row) >= _USES_WHEN_SCARCE
            or self._residency.dependents(row, self._residency.durable) > 0
        )

    # Paying

    def path(self, row: int) -> list[int] | None:
        """Return the blocks to write so that the block at `row` can be used after a restart, the first of the chain
        first; empty when all are written. Return None when the budget has too little left for them.
        """
        return missing_path(self._residency, row, self.is_coming, self._affordable_blocks(row))

    def _affordable_blocks(self, row: int) -> int:
        left_bytes = self.endurance.left_bytes
        if left_bytes is None or self._residency.fastest_in_memory(row) < 0:
            return MAX_CHAIN_BLOCKS
        blocks = left_bytes // medium_bytes(self._residency.slot_bytes(row))
        return blocks if blocks < MAX_PATH_BLOCKS else MAX_CHAIN_BLOCKS  # a longer path is cut to what can be paid for

    def pay(self, row: int) -> list[int] | WriteVerdict:
        """Charge the endurance budget for the block at `row` and the ancestors to be written with it. Return these
        rows, or the verdict that refuses them.
        """
        path, tenant = self.path(row), self._residency.tenant_of(row)
        if path is None:
            return self.endurance.reject(tenant)
        verdict = self.endurance.charge(tenant, self._cost_of(path))
        if verdict is not WriteVerdict.GRANTED:
            return verdict
        self._is_commit_paid |= bool(path)
        return path

    def pay_run(self, run: Sequence[int]) -> list[int] | None:
        """Charge the endurance budget for the blocks `run`, which follow one another, and the ancestors to be written
        with them. Return these rows, which end with `run`; None, having charged nothing, where each is to be paid for
        by itself: the budget has too little for all, or some need no write of their own."""
        path = self.path(run[-1])
        if path is None or path[-len(run) :] != run:
            return None
        if self.endurance.charge(self._residency.tenant_of(run[-1]), self._cost_of(path)) is not WriteVerdict.GRANTED:
            return None
        self._is_commit_paid = True
        return path

    async def pay_in_time(self, token: int, *, insists: bool) -> list[int] | None:
        """Pay as `pay` does for the block that `token` names. If a client `insists`, wait up to `throttle_ms` for
        budget, otherwise only for an allotment of it. Return None when the budget did not come in time, or the block is
        gone.
        """
        residency = self._residency
        row = residency.current(token)
        if row < 0:
            return None
        path: list[int] = []

        def cost() -> int | None:
            current = residency.current(token)
            if current < 0 or residency.fastest_in_memory(current) < 0 or not self.breaker.takes_writes:
                return None
            whole = self.path(current)
            path[:] = whole or ()
            return self._cost_of(path) if whole is not None else TOO_MUCH

        wait_s = self._throttle_s if insists else ALLOTMENT_WAIT_S
        verdict = await self.endurance.charge_in_time(
            residency.tenant_of(row), cost, wait_s, allotment_only=not insists
        )
        if verdict is WriteVerdict.GRANTED:
            self._is_commit_paid |= bool(path)
            return path
        if residency.is_current(token):
            self.refuse(token, self.breaker_or(verdict))
        return None

    def refund(self, tenant: int, slot_bytes: int, written_bytes: int = 0) -> None:
        """Give back to the budget the bytes that `tenant` paid for a block with a slot of `slot_bytes` that was not
        stored, except for `written_bytes` that were written all the same."""
        cost_bytes = medium_bytes(slot_bytes) - (medium_bytes(written_bytes) if written_bytes else 0)
        self.endurance.refund(tenant, cost_bytes)

    def commit_begins(self) -> None:
        """Note that a group commit (a sync for all written blocks) starts. Pay for the next one if more writes wait for
        it.
        """
        self._is_commit_paid = self.backlog.has_more and self.endurance.charge_unasked(COMMIT_BYTES)

    def _cost_of(self, path: list[int]) -> int:
        """Return the cost of a path, with the commit that it will need where that is not paid for yet."""
        if not path:
            return 0
        blocks = sum(medium_bytes(self._residency.slot_bytes(row)) for row in path)
        return blocks + (0 if self._is_commit_paid else COMMIT_BYTES)

    # Saying no

    def refuse(self, token: int, refusal: Refusal) -> None:
        """Remember why the block that `token` names is not written."""
        counter = _COUNTERS.get(refusal)
        if counter is not None and self._refusals.get(token) is not refusal:  # once, however often it is asked
            self._counters.add(counter)
        self._refusals[token] = refusal
        self._refusals.move_to_end(token)
        if len(self._refusals) > REMEMBERED:
            self._refusals.popitem(last=False)

    def refusal_of(self, row: int) -> Refusal | None:
        """Return why the block at `row` was not written. Return None when no write was wanted, or one is under way."""
        return self._refusals.get(self._residency.token(row))

    def begins(self, token: int) -> None:
        """Forget the refusal of the block that `token` names, which is written after all."""
        self._refusals.pop(token, None)

    def breaker_or(self, verdict: WriteVerdict) -> Refusal:
        """Return the refusal to show for the budget's verdict `verdict`. It is TIER if the tier takes no writes
        anyway."""
        if not self.breaker.takes_writes:
            return Refusal.TIER
        return Refusal.SHARE if verdict is WriteVerdict.OVER_SHARE else Refusal.BUDGET
