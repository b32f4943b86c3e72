"""One Store of a put that goes through staging, and what the daemon's statuses mean for the blocks of the put."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvstore_client.call import Call
from kvstore_client.staging import Extent, Use
from kvstore_proto.arena import ALIGNMENT_BYTES
from kvstore_proto.v1 import kvstore_pb2 as wire

NOWHERE = -1
PENDING_PATIENCE_S = 0.25  # for a block that another client is writing
_DECIDED = frozenset({wire.STORE_STATUS_STORED, wire.STORE_STATUS_PRESENT})


@dataclass(slots=True, eq=False)
class StoreCall:
    """Blocks (indices into the receipt), the offset of each in staging (NOWHERE: believed present), and its extent."""

    blocks: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    extents: list[Extent | None] = field(default_factory=list)
    use: Use = field(default_factory=Use)
    call: Call | None = None  # once it is sent

    @property
    def pages(self) -> list[int]:
        return [place // ALIGNMENT_BYTES + 1 for place in self.places]  # NOWHERE gives 0

    def add(self, block: int, place: int, extent: Extent | None) -> None:
        self.blocks.append(block)
        self.places.append(place)
        self.extents.append(extent)
        if extent is not None:
            self.use.extents.append(extent)

    def add_run(self, blocks: Sequence[int], extent: Extent, slot_bytes: int) -> None:
        """`add` of blocks in consecutive slots from the extent's first byte."""
        extents = [extent] * len(blocks)
        self.blocks += blocks
        self.places += range(extent.offset, extent.offset + len(blocks) * slot_bytes, slot_bytes)
        self.extents += extents
        self.use.extents += extents


class PendingOutcomes:
    """Which blocks were sent and are to be sent again, with patience for other clients, block by block.

    Invariant: an orphan is sent again only while the outcome of a block before it is pending. `gave_up`: another client
    was writing a block for longer than `PENDING_PATIENCE_S`.
    """

    def __init__(self) -> None:
        self._blocks: set[int] = set()
        self._other_client_since: dict[int, float] = {}  # of these, those that another client is writing
        self.gave_up = False

    def refused(self, blocks: Iterable[int]) -> None:
        """The daemon has not looked at them: all of them are to be sent again."""
        self._blocks.update(blocks)

    def answered(self, blocks: Sequence[int], statuses: bytes, now: float, deadline: float) -> list[int]:
        """Positions in `blocks` of those that are to be sent again; the others are decided."""
        if not self._blocks and not self._other_client_since and _DECIDED.issuperset(statuses):
            return []  # the common case: each of them once, none of them again
        again: list[int] = []
        for position, (block, status) in enumerate(zip(blocks, statuses, strict=False)):
            if status != wire.STORE_STATUS_AGAIN:
                self._other_client_since.pop(block, None)
            if self._goes_again(block, status, now, deadline):
                self._blocks.add(block)
                again.append(position)
            else:
                self._blocks.discard(block)
        return again

    def _goes_again(self, block: int, status: int, now: float, deadline: float) -> bool:
        if status == wire.STORE_STATUS_AGAIN:
            since = self._other_client_since.setdefault(block, now)
            is_patient = now < min(since + PENDING_PATIENCE_S, deadline)
            self.gave_up = self.gave_up or not is_patient
            return is_patient
        if status == wire.STORE_STATUS_ORPHANED:
            return any(before < block for before in self._blocks)
        return status == wire.STORE_STATUS_WANTED
