"""The residency index: which blocks exist, in which tiers, their parents, and which may be evicted.

Owns every fact about where a block is; the tiers own the bytes. `view` holds the facts and answers questions;
`arrival`, `removal`, `tree` and `UseCounts` change them, and notify each tier's listener (the policy). Never does I/O,
reads a clock or decides what is worth keeping. Single-threaded: the control thread's alone.

Invariants (verified by `check`)
- A tenant's key has at most one row. A row is *readable* (a RESIDENT copy), *filling* (only
  FILLING copies), or a *placeholder*: no copy at all, kept because it has children (the parent has not
  been stored yet, or was taken by force: its expiry, quarantine, drop, invalidation). Storing that key again revives
  the row, and the chain is whole.
- Leaf-first: by choice (evict, quota) the last copy of a block is removed only when no child row refers to
  it, so that a stored prefix never gets a hole. A copy may be evicted a tier at any time while another tier has a
  readable one. Blocks of a windowed or recurrent layer group may go alone: those behind them do not need them.
- A pinned block keeps all its copies, except by force; the holder of a pin keeps a token and calls `current` before
  unpinning.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import compress, repeat
from operator import and_, not_, or_

from kvstored.lifecycle import Cause
from kvstored.store.blocks.arrival import Arrival
from kvstored.store.blocks.events import Listeners
from kvstored.store.blocks.removal import Removal
from kvstored.store.blocks.runs import RowRun, count_each, fill, span_of
from kvstored.store.blocks.tree import ChainTree
from kvstored.store.blocks.view import ResidencyView
from kvstored.tier_set import ALL_TIERS, MEMBERS, NO_TIERS, TierSet

DEFAULT_GHOST_KEYS = 65_536
_ACCESSES_MAX = 0xFFFF


class UseCounts:
    """The part of the block index that counts uses of blocks and pins. A pin keeps all copies of a block; leases and
    transfers pin the blocks that they need.
    """

    def __init__(self, view: ResidencyView, listeners: Listeners) -> None:
        self._view = view
        self._listeners = listeners

    def touch_run(self, rows: Sequence[int], now_ns: int, device_tiers: int = NO_TIERS) -> None:
        """Count one access of each of the blocks `rows`, which one request used or stored. They are in chain order.
        `device_tiers` are the tiers on the client's device."""
        mask = self._view.rows.mask
        everywhere, somewhere = self._count(rows, now_ns)
        for tier in MEMBERS[somewhere]:
            is_whole = tier in MEMBERS[everywhere]
            here = rows if is_whole else [row for row in rows if tier in MEMBERS[mask[row]]]
            self._listeners.by_tier[tier].accessed(here, now_ns)
        if self._listeners.uses is not None:
            self._listeners.uses(rows, device_tiers)

    def request_run(
        self, tenant: int, rows: Sequence[int], missing: Sequence[bytes], now_ns: int, device_tiers: int = NO_TIERS
    ) -> None:
        """Count an access of the blocks `rows`, as `touch_run` does, by a request that also wanted the blocks `missing`
        after them, which are not stored.
        """
        if not missing:
            self.touch_run(rows, now_ns, device_tiers)
            return
        mask = self._view.rows.mask
        self._count(rows, now_ns)
        for tier, listener in enumerate(self._listeners.by_tier):
            here = [row for row in rows if tier in MEMBERS[mask[row]]]
            if tier in self._listeners.by_key:
                self._listeners.by_key[tier].requested(here, missing, tenant, now_ns)
            elif here:
                listener.accessed(here, now_ns)
        if self._listeners.uses is not None:
            self._listeners.uses(rows, device_tiers)

    def _count(self, rows: Sequence[int], now_ns: int) -> tuple[int, int]:
        """Count an access of each of `rows`; return the tiers that have all of them, and the tiers that have some."""
        columns = self._view.rows
        if not rows:
            return ALL_TIERS, NO_TIERS
        accesses, mask, span = columns.accesses, columns.mask, span_of(rows)
        fill(columns.last_access_ns, rows, now_ns, span)
        if (
            span is not None
            and (counts := accesses[span]).count(counts[0]) == len(counts)
            and counts[0] < _ACCESSES_MAX
        ):
            fill(accesses, rows, counts[0] + 1, span)
        else:
            for row in rows:
                if accesses[row] != _ACCESSES_MAX:
                    accesses[row] += 1
        found = {mask[row] for row in rows} if span is None else set(mask[span])
        return reduce(and_, found), reduce(or_, found)

    def record_refusal(self, tenant: int, key: bytes, cause: Cause, now_ns: int) -> None:
        """Note `cause`, the reason why a put of the block `key` of `tenant` was refused. After the cause DECLINED the
        block counts as if it had been stored, used and evicted at once."""
        ghost = self._view.tenants[tenant].ghost
        ghost.remember(key, cause, now_ns, ghost.accesses(key) + (cause is Cause.DECLINED))

    def pin(self, row: int) -> None:
        """Add a pin to the block at `row`: none of its copies is evicted while it has a pin."""
        count_each(self._view.counted_pins, (row,))

    def pin_run(self, rows: Sequence[int] | RowRun) -> None:
        """Add a pin to each of the blocks `rows`. The pins of a run are counted when somebody asks for pins: as a rule
        `unpin_run` comes before."""
        if isinstance(rows, RowRun):
            self._view.late_pins.add(rows)
        else:
            count_each(self._view.counted_pins, rows)

    def unpin(self, row: int) -> None:
        """Remove one pin of the block at `row`. Raises RuntimeError if it has none."""
        self._unpin((row,))

    def set_owners(self, row: int, owners: int) -> None:
        """Set which owners (users within the tenant) have pinned the block at `row`; bit i of `owners` stands for owner
        i. All owners together hold one pin, and 0 removes it."""
        view, before = self._view, self._view.pinned_by(row)
        view.rows.optional.set("pinned_by", row, owners)
        view.owners_changed(row, before, owners)
        if bool(before) != bool(owners):
            view.pinned_bytes[view.tenant_of(row)] += view.slot_bytes(row) * (1 if owners else -1)
            (self.pin if owners else self.unpin)(row)

    def release(self, row: int) -> None:
        """Notify the policies that the readable block at `row` may perhaps be evicted now."""
        self._listeners.release(row, self._view.rows.mask[row])

    def unpin_run(self, named: Sequence[int] | RowRun) -> None:
        """Remove one pin of each block that `named` names (by tokens, or a run of rows), if the block still exists. A
        block that was removed by force has lost its pins already."""
        late = self._view.late_pins
        if isinstance(named, RowRun) and named in late:  # nobody has seen its pins: there is nobody to notify
            late.remove(named)
            return
        self._unpin(self._view.rows.still_there(named))

    def _unpin(self, rows: Sequence[int]) -> None:
        view, by_tier, pins = self._view, self._listeners.by_tier, self._view.counted_pins
        counts, free = list(map(pins.pop, rows, repeat(0))), rows
        if counts.count(1) < len(rows):  # some are pinned by others too
            pins.update((row, count) for row, count in zip(rows, counts, strict=True) if count)
            free = []
            for row in rows:
                left = pins.pop(row, 0)
                if not left:
                    raise RuntimeError(f"row {row} unpinned more often than pinned")
                if left > 1:
                    pins[row] = left - 1
                else:
                    free.append(row)
        if not free:
            return
        mask, window, run = view.rows.mask, view.kind_window, RowRun([*free])
        stand_alone = any(window[kind] for kind in set(run.of(view.rows.kind)))
        for tier in MEMBERS[reduce(or_, set(run.of(mask)))]:
            kids, released = run.of(view.copies[tier].kids), by_tier[tier].released
            for row in free if stand_alone else compress(free, map(not_, kids)):  # a child keeps the others
                if tier in MEMBERS[mask[row]] and view.is_evictable(row, tier):
                    released(row)


