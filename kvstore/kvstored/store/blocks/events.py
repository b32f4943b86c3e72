"""The events of residency: changes of a tier's copies, for its policy; and changes of where blocks can be read.

Residency calls; a listener only updates its own state and never calls a method that changes residency.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from kvstored.store.blocks.view import ResidencyView
from kvstored.tier_set import MEMBERS


class TierListener(Protocol):
    def inserted(self, rows: Sequence[int], now_ns: int) -> None:
        """Note that `rows`, a piece of one chain, head first, have become resident in this tier (stored, promoted,
        demoted into, or recovered).
        """

    def accessed(self, rows: Sequence[int], now_ns: int) -> None:
        """Note that `rows`, in chain order (head first), all resident here, were used together."""

    def removed(self, rows: Sequence[int]) -> None:
        """Note that `rows`, a piece of one chain, its end first, were removed from this tier; row numbers may be used
        again for other blocks.
        """

    def released(self, row: int) -> None:
        """Note that `row` may be free to leave this tier now: a lease, a child, or being the last copy had kept it."""


@runtime_checkable
class KeyListener(Protocol):
    """A listener that knows blocks by their keys, too, and whether or not they are stored."""

    def requested(self, rows: Sequence[int], missing: Sequence[bytes], tenant: int, now_ns: int) -> None:
        """Note a use of `rows`, which may be none, by a request that asked for the blocks `missing` after them, which
        no tier has.
        """

    def forget(self, tenant: int, keys: Sequence[bytes] | None) -> None:
        """Keep nothing that names blocks `keys` of `tenant`, which were removed from every tier by order; or any (None)
        that are not in this one.
        """


class NullListener:
    """The listener of a tier without a policy."""

    def inserted(self, *event: Any, **named: Any) -> None:
        """Do nothing, as for every event."""

    accessed = removed = released = inserted


class _Beside:
    """The listener of a tier together with a second one, which gets uses without keys."""

    def __init__(self, first: TierListener, second: TierListener) -> None:
        self._first, self._second = first, second

    def inserted(self, rows: Sequence[int], now_ns: int) -> None:
        self._first.inserted(rows, now_ns)
        self._second.inserted(rows, now_ns)

    def accessed(self, rows: Sequence[int], now_ns: int) -> None:
        self._first.accessed(rows, now_ns)
        self._second.accessed(rows, now_ns)

    def removed(self, rows: Sequence[int]) -> None:
        self._first.removed(rows)
        self._second.removed(rows)

    def released(self, row: int) -> None:
        self._first.released(row)
        self._second.released(row)


class _BesideByKey(_Beside):
    """`_Beside` for a first listener that knows blocks by their keys."""

    def __init__(self, first: KeyListener, second: TierListener) -> None:
        super().__init__(first, second)  # type: ignore[arg-type]  # it is a TierListener too
        self._by_key = first

    def requested(self, rows: Sequence[int], missing: Sequence[bytes], tenant: int, now_ns: int) -> None:
        self._by_key.requested(rows, missing, tenant, now_ns)
        if rows:
            self._second.accessed(rows, now_ns)

    def forget(self, tenant: int, keys: Sequence[bytes] | None) -> None:
        self._by_key.forget(tenant, keys)


class PresenceListener(Protocol):
    """An observer of every change of where a block can be read, in any tier."""

    def changed(self, tenant: int, key: bytes, mask: int, row: int) -> None:
        """Note that there are readable copies in the tiers of `mask`, a TierSet as an int, now. `row` is still the
        block's.
        """


class Listeners:
    """The listeners of the index. `by_tier`: the listener of each tier. `presence`: the observers; `noted`: called with
    the row alone of each change, if it is set; `is_followed`: there is one of them. `forgets`: another record of
    blocks' names, if there is one; `uses`: another follower of their uses.
    """

    def __init__(self, view: ResidencyView) -> None:
        self._view = view
        self._first: dict[int, TierListener] = {}  # by tier, as `listen` got it
        self._beside: dict[int, TierListener] = {}
        self.by_tier: list[TierListener] = [NullListener() for _ in view.tiers]
        self.presence: list[PresenceListener] = []
        self.by_key: dict[int, KeyListener] = {}  # by tier: those of `by_tier` that know keys
        self.noted: Callable[[int], object] | None = None
        self.is_followed = False
        self.forgets: Callable[[int, Sequence[bytes] | None], None] | None = None
        self.uses: Callable[[Sequence[int], int], None] | None = None

    def listen(self, tier: int, listener: TierListener) -> None:
        """Notify `listener` of the events in `tier` from now on; one listener a tier."""
        self._first[tier] = listener
        second = self._beside.get(tier)
        if second is not None:
            listener = (_BesideByKey if isinstance(listener, KeyListener) else _Beside)(listener, second)  # type: ignore[arg-type]
        self.by_tier[tier] = listener
        self.by_key.pop(tier, None)
        if isinstance(listener, KeyListener):
            self.by_key[tier] = listener

    def listen_beside(self, tier: int, second: TierListener | None) -> None:
        """Notify `second`, too, of the events in `tier` from now on, whatever listener the tier gets; None ends it."""
        self._beside.pop(tier, None)
        if second is not None:
            self._beside[tier] = second
        self.listen(tier, self._first.get(tier, NullListener()))

    def observe(self, listener: PresenceListener) -> None:
        """Notify `listener`, too, where blocks can be read, from now on."""
        self.presence.append(listener)
        self.is_followed = True

    def note_with(self, note: Callable[[int], object] | None) -> None:
        """Call `note` with the row of every change of where a block can be read, from now on, instead of the former
        function (None: nothing). It is called for each block of every put, so it should append the row and do its
        work later, from residency's state at that time: the row may be another block's by then, under another
        generation.
        """
        self.noted = note
        self.is_followed = note is not None or bool(self.presence)

    def forget_with(self, listener: Callable[[int, Sequence[bytes] | None], None]) -> None:
        """Call `listener`, too, when a tier's listener is to `forget`; there is one."""
        self.forgets = listener

    def use_with(self, listener: Callable[[Sequence[int], int], None]) -> None:
        """Call `listener` with the rows of each use, in chain order, after they were counted, and the tiers on the
        device of the client, as a mask; there is one."""
        self.uses = listener

    def presence_changed(self, row: int) -> None:
        """Notify the observers that `row` can be read in other tiers than before."""
        if self.noted is not None:
            self.noted(row)
        if self.presence:
            tenant, key = self._view.tenant_of(row), self._view.key(row)
            for listener in self.presence:
                listener.changed(tenant, key, self._view.rows.mask[row], row)

    def forget(self, tenant: int, keys: Sequence[bytes] | None) -> None:
        self._view.deletions += 1
        for listener in self.by_key.values():
            listener.forget(tenant, keys)
        if self.forgets is not None:
            self.forgets(tenant, keys)

    def release(self, row: int, tiers: int) -> None:
        """Notify the listeners of `tiers`, the set as an int, that `row` may be free to be evicted from them."""
        for tier in MEMBERS[tiers]:
            self.by_tier[tier].released(row)
