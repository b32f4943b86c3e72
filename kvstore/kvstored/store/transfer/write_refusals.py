"""Why blocks were not written to NVMe, for `kvctl explain`: the last of them, by token, and how many.

Bounded by count; the one noted longest ago falls off. A block that is written after all is forgotten here.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum

from kvstored.telemetry import Counters

REMEMBERED = 16_384


class Refusal(Enum):
    """The values go over the admin socket; kvctl has a sentence for each."""

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


class Refusals:
    """See the module."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._why: OrderedDict[int, Refusal] = OrderedDict()

    def note(self, token: int, refusal: Refusal) -> None:
        counter = _COUNTERS.get(refusal)
        if counter is not None and self._why.get(token) is not refusal:  # once, however often it is asked
            self._counters.add(counter)
        self._why[token] = refusal
        self._why.move_to_end(token)
        if len(self._why) > REMEMBERED:
            self._why.popitem(last=False)

    def of(self, token: int) -> Refusal | None:
        return self._why.get(token)

    def forget(self, token: int) -> None:
        self._why.pop(token, None)
