"""A tier against a plain dict, driven by hypothesis.

Owns the model. Needs hypothesis, imported when the machine is made. Invariants checked after each step: the capacity
holds, the books add up, and every block of the model reads back as it was written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore_proto.arena import slot_bytes
from kvstore_tiers.base import OutcomeKind, Slot, Tier
from kvstore_tiers.testing.transfers import block, finish, get, put

if TYPE_CHECKING:
    from hypothesis.stateful import RuleBasedStateMachine

SIZES_BYTES = (0, 1, 4096, 5000, 30000)
OWNERS = ("", "tenant-a")


def tier_state_machine(
    make_tier: Callable[[], Tier], reopen: Callable[[Tier], Tier] | None = None
) -> type[RuleBasedStateMachine]:
    """Return a Hypothesis state machine that does random operations on a tier that `make_tier` opens and compares it
    with a dictionary. Its attribute `TestCase` is a test. `reopen` is for durable tiers: it closes a tier and opens it
    again, after which all synced blocks must be there.
    """
    from hypothesis import strategies as st
    from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

    class TierMachine(RuleBasedStateMachine):
        @initialize()
        def start(self) -> None:
            self.tier = make_tier()
            self.blocks: dict[int, tuple[Slot, int]] = {}
            self.next_number = 1

        @rule(size=st.sampled_from(SIZES_BYTES), owner=st.sampled_from(OWNERS))
        def put(self, size: int, owner: str) -> None:
            number, self.next_number = self.next_number, self.next_number + 1
            header, payload = block(number, size)
            slot = put(self.tier, header, payload, owner)
            if slot is not None:
                assert slot.nbytes >= slot_bytes(size)
                self.blocks[number] = (slot, size)

        @precondition(lambda self: self.blocks)
        @rule(data=st.data())
        def free(self, data: Any) -> None:
            self.tier.free(self.blocks.pop(self._pick(data))[0])

        @precondition(lambda self: self.blocks)
        @rule(data=st.data())
        def read(self, data: Any) -> None:
            number = self._pick(data)
            slot, size = self.blocks[number]
            self._must_hold(number, slot, size)

        @precondition(lambda self: self.blocks)
        @rule(data=st.data(), owner=st.sampled_from(OWNERS))
        def relocate(self, data: Any, owner: str) -> None:
            number = self._pick(data)
            source, size = self.blocks[number]
            target = self.tier.allocate(source.nbytes, owner)
            if target is None:
                return
            assert finish(self.tier.sync).ok
            key = number.to_bytes(16, "big")
            assert finish(lambda done: self.tier.relocate(source, target, key, done)).ok
            assert finish(self.tier.sync).ok
            self.tier.free(source)
            self.blocks[number] = (target, size)

        @precondition(lambda self: self.blocks)
        @rule(data=st.data())
        def read_with_a_wrong_key(self, data: Any) -> None:
            slot, size = self.blocks[self._pick(data)]
            outcome, _ = get(self.tier, slot, b"w" * 16, size)
            assert outcome.kind is OutcomeKind.CORRUPT

        @precondition(lambda self: self.blocks)
        @rule(data=st.data())
        def quarantine(self, data: Any) -> None:
            self.tier.quarantine(self.blocks.pop(self._pick(data))[0], "the model says so")

        @rule()
        def sync(self) -> None:
            assert finish(self.tier.sync).ok

        @precondition(lambda self: reopen is not None)
        @rule()
        def restart(self) -> None:
            assert reopen is not None
            assert finish(self.tier.sync).ok
            self.tier = reopen(self.tier)
            recovered = {int.from_bytes(header.key, "big"): slot for slot, header in self.tier.recover()}
            assert sorted(recovered) == sorted(self.blocks)
            self.blocks = {number: (slot, self.blocks[number][1]) for number, slot in recovered.items()}

        @invariant()
        def books_add_up(self) -> None:
            if not hasattr(self, "tier"):
                return
            statistics = self.tier.statistics()
            assert statistics.used_bytes <= statistics.capacity_bytes
            assert statistics.blocks == len(self.blocks)
            assert sum(statistics.used_by.values()) == statistics.used_bytes
            assert sum(slot.nbytes for slot, _ in self.blocks.values()) == statistics.used_by["blocks"]

        def teardown(self) -> None:
            if hasattr(self, "tier"):
                for number, (slot, size) in self.blocks.items():
                    self._must_hold(number, slot, size)
                self.tier.close()

        def _pick(self, data: Any) -> int:
            return int(data.draw(st.sampled_from(sorted(self.blocks))))

        def _must_hold(self, number: int, slot: Slot, size: int) -> None:
            header, payload = block(number, size)
            outcome, copy = get(self.tier, slot, header.key, size)
            assert outcome.ok, outcome
            assert np.array_equal(copy, payload)

    return TierMachine
