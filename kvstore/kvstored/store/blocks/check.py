"""A check of the block index: it recounts everything from the rows and reports what disagrees.

It is used in the teardown of tests, and by the daemon when idle, there in slices. It changes nothing, takes time in
proportion to the number of rows, and needs some 25 bytes of memory for each row.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvstored.lifecycle import CopyState
from kvstored.store.blocks.columns import OptionalColumns
from kvstored.store.blocks.rows import TierCopies, as_array
from kvstored.store.blocks.view import ResidencyView
from kvstored.tier_set import TierSet

_STEP_ROWS = 64  # between two pauses: about 0.2 ms
_COPY_STEP_ROWS = 2**16  # copied between two pauses: about 0.1 ms


def check(residency: ResidencyView) -> list[str]:
    """Check the whole block index, and return the faults (broken invariants) in words. The list is empty when there is
    none."""
    walk = TreeCheck(residency, bulk_keys=True)
    for _ in walk.walk_in_steps():
        pass
    return walk.faults + walk.shared()


class TreeCheck:
    """A check of the block index that runs in steps. `walk_in_steps` may be paused after each step, as long as nothing
    changes the index before it continues. Afterwards call `shared`, in any thread. With `bulk_keys`, also check that
    the keys of bulk rows (blocks taken over at the start, whose keys are in no dictionary) are found."""

    def __init__(self, residency: ResidencyView, *, bulk_keys: bool = False) -> None:
        self.faults: list[str] = []
        self.rows = 0
        self._residency = residency
        self._places = [_Places(copies) for copies in residency.copies]
        self._bulk_keys = bulk_keys
        capacity = residency.rows.capacity
        self._live = bytearray(capacity)
        self._listed = bytearray(capacity)
        self._links = array("I", bytes(4 * capacity))

    def walk_in_steps(self) -> Iterator[None]:
        """Check the rows of the block index, and yield after each step. Faults are appended to `faults`, in words."""
        yield from self._mark_live()
        for rows in self._live_runs():
            for row in rows:
                self._check_row(row)
            yield
        yield from self._check_tenants()
        for tier in range(len(self._residency.tiers)):
            yield from self._check_tier(tier)
        for row, pins in self._residency.pins.items():
            if not self._live[row] or pins < 1:
                self._fault(f"row {row}: {pins} pins on a row that is {'live' if self._live[row] else 'free'}")
        self._check_optional("", self._residency.rows.optional, np.frombuffer(self._live, np.uint8))
        for copies in self._residency.copies:
            self._check_optional(f"{copies.name}: ", copies.optional, np.frombuffer(copies.state, np.uint8))
        for places in self._places:
            yield from places.copy()

    def shared(self) -> list[str]:
        """Return, in words, the slots of tiers that more than one row of the block index claims."""
        return [fault for places in self._places for fault in places.shared()]

    def _fault(self, what: str) -> None:
        self.faults.append(what)

    def _live_runs(self) -> Iterator[list[int]]:
        """Yield the live rows of each `_STEP_ROWS` rows, perhaps none: a pause after each bounds the work in
        between.
        """
        for first in range(0, len(self._live), _STEP_ROWS):
            yield [row for row, is_live in enumerate(self._live[first : first + _STEP_ROWS], first) if is_live]

    def _mark_live(self) -> Iterator[None]:
        residency, rows = self._residency, self._residency.rows
        for row in range(rows.capacity):
            if rows.keys[row] is not None or rows.key(row) is not None:
                self._live[row] = 1
                self.rows += 1  # counting them all in the end would take milliseconds
            if row % _STEP_ROWS == 0:
                yield
        if self.rows != rows.live:
            self._fault(f"{rows.live} rows counted, {self.rows} live")
        for run in self._live_runs():
            for row in run:
                parent = rows.parent[row]
                if parent < 0:
                    continue
                if not self._live[parent]:
                    self._fault(f"row {row}: parent {parent} is free")
                elif residency.tenant_of(parent) != residency.tenant_of(row):
                    self._fault(f"row {row}: parent {parent} belongs to another tenant")
                self._links[parent] += 1
            yield

    def _check_row(self, row: int) -> None:
        rows, tiers = self._residency.rows, self._residency.copies
        if self._links[row] != rows.links[row]:
            self._fault(f"row {row}: {rows.links[row]} children counted, {self._links[row]} found")
        states = [copies.state[row] for copies in tiers]
        if not any(states) and not self._links[row]:
            self._fault(f"row {row}: neither copy nor child")
        if max(states) >= len(CopyState):
            self._fault(f"row {row}: {max(states)} is no state of a copy")
        mask = TierSet.of(*(tier for tier, state in enumerate(states) if state == CopyState.RESIDENT))
        if mask != rows.mask[row]:
            self._fault(f"row {row}: tier mask {rows.mask[row]:b}, states say {mask:b}")
        filling = TierSet.of(*(tier for tier, state in enumerate(states) if state == CopyState.FILLING))
        if filling != rows.filling[row]:
            self._fault(f"row {row}: filling mask {rows.filling[row]:b}, states say {filling:b}")

    def _check_optional(self, where: str, columns: OptionalColumns, is_used: npt.NDArray[np.uint8]) -> None:
        """Rows without a block, or without a copy in a tier, keep nothing of the one before."""
        for name in columns.used:
            column = columns.view(name)
            assert column is not None
            left = np.flatnonzero((column[: len(is_used)] != columns.default(name)) & (is_used == 0))
            if len(left):
                self._fault(f"{where}row {left[0]}: {name} is {column[left[0]]} on a row that has no block there")

    def _check_tenants(self) -> Iterator[None]:
        residency, rows = self._residency, self._residency.rows
        bulk = [0] * len(residency.tenants)
        for number, index in enumerate(residency.tenants):
            for readable, part in ((True, index.readable), (False, index.unreadable)):
                for position, (key, row) in enumerate(part.items()):
                    self._check_listed(number, readable, key, row)
                    if position % _STEP_ROWS == 0:
                        yield
        for run in self._live_runs():
            for row in run:
                if not self._listed[row]:
                    self._check_unlisted(row, bulk)
            yield
        for index, found in zip(residency.tenants, bulk, strict=True):
            if found != index.bulk_blocks:
                self._fault(f"tenant {index.name}: {index.bulk_blocks} bulk blocks counted, {found} found")
        if len(rows.keys) != rows.capacity:
            self._fault(f"{len(rows.keys)} keys in a table of {rows.capacity} rows")

    def _check_listed(self, tenant: int, readable: bool, key: bytes, row: int) -> None:
        residency = self._residency
        name, kind = residency.tenants[tenant].name, "readable" if readable else "unreadable"
        if not self._live[row] or residency.rows.keys[row] != key or self._listed[row]:
            self._fault(f"tenant {name}: {kind} key {key.hex()} names row {row}, which is not its own")
        elif residency.tenant_of(row) != tenant or bool(residency.rows.mask[row]) != readable:
            self._fault(f"tenant {name}: row {row} is listed as {kind} and is not")
        self._listed[row] = 1

    def _check_unlisted(self, row: int, bulk: list[int]) -> None:
        """Check a row that no dictionary names: it is a bulk row, with its key packed; or it is lost."""
        residency, rows = self._residency, self._residency.rows
        tenant = residency.tenant_of(row)
        index = residency.tenants[tenant]
        if rows.keys[row] is not None or index.bulk is None:
            self._fault(f"row {row}: in no tenant's index")
            return
        bulk[tenant] += 1
        if self._bulk_keys and index.find(rows.bulk_key(row)) != row:
            self._fault(f"tenant {index.name}: bulk row {row} is not found by its key")

    def _check_tier(self, tier: int) -> Iterator[None]:
        residency = self._residency
        copies, parents, live = residency.copies[tier], residency.rows.parent, self._live
        tenants = len(residency.tenants)
        held = [0] * tenants
        kids = array("I", bytes(4 * len(live)))
        blocks = 0
        for row, state in enumerate(copies.state):
            if row % _STEP_ROWS == 0:
                yield
            if not state:
                continue
            if row >= len(live) or not live[row]:
                self._fault(f"{copies.name}: free row {row} has a copy")
                continue
            blocks += 1
            held[residency.tenant_of(row)] += copies.nbytes[row]
            if parents[row] >= 0:
                kids[parents[row]] += 1
        for run in self._live_runs():
            for row in run:
                if kids[row] != copies.kids[row]:
                    counted = f"{copies.kids[row]} children counted here, {kids[row]} found"
                    self._fault(f"{copies.name}: row {row}: {counted}")
            yield
        if held != copies.bytes_by_tenant:
            self._fault(f"{copies.name}: bytes by tenant: {copies.bytes_by_tenant} counted, {held} found")
        if blocks != copies.blocks:
            self._fault(f"{copies.name}: {copies.blocks} copies counted, {blocks} found")


class _Places:
    """A copy of the places of one tier's blocks, made in steps. Whether two rows share a slot is then one sort, in any
    thread.
    """

    def __init__(self, copies: TierCopies) -> None:
        self._copies = copies
        rows = len(copies.state)
        self._state = np.empty(rows, np.uint8)
        self._container = np.empty(rows, np.uint32)
        self._offset = np.empty(rows, np.uint64)

    def copy(self) -> Iterator[None]:
        """Copy the columns, with a pause after each step."""
        copies = self._copies
        for first in range(0, len(self._state), _COPY_STEP_ROWS):
            part = slice(first, first + _COPY_STEP_ROWS)
            self._state[part] = np.frombuffer(copies.state, np.uint8)[part]
            self._container[part] = as_array(copies.container)[part]
            self._offset[part] = as_array(copies.offset)[part]
            yield

    def shared(self) -> list[str]:
        """Return the slots that two rows share, in words."""
        rows = np.flatnonzero(self._state)
        container, offset = self._container[rows], self._offset[rows]
        order = np.lexsort((offset, container))
        same = (np.diff(container[order]) == 0) & (np.diff(offset[order]) == 0)
        found = []
        for position in np.flatnonzero(same).tolist():
            one, other = int(rows[order[position]]), int(rows[order[position + 1]])
            where = f"{self._container[one]}:{self._offset[one]}"
            found.append(f"{self._copies.name}: rows {one} and {other} share the slot {where}")
        return found
