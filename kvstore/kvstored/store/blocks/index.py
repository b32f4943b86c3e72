"""The residency index: which blocks exist, in which tiers, their parents, and what may be evicted.

Owns every fact about where a block is; the tiers own the bytes. `view` holds the facts and answers questions;
`arrival`, `removal`, `access`, `pins` and `tree` change them, and notify each tier's listener (the policy). Never does
I/O, reads a clock or decides what is worth keeping. Single-threaded: the control thread's alone.

Invariants (verified by `check`)
- A tenant's key has at most one row. A row is *readable* (a RESIDENT copy), *filling* (only
  FILLING copies), or a *placeholder*: no copy at all, kept because it has children (the parent has not
  been stored yet, or was taken by force: quarantine, drop, invalidation). Storing that key again revives the
  row, and the chain is whole.
- Leaf-first: by choice (evict, expire, quota) the last copy of a block is removed only when no child row refers to
  it, so that a stored prefix never gets a hole. A copy may be evicted a tier at any time while another tier has a
  readable one.
- A pinned block keeps all its copies, except by force; the holder of a pin keeps a token and calls `current` before
  unpinning.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstored.store.blocks.access import AccessLog
from kvstored.store.blocks.arrival import Arrival
from kvstored.store.blocks.events import Listeners
from kvstored.store.blocks.pins import Pins
from kvstored.store.blocks.removal import Removal
from kvstored.store.blocks.tree import ChainTree
from kvstored.store.blocks.view import ResidencyView

DEFAULT_GHOST_KEYS = 65_536


class Residency(ResidencyView):
    """The index over `tiers`, fastest first: the questions of its view, and what its parts do. See the module for the
    invariants. `ghost_keys`: how many keys that have left are remembered, for each tenant.
    """

    def __init__(
        self,
        tiers: Sequence[str],
        *,
        ghost_keys: int = DEFAULT_GHOST_KEYS,
        durable: int | None = None,
        in_memory: int | None = None,
        mapped: int = 0,
        exported: int = 0,
    ) -> None:
        super().__init__(tiers, durable, in_memory, mapped, exported)
        listeners = Listeners(self)
        self.listen = listeners.listen
        self.observe = listeners.observe
        self.note_with = listeners.note_with
        self.forget_with = listeners.forget_with
        self.use_with = listeners.use_with
        tree = ChainTree(self, listeners)
        self.forget_empty = tree.forget_empty
        self.parent_or_placeholder = tree.parent_or_placeholder
        arrival = Arrival(self, tree, listeners, ghost_keys)
        self.tenant = arrival.tenant
        self.kind_number = arrival.kind_number
        self.insert = arrival.insert
        self.store_run = arrival.store_run
        self.attach = arrival.attach
        self.publish = arrival.publish
        self.move = arrival.move
        self.notify_adopted = arrival.notify_adopted
        removal = Removal(self, tree, listeners)
        self.remove = removal.remove
        self.remove_chosen = removal.remove_chosen
        self.remove_run = removal.remove_run
        self.detach = removal.detach
        self.forget = removal.forget
        access = AccessLog(self, listeners)
        self.touch_run = access.touch_run
        self.request_run = access.request_run
        self.record_refusal = access.record_refusal
        pins = Pins(self, listeners)
        self.pin = pins.pin
        self.pin_run = pins.pin_run
        self.unpin = pins.unpin
        self.unpin_run = pins.unpin_run