class Residency(ResidencyView):
    """The block index: which blocks exist, in which of `tiers` (fastest first), and which may be evicted. ResidencyView
    answers questions; the parts joined here make changes. `ghost_keys` removed keys are remembered for each tenant."""

    def __init__(
        self,
        tiers: Sequence[str],
        *,
        ghost_keys: int = DEFAULT_GHOST_KEYS,
        durable: int | None = None,
        in_memory: int | None = None,
        mapped: int = 0,
        exported: TierSet = NO_TIERS,
    ) -> None:
        super().__init__(tiers, durable, in_memory, mapped, exported)
        listeners = Listeners(self)
        self.listen, self.listen_beside, self.observe = listeners.listen, listeners.listen_beside, listeners.observe
        self.note_with, self.forget_with = listeners.note_with, listeners.forget_with
        self.use_with = listeners.use_with
        tree = ChainTree(self, listeners)
        self.forget_empty = tree.forget_empty
        self.parent_or_placeholder, self.continue_after = tree.parent_or_placeholder, tree.continue_after
        arrival = Arrival(self, tree, listeners, ghost_keys)
        self.tenant = arrival.tenant
        self.kind_number = arrival.kind_number
        self.insert, self.store_run = arrival.insert, arrival.store_run
        self.attach, self.attach_run = arrival.attach, arrival.attach_run
        self.publish, self.publish_run = arrival.publish, arrival.publish_run
        self.move, self.note_stored = arrival.move, arrival.note_stored
        self.notify_adopted = arrival.notify_adopted
        removal = Removal(self, tree, listeners)
        self.remove = removal.remove
        self.remove_chosen = removal.remove_chosen
        self.remove_run = removal.remove_run
        self.detach, self.detach_run = removal.detach, removal.detach_run
        self.forget = removal.forget
        uses = UseCounts(self, listeners)
        self.touch_run = uses.touch_run
        self.request_run = uses.request_run
        self.record_refusal = uses.record_refusal
        self.pin = uses.pin
        self.pin_run = uses.pin_run
        self.unpin = uses.unpin
        self.unpin_run = uses.unpin_run
        self.set_owners = uses.set_owners
        self.release = uses.release
