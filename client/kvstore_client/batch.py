"""What one Store names: some blocks of a put and where they lie. Holds their bytes in the loan; decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore_client.keys import Chain
from kvstore_client.loan import Extent, Use
from kvstore_client.stream import PendingCall
from kvstore_proto.identity import KEY_BYTES, NO_PARENT

NOWHERE = -1


@dataclass(slots=True, eq=False)
class Batch:
    """One Store: its blocks (indices into the receipt), where each lies (NOWHERE: believed present), and in what."""

    blocks: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    extents: list[Extent | None] = field(default_factory=list)
    use: Use = field(default_factory=Use)
    call: PendingCall | None = None

    def add(self, block: int, place: int, extent: Extent | None) -> None:
        self.blocks.append(block)
        self.places.append(place)
        self.extents.append(extent)
        if extent is not None:
            self.use.extents.append(extent)

    def add_run(self, blocks: Sequence[int], extent: Extent, slot_bytes: int) -> None:
        """`add` of blocks that lie one behind the other from the extent's first byte."""
        extents = [extent] * len(blocks)
        self.blocks += blocks
        self.places += range(extent.offset, extent.offset + len(blocks) * slot_bytes, slot_bytes)
        self.extents += extents
        self.use.extents += extents


def names_of(chain: Chain, blocks: Sequence[int]) -> tuple[bytes, bytes]:
    """Packed keys and parents of blocks of a chain."""
    first, end = blocks[0], blocks[-1] + 1
    if end - first == len(blocks):  # one behind the other: the chain has them in one piece
        keys = chain.keys.packed
        parents = (
            keys[(first - 1) * KEY_BYTES : (end - 1) * KEY_BYTES]
            if first
            else NO_PARENT + keys[: (end - 1) * KEY_BYTES]
        )
        return keys[first * KEY_BYTES : end * KEY_BYTES], parents
    return b"".join(chain.keys[block] for block in blocks), b"".join(chain.parent_of(block) for block in blocks)
