"""One tenant's part of the index: its keys, and the ghost of those that are gone.

The dictionary of readable blocks is apart from that of the others, so that a lookup is one dictionary access
a key and stops at the first that is not there. Structural separation: no key of one tenant is ever looked up
in another's.
"""

from __future__ import annotations

from kvstored.residency.ghost import Ghost


class TenantIndex:
    """`readable`: key → row of blocks that can be served. `unreadable`: rows being filled, and placeholders."""

    __slots__ = ("fingerprints", "ghost", "name", "readable", "unreadable")

    def __init__(self, name: str, ghost_limit: int) -> None:
        self.name = name
        self.readable: dict[bytes, int] = {}
        self.unreadable: dict[bytes, int] = {}
        self.ghost = Ghost(ghost_limit)
        self.fingerprints: set[int] = set()  # that ever stored a block here

    def row(self, key: bytes) -> int:
        row = self.readable.get(key)
        return self.unreadable.get(key, -1) if row is None else row
