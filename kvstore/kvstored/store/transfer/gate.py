"""The gate before NVMe: what may be written, what it costs, and why not.

Joins four judges, in this order: the breaker (does the tier take writes), the admission (is the block worth one; when
the endurance budget is scarce, only proven blocks are), the disk's own pace, and the budget itself (may it be
afforded). A block is charged together with those of its ancestors that have to be written with it. Owns no block and no
queue; remembers refusals for `kvctl explain`.
"""

from __future__ import annotations

from kvstored.clock import Clock
from kvstored.store.blocks import Residency
from kvstored.store.degraded import TierBreaker
from kvstored.store.endurance import TOO_MUCH, EnduranceAccount, Verdict
from kvstored.store.endurance.cost import COMMIT_BYTES, medium_bytes
from kvstored.store.policies import Admission
from kvstored.store.transfer.backlog import Backlog
from kvstored.store.transfer.prefix import MAX_CHAIN_BLOCKS, MAX_PATH_BLOCKS, missing_path
from kvstored.store.transfer.write_refusals import Refusal, Refusals

MAX_BEHIND_S = 10.0  # of writing that waits; beyond it the disk is too slow for what is put
# An allotment of the budget is a small write and a sync; a medium that takes longer takes no blocks.
ALLOTMENT_WAIT_S = 2.0
_USES_WHEN_SCARCE = 2


class WriteGate:
    """`throttle_ms`: how long `always` waits for budget."""

    def __init__(
        self,
        residency: Residency,
        admission: Admission,
        endurance: EnduranceAccount,
        breaker: TierBreaker,
        refusals: Refusals,
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
        self.refusals = refusals
        self._is_commit_paid = False

    def admits(self, row: int) -> bool:
        """Whether a block is worth a write that no client insists on; remembers why not."""
        refusal = self._why_not(row)
        if refusal is not None:
            self.refuse(row, refusal)
        return refusal is None

    def is_coming(self, row: int) -> bool:
        """Whether a write of the block waits or is under way."""
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
        """While the budget is scarce a block has to have been used again, or be what a chain on NVMe hangs on."""
        return (
            self._residency.accesses(row) >= _USES_WHEN_SCARCE
            or self._residency.children(row, self._residency.durable) > 0
        )

    # Paying

    def path(self, row: int) -> list[int] | None:
        """What has to be written for `row` to be of use after a restart, head first; empty when it is there. None when
        it is more blocks of this size than the budget has left, however far the chain goes on."""
        return missing_path(self._residency, row, self.is_coming, self._affordable_blocks(row))

    def _affordable_blocks(self, row: int) -> int:
        left_bytes = self.endurance.left_bytes
        if left_bytes is None or self._residency.fastest_in_memory(row) < 0:
            return MAX_CHAIN_BLOCKS
        blocks = left_bytes // medium_bytes(self._residency.slot_bytes(row))
        return blocks if blocks < MAX_PATH_BLOCKS else MAX_CHAIN_BLOCKS  # a longer path is cut to what can be paid for

    def pay(self, row: int) -> list[int] | Verdict:
        """The path of a block, paid for; or why it cannot be."""
        path, tenant = self.path(row), self._residency.tenant_of(row)
        if path is None:
            return self.endurance.reject(tenant)
        verdict = self.endurance.charge(tenant, self._cost_of(path))
        if verdict is not Verdict.GRANTED:
            return verdict
        self._is_commit_paid |= bool(path)
        return path

    async def pay_in_time(self, token: int, *, insists: bool) -> list[int] | None:
        """As `pay`, waiting for the budget if a client insists, else only for an allotment of it. None: not in time, or
        the block has gone meanwhile."""
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
        if verdict is Verdict.GRANTED:
            self._is_commit_paid |= bool(path)
            return path
        row = residency.current(token)
        if row >= 0:
            self.refuse(row, self.breaker_or(verdict))
        return None

    def refund(self, tenant: int, slot_bytes: int) -> None:
        """Nothing of a block that was paid for was written."""
        self.endurance.refund(tenant, medium_bytes(slot_bytes))

    def commit_begins(self) -> None:
        """A group commit starts. Blocks that come too late for it need another one, which is paid for now."""
        self._is_commit_paid = self.backlog.has_more and self.endurance.charge_unasked(COMMIT_BYTES)

    def _cost_of(self, path: list[int]) -> int:
        """With the commit that they will need, where it is not paid for yet."""
        if not path:
            return 0
        blocks = sum(medium_bytes(self._residency.slot_bytes(row)) for row in path)
        return blocks + (0 if self._is_commit_paid else COMMIT_BYTES)

    # Saying no

    def refuse(self, row: int, refusal: Refusal) -> None:
        self.refusals.note(self._residency.token(row), refusal)

    def breaker_or(self, verdict: Verdict) -> Refusal:
        """What a verdict of the budget means for a block."""
        if not self.breaker.takes_writes:
            return Refusal.TIER
        return Refusal.SHARE if verdict is Verdict.OVER_SHARE else Refusal.BUDGET
