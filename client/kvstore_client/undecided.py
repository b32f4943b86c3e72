"""Which blocks of a put were sent, and are to be sent again: what the daemon's status of each says.

Owns the patience with other clients, block by block. Never sends, and knows nothing of where a block lies.
Invariant: an orphan is sent again only while a block before it is to come.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvstore_client.put_order import PENDING_PATIENCE_S
from kvstore_proto.v1 import kvstore_pb2 as wire

_DECIDED = frozenset({wire.STORE_STATUS_STORED, wire.STORE_STATUS_PRESENT})


class Undecided:
    """`gave_up`: there was a block that another client was writing for longer than we wait for that."""

    def __init__(self) -> None:
        self._blocks: set[int] = set()
        self._pending_since: dict[int, float] = {}  # of these, those that another client is writing
        self.gave_up = False

    def refused(self, blocks: Iterable[int]) -> None:
        """The daemon has not looked at them: they go again, all of them."""
        self._blocks.update(blocks)

    def answered(self, blocks: Sequence[int], statuses: bytes, now: float, deadline: float) -> list[int]:
        """Positions in `blocks` of those that are to be sent again; the others are decided."""
        if not self._blocks and not self._pending_since and _DECIDED.issuperset(statuses):
            return []  # the common case: each of them once, none of them again
        again: list[int] = []
        for position, (block, status) in enumerate(zip(blocks, statuses, strict=False)):
            if status != wire.STORE_STATUS_AGAIN:
                self._pending_since.pop(block, None)
            if self._goes_again(block, status, now, deadline):
                self._blocks.add(block)
                again.append(position)
            else:
                self._blocks.discard(block)
        return again

    def _goes_again(self, block: int, status: int, now: float, deadline: float) -> bool:
        if status == wire.STORE_STATUS_AGAIN:
            since = self._pending_since.setdefault(block, now)
            is_patient = now < min(since + PENDING_PATIENCE_S, deadline)
            self.gave_up = self.gave_up or not is_patient
            return is_patient
        if status == wire.STORE_STATUS_ORPHANED:
            return any(before < block for before in self._blocks)
        return status == wire.STORE_STATUS_WANTED
