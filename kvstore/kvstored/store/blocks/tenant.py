"""One tenant's part of the index: its keys, and the ghost of those that are gone.

The dictionary of readable blocks is apart from that of the others, so that a lookup is one dictionary access
a key and stops at the first that is not there. Blocks taken over in bulk are in neither as long as they are bulk rows
(see `bulk_keys`). Structural separation: no key of one tenant is ever looked up in another's.
"""

from __future__ import annotations

from kvstored.store.blocks.bulk_keys import BulkKeys
from kvstored.store.blocks.ghost import Ghost


class TenantIndex:
    """`readable`: key → row of blocks that can be served. `unreadable`: rows being filled, and placeholders. `bulk`:
    rows of readable blocks, `bulk_blocks` of them still bulk rows.
    """

    __slots__ = ("bulk", "bulk_blocks", "fingerprints", "ghost", "name", "readable", "unreadable")

    def __init__(self, name: str, ghost_limit: int) -> None:
        self.name = name
        self.readable: dict[bytes, int] = {}
        self.unreadable: dict[bytes, int] = {}
        self.bulk: BulkKeys | None = None
        self.bulk_blocks = 0
        self.ghost = Ghost(ghost_limit)
        self.fingerprints: set[int] = set()  # that ever stored a block here

    @property
    def blocks(self) -> int:
        """Readable blocks."""
        return len(self.readable) + self.bulk_blocks

    def find(self, key: bytes) -> int:
        """The row of a readable block, or -1."""
        row = self.readable.get(key)
        if row is None:
            return -1 if self.bulk is None else self.bulk.get(key)
        return row

    def row(self, key: bytes) -> int:
        row = self.find(key)
        return self.unreadable.get(key, -1) if row < 0 else row
