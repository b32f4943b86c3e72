"""Later terms are terms that a block's header does not have: all pins, and what a touch or another put changed.

The module notes the blocks whose later terms have changed since they were saved, and gives them the form in which the
small state has them (`state/terms.py`). A saved entry has all terms of one block, and replaces its header's. The module
sets no terms and does no I/O.

Invariants: a block is unsaved from the change of its terms until a commit that began later; a removed block whose terms
were saved is unsaved until its entry is removed, so no block that is stored anew under its key is called durable before
that.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

import numpy as np

from kvstore_proto.identity import KEY_BYTES
from kvstored.clock import NS_PER_S, Clock
from kvstored.store.blocks import Residency
from kvstored.store.pins import Pins

MOST_CHANGED = 1 << 18  # blocks that are noted one by one: 50 MB
STEP_ENTRIES = 512  # packed in one step: some 2 ms
_TERMS = struct.Struct("<IbB")  # expiry in seconds since the epoch, 0: never; priority; `scope`
PINS, ALL = 1, 2  # in the column `later_terms`, a scope: only the pins, or the expiry and the priority too
_EXPIRY_MAX = (1 << 32) - 1
_ENDS = b""  # in place of a block's key: when the pins of the tenant's owners end
Entry = tuple[bytes, bytes]


class SavedTerms(NamedTuple):
    """The terms of one block in a saved entry. `expires_s` is in seconds since the epoch, 0: never; `owners` are the
    names of owners that pinned it. `scope` is `PINS` when the header has expiry and priority, otherwise `ALL`.
    """

    expires_s: int
    priority: int
    owners: list[str]
    scope: int


class LaterTerms:
    """A record of the blocks whose terms (expiry, priority, pins) are not in their header and must be saved elsewhere.

    It works once `follow` was called. `pins` knows who pinned a block, and until when. `changed` has tenant number and
    key of each block with unsaved changes. `is_whole` is true if the terms of all such blocks must be
    saved anew, and `is_pending` while entries of an earlier process may not be read yet. The event `wanted` is set when
    a caller waits for a save."""

    def __init__(self, residency: Residency, clock: Clock, pins: Pins) -> None:
        self._residency, self._clock, self._pins = residency, clock, pins
        self.is_followed = self.is_whole = self.is_pending = self._has_ended = False
        self.changed: set[tuple[int, bytes]] = set()
        self._saving: set[tuple[int, bytes]] = set()  # by the save that has begun
        self._is_saving_whole = False
        self._is_incomplete = False  # `changed`: it was emptied since the last save of all entries
        self.wanted = asyncio.Event()
        self._waiting: asyncio.Future[bool] | None = None

    def follow(self) -> None:
        """Note changes of blocks' terms from now on."""
        self.is_followed = True
        self._residency.terms_gone = self.note_entry

    def note(self, row: int, scope: int) -> None:
        """Note that terms of the block at `row` have changed: only its pins (`scope` is `PINS`), or also others
        (`ALL`).
        """
        optional = self._residency.rows.optional
        optional.set("later_terms", row, max(scope, optional.get("later_terms", row)))
        self.note_entry(row)

    def note_entry(self, row: int) -> None:
        """Note that the saved entry of the block at `row` is outdated, if there is one."""
        self._note_key(self._residency.tenant_of(row), self._residency.key(row))

    def note_ends(self, tenant: int) -> None:
        """Note that the times at which the pins of the tenant's owners end have changed."""
        if self.is_followed:
            self._note_key(tenant, _ENDS)

    def _note_key(self, tenant: int, key: bytes) -> None:
        self.changed.add((tenant, key))
        if len(self.changed) > MOST_CHANGED:
            self.is_whole = self._is_incomplete = True
            self.changed.clear()

    # For those who wait

    def is_unsaved(self, row: int) -> bool:
        """Return whether the present terms of the block at `row` are not saved yet."""
        is_whole = self.is_whole or self._is_saving_whole
        if self._is_incomplete or (is_whole and self._residency.rows.optional.get("later_terms", row)):
            return True
        if not self.changed and not self._saving:
            return False
        block = self._residency.tenant_of(row), self._residency.key(row)
        return block in self.changed or block in self._saving

    @property
    def are_saved(self) -> bool:
        """True when the saved state has the terms of all blocks whose headers do not have them."""
        return not (self.changed or self._saving or self.is_whole or self._is_saving_whole)

    def when_saved(self) -> asyncio.Future[bool]:
        """Return a future that resolves to True when all present changes of terms are saved durably, False when that
        has failed."""
        if self._waiting is None:
            self._waiting = asyncio.get_running_loop().create_future()
            self.wanted.set()
            if self._has_ended:
                self._waiting.set_result(False)
        return self._waiting

    def end(self) -> None:
        """Note that no terms are saved any more. Every future of `when_saved`, present or later, resolves to False."""
        self._has_ended = True
        if self._waiting is not None:
            self._waiting.set_result(False)

    def take_waiting(self) -> asyncio.Future[bool] | None:
        """Return the future that callers of `when_saved` wait for, which the caller must resolve, or None when there is
        none.
        """
        waiting, self._waiting = self._waiting, None
        self.wanted.clear()
        return waiting

    # What is saved

    def begin_save(self) -> tuple[bool, Iterator[tuple[list[Entry], list[bytes]]]]:
        """Begin to save the changes of terms until now; call `saved` or `not_saved` next. Return two values: whether
        all entries are saved anew, and an iterator of steps, each with entries to store and keys of entries to
        remove."""
        is_whole, self.is_whole = self.is_whole, False
        self._saving, self.changed, self._is_saving_whole = self.changed, set(), is_whole
        return is_whole, self._entries(chain(self._saving, self._all_blocks() if is_whole else ()))

    def saved(self) -> None:
        """Note that the changes of terms before the last `begin_save` are committed."""
        if self._is_saving_whole and not self.is_whole:
            self._is_incomplete = False
        self._saving, self._is_saving_whole = set(), False

    def not_saved(self) -> None:
        """Note that the changes of terms before the last `begin_save` could not be committed; they are saved with the
        next save."""
        self._saving |= self.changed
        self.is_whole |= self._is_saving_whole
        self._saving, self.changed, self._is_saving_whole = set(), self._saving, False

    def _entries(self, blocks: Iterator[tuple[int, bytes]]) -> Iterator[tuple[list[Entry], list[bytes]]]:
        while some := list(islice(blocks, STEP_ENTRIES)):
            stored, gone = [], []
            for tenant, key in some:
                if key == _ENDS:
                    ends = self._ends(tenant)
                    stored += [(self._key(tenant, key), ends)] if ends else []
                    gone += [] if ends else [self._key(tenant, key)]
                    continue
                row, name = self._residency.find_any(tenant, key), self._key(tenant, key)
                if row >= 0 and self._has_terms(row):
                    stored.append((name, self._value(row)))
                else:
                    gone.append(name)
            yield stored, gone

    def _has_terms(self, row: int) -> bool:
        """Return whether the block has later terms now; forget that it had some when it has none left."""
        scope = self._residency.rows.optional.get("later_terms", row)
        if scope == PINS and not self._residency.pinned_by(row):
            self._residency.rows.optional.set("later_terms", row, 0)
            return False
        return scope > 0

    def _all_blocks(self) -> Iterator[tuple[int, bytes]]:
        """Yield every block that has later terms, as in `changed`; the index may change meanwhile."""
        yield from dict.fromkeys((tenant, _ENDS) for tenant, _ in self._pins.ends)
        residency, column = self._residency, self._residency.rows.optional.view("later_terms")
        rows = np.empty(0, np.int64) if column is None else np.flatnonzero(column)
        del column  # no view of a column is kept over a pause
        for first in range(0, len(rows), STEP_ENTRIES):
            for row in rows[first : first + STEP_ENTRIES].tolist():
                if residency.rows.optional.get("later_terms", row):
                    yield residency.tenant_of(row), residency.key(row)

    @property
    def is_any(self) -> bool:
        """True when the terms (expiry, priority, pins) of any block are not all in the block's header."""
        column = self._residency.rows.optional.view("later_terms")
        return column is not None and bool(column.any())

    @property
    def sees_all(self) -> bool:
        """True when the index has every block that may have a saved entry, which needs a durable tier."""
        return self._residency.durable >= 0

    def _key(self, tenant: int, key: bytes) -> bytes:
        return self._residency.tenants[tenant].name.encode() + key

    def _value(self, row: int) -> bytes:
        residency, scope = self._residency, self._residency.rows.optional.get("later_terms", row)
        expires_s = _moved(residency.expires_s(row), self._ahead_ns())
        return _TERMS.pack(expires_s, residency.priority(row), scope) + "\n".join(self._pins.names(row)).encode()

    def _ends(self, tenant: int) -> bytes:
        """Return the times at which the pins of owners of `tenant` end, in the form in which they are saved."""
        ends = [(owner, ends_s) for (number, owner), ends_s in self._pins.ends.items() if number == tenant]
        return "\n".join(f"{_moved(ends_s, self._ahead_ns())} {owner}" for owner, ends_s in ends).encode()

    # What was saved

    def found(self, entries: Sequence[Entry]) -> Iterator[tuple[int, SavedTerms]]:
        """Yield the row and the saved terms of each block in the saved `entries`, with the expiry in seconds of the
        monotonic clock. An entry is left out if its block is not stored or its terms have changed since. The next save
        removes such entries, unless the durable tier, which would know the block, is missing."""
        residency, ahead_ns = self._residency, self._ahead_ns()
        numbers = {index.name.encode(): number for number, index in enumerate(residency.tenants)}
        for name, value in entries:
            if name in numbers:  # an entry of `found_ends`
                continue
            tenant, key = numbers.get(name[:-KEY_BYTES], -1), name[-KEY_BYTES:]
            if (tenant, key) in self.changed:
                continue
            row = residency.find(tenant, key) if tenant >= 0 else -1
            if row >= 0 and (terms := terms_in(value)) is not None:
                residency.rows.optional.set("later_terms", row, terms.scope)
                yield row, terms._replace(expires_s=_moved(terms.expires_s, -ahead_ns))
            elif self.sees_all and tenant >= 0:
                self._note_key(tenant, key)
            elif self.sees_all:
                self.is_whole = True

    def found_ends(self, entries: Sequence[Entry]) -> Iterator[tuple[int, dict[str, int]]]:
        """Yield the number of each tenant in the saved `entries` whose owners' pins end at a time, and for each such
        owner the second of the monotonic clock."""
        numbers = {index.name.encode(): number for number, index in enumerate(self._residency.tenants)}
        for name, value in entries:
            tenant = numbers.get(name, -1)
            if tenant >= 0 and (tenant, _ENDS) not in self.changed:
                words = [line.partition(" ") for line in value.decode(errors="replace").split("\n")]
                ends = {owner: int(ends_s) for ends_s, _, owner in words if ends_s.isdecimal()}
                yield tenant, {owner: _moved(ends_s, -self._ahead_ns()) for owner, ends_s in ends.items()}

    def _ahead_ns(self) -> int:
        """Return the wall clock minus the monotonic clock, in nanoseconds."""
        return self._clock.wall_ns() - self._clock.monotonic_ns()


def _moved(time_s: int, ahead_ns: int) -> int:
    """Return the time `time_s`, in whole seconds, by a clock that is ahead by `ahead_ns`; 0 for 0, which is never. It
    is rounded down, so that no block lives longer, and what has expired stays expired."""
    return min(max((time_s * NS_PER_S + ahead_ns) // NS_PER_S, 1), _EXPIRY_MAX) if time_s else 0


def terms_in(value: bytes) -> SavedTerms | None:
    """Return the terms in a saved `value`, or None for bytes of another form."""
    try:
        expires_s, priority, scope = _TERMS.unpack_from(value)
        owners = value[_TERMS.size :].decode()
    except (struct.error, UnicodeDecodeError):
        return None
    return SavedTerms(expires_s, priority, owners.split("\n") if owners else [], scope)
