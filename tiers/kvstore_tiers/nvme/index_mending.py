"""What an index should say, and what commits changed while it is made to say it.

Owns columns and pending changes, in memory; never touches the database (index.py does).
Invariant: what was committed while the index is mended is newer than the columns, whichever is entered first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore_tiers.nvme.index_seal import VALUE
from kvstore_tiers.nvme.slab import Location

Entry = tuple[bytes, Location]
_KEY_BYTES = 16


@dataclass
class IndexColumns:
    """What an index should say, a column each. `key` is two little-endian words."""

    key: npt.NDArray[Any]
    slab: npt.NDArray[Any]
    slot: npt.NDArray[Any]
    generation: npt.NDArray[Any]

    def packed(self) -> PackedEntries:
        """In the order of their keys, as the database wants them."""
        order = np.lexsort(self.key.astype("<u8").byteswap().T[::-1])
        values = np.empty(len(order), [("slab", "<u4"), ("slot", "<u4"), ("generation", "<u8")])
        values["slab"], values["slot"], values["generation"] = self.slab, self.slot, self.generation
        return PackedEntries(self.key[order].tobytes(), values[order].tobytes())


@dataclass(frozen=True)
class PackedEntries:
    """Keys in their order, and the values, each joined."""

    keys: bytes
    values: bytes

    def part(self, first: int, last: int) -> list[tuple[bytes, bytes]]:
        places = [at * _KEY_BYTES for at in range(first, last)]
        return [(self.keys[at : at + _KEY_BYTES], self.values[at : at + VALUE.size]) for at in places]


@dataclass(frozen=True)
class Commit:
    """What one group commit says to the index."""

    published: Sequence[Entry]
    withdrawn: Sequence[Entry]
    reasons: dict[tuple[int, int], str]
    sequence: int


@dataclass
class PendingChanges:
    """Commits that came while the index waits to be mended, or is."""

    commits: list[Commit] = field(default_factory=list)  # those the database has not got, oldest first
    newer: dict[bytes, bytes] = field(default_factory=dict)  # what they entered; nothing for what they took out again
    _gone: set[bytes] = field(default_factory=set)  # what they took out: key and value

    def note(self, commit: Commit) -> None:
        for key, location in commit.withdrawn:
            value = packed(location)
            self._gone.add(key + value)
            if self.newer.get(key) == value:
                self.newer[key] = b""
        for key, location in commit.published:
            self.newer[key] = packed(location)

    def without_older(self, entries: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """Those of `entries` of which no commit knows better."""
        if not self.newer and not self._gone:
            return entries
        return [entry for entry in entries if entry[0] not in self.newer and entry[0] + entry[1] not in self._gone]


def packed(location: Location) -> bytes:
    return VALUE.pack(location.slab, location.index, location.generation)
