"""A link is one direction between two tiers: its lane, its breaker, and the way in which bytes cross.

It never decides which block moves (`moves.py`). No call blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstore_tiers.base import Completion, Outcome, OutcomeKind, Slot, Tier
from kvstore_tiers.segments import AlignedBuffer, Segment
from kvstored.clock import NS_PER_S, Clock
from kvstored.store.degraded.breaker import TierBreaker
from kvstored.store.transfer.mover import Mover
from kvstored.store.transfer.staging import CodecStaging, StagedImage


def lane_name(tiers: Sequence[str], source: int, destination: int) -> str:
    """Return the name of the lane that copies from the tier at position `source` to the one at `destination`:
    "nvme→host".
    """
    return f"{tiers[source]}→{tiers[destination]}"


class TierLink:
    """A way to copy blocks from the tier at `source` to the tier at `destination`, through the lane `lane`. `breaker`
    belongs to the slower of the two tiers, None when both are memory. `staging` is set when the destination has a
    codec: a block is coded there before it gets a slot.

    The tier that can reach the memory of the other tier moves and verifies the bytes: the source's `move_out` fills the
    destination's slot, or the destination's `move_in` reads the source's slot. When both tiers can, the slower one
    moves the bytes. A source that lends files is read by a destination that loads files. When neither tier can, or when
    the source's bytes must be decoded first, the bytes pass through a buffer that the source fills.
    """

    def __init__(
        self,
        source: int,
        destination: int,
        tiers: Sequence[Tier],
        lane: str,
        mover: Mover,
        clock: Clock,
        breaker: TierBreaker | None = None,
        staging: CodecStaging | None = None,
    ) -> None:
        self.staging = staging
        self.source, self.destination = source, destination
        self.destination_tier = tiers[destination]
        self.lane, self.mover, self.clock = mover.lanes[lane], mover, clock
        self.breaker = breaker
        self._from, self._to = tiers[source], tiers[destination]
        self._is_upwards = destination < source
        self._is_by_file = self._from.info.lends_files and self._to.info.loads_files
        self.is_for_exact = self._to.info.kind == "keyed"  # others find its blocks by their keys alone
        self._is_as_put = self._from.info.is_in_memory and self._from.info.coding.is_none
        self._is_read_out = self._to.info.is_in_memory and (self._is_upwards or not self._is_as_put)
        self.takes_runs = staging is None and not self._is_by_file and (self._is_read_out or self._is_as_put)

    @property
    def is_open(self) -> bool:
        """True when blocks may be moved along this link now: the circuit breaker of the slower tier allows it."""
        if self.breaker is None:
            return True
        return self.breaker.serves_reads if self._is_upwards else self.breaker.takes_writes

    @property
    def spare_in_s(self) -> float:
        """The seconds until the lane's byte rate allows a copy that no request waits for; 0 if it allows one now."""
        now_ns = self.clock.monotonic_ns()
        return (self.lane.spare_at_ns(now_ns) - now_ns) / NS_PER_S

    async def stage(self, source: Slot, key: bytes, whole_bytes: int, *, takes_lossy: bool) -> StagedImage | Outcome:
        """Bring the block `key` in the slot `source` into the form of the destination's codec (`CodecStaging.stage`).
        `whole_bytes` is the size of a slot for the block as it is. The destination must have a codec."""
        assert self.staging is not None
        return await self.staging.stage(self._from, source, key, whole_bytes, takes_lossy=takes_lossy)

    def carry(
        self, source: Slot, slot: Slot, key: bytes, image: Segment | None, done: Completion,
        unreadable: Callable[[], None],
    ) -> None:  # fmt: skip
        """Copy the block `key` from the slot `source`, or its coded `image` if there is one, to `slot`, and call `done`
        with the outcome. `unreadable` is called when reading `source` into a buffer between the tiers has failed.
        """
        if image is not None:
            self._to.move_in(slot, image, key, done)
        elif self._is_by_file:
            self._from.lend(source, self._to.loader(slot, key), done)
        elif self._is_read_out:
            self._from.move_out(source, self._to.slot_segment(slot), key, done)
        elif self._is_as_put:
            self._to.move_in(slot, self._from.slot_segment(source), key, done)
        else:
            buffer = AlignedBuffer(slot.nbytes).segment(slot.nbytes)

            def store(outcome: Outcome) -> None:
                if outcome.ok:
                    self._to.move_in(slot, buffer, key, done)
                else:
                    unreadable()
                    done(outcome)

            self._from.move_out(source, buffer, key, store)

    def carry_run(
        self, sources: Sequence[Slot], slots: Sequence[Slot], keys: Sequence[bytes],
        done: Callable[[Sequence[Outcome]], None],
    ) -> None:  # fmt: skip
        """Copy the blocks `keys` from the slots `sources` to `slots`, as `carry` does for each, and call `done` once,
        with their outcomes. Only a link that `takes_runs` can."""
        if self._is_read_out:
            self._from.move_out_run(sources, [self._to.slot_segment(slot) for slot in slots], keys, done)
        else:
            self._to.move_in_run(slots, [self._from.slot_segment(source) for source in sources], keys, done)

    def judge(self, number: int, outcome: Outcome, *, is_of_another: bool) -> None:
        """Report the `outcome` of the transfer `number` to the circuit breaker. `is_of_another` is true if the failure
        was in the other tier, which says nothing about the breaker's tier."""
        if self.breaker is None:
            return
        if self._is_by_file:
            is_of_another = outcome.kind is OutcomeKind.FAILED and not outcome.errno
        judged = Outcome(OutcomeKind.CANCELLED) if is_of_another else outcome
        self.breaker.ended(number, "read" if self._is_upwards else "write", judged)
