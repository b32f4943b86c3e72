"""How a tier takes in blocks that no eviction sends it: by which link, into what room, which ones, in whose place.

Owns nothing: what copies blocks there asks its parts.
"""

from __future__ import annotations

from typing import NamedTuple

from kvstored.store.transfer.contest import Contest
from kvstored.store.transfer.link import Link
from kvstored.store.transfer.remote_gate import RemoteGate
from kvstored.store.transfer.room import Room


class Intake(NamedTuple):
    """`link` leads to the tier of `room`; `gate` says which blocks the tier should have. `contest`: for places in it,
    where it is one before DRAM; None: a block may take the place of any other."""

    link: Link
    room: Room
    gate: RemoteGate
    contest: Contest | None = None

    def wins(self, row: int, victim: int, blocks: int = 1) -> bool:
        """Whether `row` may take the place of `victim`; see `Contest`."""
        return self.contest is None or self.contest.wins(row, victim, blocks)
