"""Asking a policy for a victim within some containers only: the search is bounded, however many rows come first."""

from __future__ import annotations

import pytest

from kvstore_simulator.policies import create
from kvstore_tiers.base import Slot
from kvstored.clock import NS_PER_S, ManualClock
from kvstored.store.blocks import Residency
from kvstored.store.policies.ranked import Priorities
from kvstored.store.transfer.victims import MAX_LOOKS, AllBut, OrphanQueue, Victims
from tests.reference.examples import each_nth

ROWS = 4000


class Counted(AllBut):
    """Counts how often a policy asks whether a row is passed over."""

    asked = 0

    def __contains__(self, row: object) -> bool:
        self.asked += 1
        return super().__contains__(row)


@pytest.mark.parametrize("name", each_nth(["lru", "s3-fifo", "sieve", "arc", "w-tinylfu", "gdsf", "chain-hazard"], 3))
def test_one_question_within_containers_ends_soon(name: str) -> None:
    """4000 rows of another container are colder than the first of the wanted one."""
    residency = Residency(["host"])
    policy, tenant = create(name, residency, 0), residency.tenant("t")
    for n in range(ROWS):
        row = residency.insert(
            tenant, (n + 1).to_bytes(16, "big"), bytes(16), fingerprint_id=1, group=0, depth=0, payload_bytes=4096,
            now_ns=n,
        )  # fmt: skip
        residency.attach(row, 0, Slot(1 if n < ROWS - 10 else 2, 8192 * n, 8192, 1), n)
        residency.touch_run([row], n)
    passed_over = Counted(residency.copies[0], {2})
    Victims(policy, residency, OrphanQueue(residency), Priorities(residency), ManualClock(NS_PER_S)).next(passed_over)
    assert 0 < passed_over.asked <= MAX_LOOKS * (MAX_LOOKS + 1), "not the square of the rows"
