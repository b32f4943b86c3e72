"""The keys of one tenant: its dictionaries, the table of its bulk rows, and the ghost of the removed keys.

Structural separation: no key of one tenant is ever looked up in another's. The dictionary of readable blocks is apart
from the dictionary of the others, so that a lookup is one access a key and stops at the first missing one.

A dictionary entry with its key and its number takes some 150 bytes. Blocks that were taken over in bulk and have not
changed since are bulk rows: their keys are in one byte string, and are found by open addressing over row numbers: 22
bytes a block, three times the time of a dictionary. Before a bulk row changes, its key moves to the dictionary, and it
becomes an ordinary row. Entries are never taken out: a row whose key has moved, or that is free or another block's, is
no longer a bulk row, and the table checks that. A tenant who forges keys makes only its own lookups slower.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore_cuda.host_copies import native
from kvstore_proto.identity import KEY_BYTES
from kvstore_tiers.key_table import ENTRY_MASK, WORD_BITS, KeyTable
from kvstored.store.blocks.ghost import Ghost
from kvstored.store.blocks.rows import RowColumns

_WORDS_A_KEY = 4
_FEW_KEYS, _KEYS_AT_ONCE = 8, 256  # compiled code looks for more together, without a miss of the caches for each
_WORD_MASK: int = 2**WORD_BITS - 1

Column = npt.NDArray[Any]


@lru_cache(maxsize=1024)
def _unpacker(keys: int) -> struct.Struct:
    return struct.Struct(f"{KEY_BYTES}s" * keys)


def unpack_keys(packed: bytes) -> tuple[bytes, ...]:
    """Return the keys that are packed in `packed`, 16 bytes each. Raises ValueError if the length is no
    multiple of 16.
    """
    keys, rest = divmod(len(packed), KEY_BYTES)
    if rest:
        raise ValueError(f"packed keys must be a multiple of {KEY_BYTES} bytes, got {len(packed)}")
    return _unpacker(keys).unpack(packed)


class BulkKeys:
    """A table of one tenant's bulk rows, by key. A bulk row is a block that was taken over at the daemon's start and
    has not changed since, so that its key is in no dictionary.
    """

    __slots__ = ("_all", "_bits", "_mask", "_multiplier", "_rows", "_size", "_table", "members")

    def __init__(self, rows: RowColumns, table: KeyTable) -> None:
        self._rows, self._all = rows, table
        self._multiplier, self._size, self._table = table.multiplier, table.size, table.table
        self._bits, self._mask = table.bits, table.mask
        self.members = table.positions  # also rows that are no bulk rows any more

    def get(self, key: bytes) -> int:
        """Return the bulk row of the block `key`, or -1 when there is none."""
        rows, table, last = self._rows, self._table, self._mask
        head = int.from_bytes(key[:8], "little")
        tag = (head >> WORD_BITS << self._bits) & ENTRY_MASK
        place = (head * self._multiplier & _WORD_MASK) * self._size >> WORD_BITS
        while (entry := table[place]) >= 0:
            row = entry ^ tag
            is_ours = row <= last and rows.bulk_keys[row << 4 : (row << 4) + KEY_BYTES] == key
            if is_ours and rows.mask[row] and rows.keys[row] is None:
                return row
            place += 1
        return -1

    def has_place(self, key: bytes, row: int) -> bool:
        """Return whether a search for `key` would come upon `row` in this table, if `row` were a bulk row (one taken
        over at the start and not changed since)."""
        keys, table = self._rows.bulk_keys, self._table
        if keys[row << 4 : (row << 4) + KEY_BYTES] != key:
            return False
        place = (int.from_bytes(key[:4], "little") * self._multiplier & _WORD_MASK) * self._size >> WORD_BITS
        while (there := table[place]) >= 0:
            if there & self._mask == row:
                return True
            place += 1
        return False

    def find_run(self, keys: Sequence[bytes], hot: Callable[[bytes], int | None]) -> list[int]:
        """Return the rows of the leading blocks of `keys` that are stored, up to the first that is not. `hot` finds the
        blocks that are not in this table: it gets a key and returns its row or None."""
        if native.library is None or len(keys) < _FEW_KEYS:
            return self._find_one_by_one(keys, hot)
        found: list[int] = []
        for begin in range(0, len(keys), _KEYS_AT_ONCE):
            some = keys[begin : begin + _KEYS_AT_ONCE]
            found += self._find_some(some, hot)
            if len(found) < begin + len(some):
                break
        return found

    def _find_some(self, keys: Sequence[bytes], hot: Callable[[bytes], int | None]) -> list[int]:
        mask, moved, found = self._rows.mask, self._rows.keys, list[int]()
        words = np.frombuffer(b"".join(keys), "<u8").reshape(-1, 2)
        for key, row in zip(keys, self._all.find_each(self._keys(), words).tolist(), strict=True):
            at = hot(key)
            if at is None:
                at = row
                if row < 0 or not mask[row] or moved[row] is not None:
                    at = self.get(key) if row >= 0 else -1  # another row may have the same key
                if at < 0:
                    break
            found.append(at)
        return found

    def _find_one_by_one(self, keys: Sequence[bytes], hot: Callable[[bytes], int | None]) -> list[int]:
        rows, table, last = self._rows, self._table, self._mask
        bulk_keys, mask, moved = rows.bulk_keys, rows.mask, rows.keys
        words = np.frombuffer(b"".join(keys), "<u4").reshape(-1, _WORDS_A_KEY)
        homes, tags = self._all.homes(words[:, 0]), self._all.tags(words[:, 1])
        found: list[int] = []
        for key, place, tag in zip(keys, homes.tolist(), tags.tolist(), strict=True):
            at = hot(key)
            row = -1 if at is None else at
            if at is None:
                while (entry := table[place]) >= 0:
                    row = entry ^ tag
                    is_ours = row <= last and bulk_keys[row << 4 : (row << 4) + KEY_BYTES] == key
                    if is_ours and mask[row] and moved[row] is None:
                        break
                    place += 1
                if entry < 0:
                    break
            found.append(row)
        return found

    def find_each(self, keys: Column) -> Column:
        """Return for each of `keys` its row in this table, or -1. `keys` has shape (n, 2): a key is two little-endian
        64-bit words."""
        mask, moved = self._rows.mask, self._rows.keys

        def is_bulk(rows: Column) -> list[bool]:
            return [bool(mask[row]) and moved[row] is None for row in rows.tolist()]

        return self._all.find_each(self._keys(), keys, is_bulk)

    def _keys(self) -> Column:
        return np.frombuffer(self._rows.bulk_keys, "<u8").reshape(-1, 2)


class TenantIndex:
    """The keys of one tenant's blocks. `readable` maps keys to rows of blocks that can be read; `unreadable` maps keys
    to rows of blocks that are being filled, or of placeholders. `bulk` finds the rows taken over at the start, and
    `bulk_blocks` is the number of those whose keys are still in neither dictionary."""

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
        """The number of readable blocks."""
        return len(self.readable) + self.bulk_blocks

    def find(self, key: bytes) -> int:
        """Return the row of the readable block `key`, or -1 when there is none."""
        row = self.readable.get(key)
        if row is None:
            return -1 if self.bulk is None else self.bulk.get(key)
        return row

    def has_none_of(self, keys: Sequence[bytes]) -> bool:
        """Return True if none of `keys` has a row. False may mean that this takes a closer look."""
        return self.bulk is None and self.readable.keys().isdisjoint(keys) and self.unreadable.keys().isdisjoint(keys)

    def row(self, key: bytes) -> int:
        row = self.find(key)
        return self.unreadable.get(key, -1) if row < 0 else row
