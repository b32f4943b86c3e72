"""The chain tree: rows, each under its parent, and the placeholders that keep a chain together.

The module owns the begin and end of a row, and whether its key is in a dictionary or packed (see `keys`). See `index`
for the invariants, and one more: a bulk row is unchanged since it was taken over, with one readable copy, in the
slowest tier; its key moves to the dictionary before it changes.
"""

from __future__ import annotations

from kvstored.store.blocks.events import Listeners
from kvstored.store.blocks.rows import counted
from kvstored.store.blocks.view import ResidencyView
from kvstored.tier_set import ONLY


class CyclicChainError(ValueError):
    """An error: a block was to be stored as its own ancestor, so the caller's keys are forged or mixed up."""


class ChainTree:
    """The part of the block index that keeps the tree of chains: each block's parent and children, and placeholders for
    missing parents.
    """

    def __init__(self, view: ResidencyView, listeners: Listeners) -> None:
        self._view = view
        self._listeners = listeners
        self._below: dict[int, int] = {}  # by a stored block's row, a placeholder that was its child; it may be stale

    def take(self, key: bytes, kind: int, depth: int, payload_bytes: int) -> int:
        """Return a new row of the block table for the block `key`, without parent, children or copies. `kind` is the
        number of its row kind (tenant, fingerprint and layer group), and `depth` its place in the chain, from 0."""
        row = self._view.rows.take(key, kind, depth, payload_bytes)
        if row >= len(self._view.copies[0].state):
            for copies in self._view.copies:
                copies.grow(self._view.rows.capacity)
        return row

    def check_revivable(self, row: int, parent: int) -> None:
        """Check that the placeholder `row` (a row of a block that is not stored, kept for its children) can become a
        stored block whose parent is the row `parent`. Raises RuntimeError if it has a copy, CyclicChainError if
        `parent` descends from it."""
        if self._view.rows.mask[row] or self._view.rows.filling[row]:
            raise RuntimeError(f"row {row} inserted while it has a copy")
        ancestor = parent
        while ancestor >= 0:  # only here: a row without children cannot close a cycle
            if ancestor == row:
                raise CyclicChainError(f"block {self._view.key(row).hex()} would be its own ancestor")
            ancestor = self._view.rows.parent[ancestor]

    def unlink(self, row: int) -> int:
        """Separate the block at `row` from its parent, and return the parent's row, or -1 if it had none."""
        rows = self._view.rows
        parent = rows.parent[row]
        if parent >= 0:
            rows.parent[row] = -1
            rows.links[parent] -= 1
            if not rows.links[parent]:
                self._listeners.release(parent, rows.mask[parent])
        return parent

    def forget_empty(self, row: int) -> None:
        """Free `row`, which has no copy, unless it has children; then free its ancestors that are placeholders without
        children. If several placeholders follow one another, and their children need no parents, one is kept."""
        rows = self._view.rows
        self._view.changes += 1
        if rows.links[row] and self._is_spare(row):
            self._shorten(row)
            return
        while row >= 0 and not (rows.links[row] or rows.mask[row] or rows.filling[row]):
            key = rows.keys[row]
            if key is None:
                raise RuntimeError(f"row {row} ended twice")
            del self._view.tenants[self._view.kind_tenant[rows.kind[row]]].unreadable[key]
            parent = self.unlink(row)
            self._below.pop(row, None)
            rows.give_back(row)
            row = parent

    def _is_spare(self, row: int) -> bool:
        """Return whether `row` is the placeholder of a block whose children are of use without it."""
        rows = self._view.rows
        return not rows.mask[row] and not rows.filling[row] and self._view.stands_alone(row)

    def _shorten(self, row: int) -> None:
        """End `row`, which has become a placeholder, or its parent, where one of them stands between placeholders."""
        rows, child = self._view.rows, self._below.pop(row, -1)
        if child >= 0 and rows.parent[child] == row and self._is_spare(child) and rows.links[row] == 1:
            self._leave_out(row, child)
            row = child
        parent = rows.parent[row]
        if parent >= 0 and rows.links[parent] == 1 and self._is_spare(parent):
            self._leave_out(parent, row)
            parent = rows.parent[row]
        if parent >= 0:
            self._below[parent] = row

    def _leave_out(self, row: int, child: int) -> None:
        """End the placeholder `row`: its only child `child` takes its place under its parent."""
        rows, key = self._view.rows, self._view.key(row)
        rows.parent[child], rows.parent[row] = rows.parent[row], -1
        rows.links[row] = 0
        del self._view.tenants[self._view.kind_tenant[rows.kind[row]]].unreadable[key]
        rows.give_back(row)

    def parent_or_placeholder(self, tenant: int, key: bytes, kind: int, depth: int, payload_bytes: int) -> int:
        """Return the row of the block `key`, whose child is at `depth` in its chain. If the block is not stored, return
        a new placeholder for it, with this `kind` (row kind number) and `payload_bytes`."""
        index = self._view.tenants[tenant]
        row = index.row(key)
        if row < 0:
            row = index.unreadable[key] = self.take(key, kind, max(0, depth - 1), payload_bytes)
        return row

    def continue_after(self, row: int, above: int) -> None:
        """Let the placeholder `row` continue the chain of row `above`, between which are blocks without a row. Nothing
        changes if `row` has a copy or a parent, or is itself above.
        """
        rows, ancestor = self._view.rows, above
        if rows.mask[row] or rows.filling[row] or rows.parent[row] >= 0:
            return
        while ancestor >= 0:
            if ancestor == row:
                return
            ancestor = rows.parent[ancestor]
        self._view.changes += 1
        rows.parent[row] = above
        rows.links = counted(rows.links, above)

    def to_dictionary(self, row: int) -> None:
        """Enter the key of `row`, which is about to change, into the dictionary of its tenant, if it was taken over at
        the start and is in no dictionary yet. It does nothing for a free row."""
        rows = self._view.rows
        key = rows.key(row)
        if key is not None:
            index = self._view.tenants[self._view.kind_tenant[rows.kind[row]]]
            rows.keys[row] = key
            index.readable[key] = row
            index.bulk_blocks -= 1

    def to_bulk(self, row: int) -> None:
        """Remove the key of `row` from the dictionary of its tenant, to save memory, if the row is as it was when it
        was taken over at the start. Otherwise do nothing."""
        rows, slowest = self._view.rows, len(self._view.copies) - 1
        index = self._view.tenants[self._view.kind_tenant[rows.kind[row]]]
        key = rows.keys[row]
        if index.bulk is None or rows.mask[row] != ONLY[slowest] or rows.filling[row]:
            return
        if key is not None and index.bulk.has_place(key, row):
            del index.readable[key]
            rows.keys[row] = None
            index.bulk_blocks += 1
