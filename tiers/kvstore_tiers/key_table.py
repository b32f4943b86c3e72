"""A hash table over a column of keys, made at once for very many of them: by compiled code (`key_tables.cpp`) where it
is loaded, else by NumPy, with equal results.

Open addressing over positions: 6 bytes a key. The bits that a position leaves free in an entry are a tag, bits of the
key, so that few keys are compared in vain. The hash is multiplication by a random odd number, whose low 32 bits are
scaled to the table, over key bytes that are themselves a digest.
"""

from __future__ import annotations

import ctypes as ct
import secrets
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore_cuda.host_copies import address_of, native

WORD_BITS = 32
_ENTRY_BITS = 31
ENTRY_MASK: int = 2**_ENTRY_BITS - 1
_PLACES_A_KEY = 1.5
_TAG_MASK = np.uint32(ENTRY_MASK)
_NOTHING = -1
_FEW = 1 << 12
_PLACES = 1 << 14
_PLACES_BEHIND = 1 << 10  # for entries whose places would be behind the table's end
_NO_PLACES = bytes([0xFF]) * (4 * _PLACES)  # a piece of an empty table

Column = npt.NDArray[Any]


class KeyTable:
    """A hash table that finds positions in an array of keys, many at a time. It contains the positions in `members`, or
    all positions if that is None. The array of keys is not kept: each call gets it as a parameter. `first` is the
    number that `move` will add to them. An entry of `table` is a position in its low `bits` and the key's tag above
    them, or -1. `may_repeat` says whether two of the keys may be equal."""

    __slots__ = ("_factor", "_tag_shift", "bits", "mask", "may_repeat", "multiplier", "places", "size", "table")

    def __init__(self, keys: Column, members: Column | None = None, first: int = 0) -> None:
        self.multiplier = secrets.randbits(WORD_BITS) | 1
        self.size = 1 + int(_PLACES_A_KEY * (len(keys) if members is None else len(members)))
        self.bits = (first + len(keys)).bit_length()
        self.mask = 2**self.bits - 1
        self._factor, self._tag_shift = np.uint32(self.multiplier), np.uint32(self.bits)
        table = None if native.library is None else self._compiled(native.library, keys, members)
        self.table = table or self._filled(keys, members)
        self.places = np.frombuffer(self.table, np.int32)

    def move(self, first: int) -> None:
        """Add the number `first` to every position in the table. It turns positions in a part of an array, which begins
        at `first`, into positions in the whole array."""
        if first:
            self.places[self.places != _NOTHING] += np.int32(first)

    def find_each(
        self, keys: Column, wanted: Column, may_be: Callable[[Column], Sequence[bool]] | None = None
    ) -> Column:
        """Return for each key in `wanted` its position in `keys`, or -1. Both have shape (n, 2): a key is two
        little-endian 64-bit words. `may_be` gets the positions of equal keys and returns a bool for each, False for one
        that does not count."""
        if may_be is None and len(wanted) and (library := native.library) is not None:
            return self._found(library, keys, wanted)
        found = np.full(len(wanted), _NOTHING, np.int32)
        words = np.ascontiguousarray(wanted).view("<u4")
        left, places, tags = np.arange(len(wanted)), self.homes(words[:, 0]), self.tags(words[:, 1])
        while len(left):
            there = self.places[places]
            there ^= tags  # negative where the place is empty
            goes_on = there >= 0
            equal = np.flatnonzero(goes_on & (there <= self.mask))
            at, asked = there[equal], left[equal]
            same = keys[at, 0] == wanted[asked, 0]
            same &= keys[at, 1] == wanted[asked, 1]
            if may_be is not None:
                same[same] = may_be(at[same])
            found[asked[same]] = at[same]
            goes_on[equal[same]] = False
            left, places, tags = left[goes_on], places[goes_on], tags[goes_on]
            places += 1
        return found

    def positions(self) -> Column:
        """Return the positions in the table, in no order."""
        found: Column = self.places[self.places != _NOTHING] & self.mask
        return found

    def tags(self, words: Column) -> Column:
        """Return the tag of each key, as it is in an entry, by its second quarter."""
        tags: Column = words << self._tag_shift
        tags &= _TAG_MASK
        return tags.view(np.int32)

    def homes(self, words: Column) -> Column:
        """Return where the search of each key begins, by its first quarter."""
        homes = (words * self._factor).astype(np.int64)
        homes *= self.size
        homes >>= WORD_BITS
        return homes

    def _filled(self, keys: Column, members: Column | None) -> array[int]:
        """Return the table, built without probing one by one: in the order of their homes, each entry goes behind the
        one before, or to its home if that is later. The table ends with an empty place, so no search wraps.
        """
        words = keys.view("<u4") if members is None else keys[members].view("<u4")
        ordered, entries = self.homes(words[:, 0]), self.tags(words[:, 1])
        numbers = np.arange(len(ordered))
        entries |= (numbers if members is None else members).astype(np.int32)
        ordered <<= _ENTRY_BITS
        ordered |= entries
        ordered.sort()
        alike = np.flatnonzero((ordered[1:] ^ ordered[:-1]) <= self.mask)
        pairs = keys[ordered[alike] & self.mask] == keys[ordered[alike + 1] & self.mask]
        self.may_repeat = bool(pairs.all(axis=1).any() or (np.diff(alike) == 1).any())
        np.bitwise_and(ordered, ENTRY_MASK, out=entries, casting="same_kind")
        ordered >>= _ENTRY_BITS
        ordered -= numbers
        np.maximum.accumulate(ordered, out=ordered)
        ordered += numbers
        length = max(self.size, int(ordered[-1]) + 1 if len(ordered) else 0) + 1
        table = _empty_places(length)
        np.frombuffer(table, np.int32)[ordered] = entries
        return table

    def _compiled(self, library: ct.CDLL, keys: Column, members: Column | None) -> array[int] | None:
        """Return the same table as `_filled`, made by compiled code; None if one has many entries behind its end."""
        keys, numbers = np.ascontiguousarray(keys), None if members is None else np.ascontiguousarray(members, np.int64)
        count, table = len(keys if numbers is None else numbers), _empty_places(self.size + _PLACES_BEHIND)
        repeats = ct.c_int32()
        used = library.kv_fill_table(
            address_of(keys), None if numbers is None else address_of(numbers), count, self.multiplier, self.size,
            self.bits, table.buffer_info()[0], len(table), ct.byref(repeats),
        )  # fmt: skip
        if used < 0:
            return None
        self.may_repeat = bool(repeats.value)
        del table[max(self.size, used) + 1 :]
        return table

    def _found(self, library: ct.CDLL, keys: Column, wanted: Column) -> Column:
        keys, wanted, found = np.ascontiguousarray(keys), np.ascontiguousarray(wanted), np.empty(len(wanted), np.int32)
        find = library.kv_find_few if len(wanted) <= _FEW else library.kv_find_keys
        find(
            address_of(self.places), self.size, self.bits, self.multiplier, address_of(keys), address_of(wanted),
            len(wanted), address_of(found),
        )  # fmt: skip
        return found


def _empty_places(count: int) -> array[int]:
    """Return an array of `count` places that have no entry."""
    table = array("i")
    for begin in range(0, count, _PLACES):
        table.frombytes(_NO_PLACES[: 4 * (count - begin)])
    return table
