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
        """Note that the blocks `rows` have become readable in this tier. They follow one another in a chain, the first
        one first; they were stored, promoted, demoted into this tier, or recovered.
        """

    def accessed(self, rows: Sequence[int], now_ns: int) -> None:
        """Note that the blocks `rows`, all readable in this tier, were used together. They are in chain order."""

    def removed(self, rows: Sequence[int]) -> None:
        """Note that the blocks `rows` were removed from this tier. They are consecutive blocks of a chain, the last one
        first. Other blocks may get their row numbers next.
        """

    def released(self, row: int) -> None:
        """Note that the block at `row` may perhaps be evicted from this tier now. Until now it could not be: it was
        leased, had a child (the next block of a chain) in the tier, or was the only copy."""


@runtime_checkable
class KeyListener(Protocol):
    """A listener to a tier's events that also knows blocks by key, including blocks that are not stored."""

    def requested(self, rows: Sequence[int], missing: Sequence[bytes], tenant: int, now_ns: int) -> None:
        """Note a request by `tenant` that used the blocks `rows`, perhaps none, and then wanted the blocks with the
        keys `missing`, which no tier has.
        """

    def forget(self, tenant: int, keys: Sequence[bytes] | None) -> None:
        """Drop everything that names the blocks `keys` of `tenant`, since their owner ordered their removal from every
        tier. None for `keys` stands for all blocks of the tenant that are not in this tier."""


class NullListener:
    """A listener that ignores the events of a tier without a policy."""

    def inserted(self, *event: Any, **named: Any) -> None:
        """Ignore the event, as this listener does with every event."""

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
    """A listener to every change of the tiers from which a block can be read."""

    def changed(self, tenant: int, rows: Sequence[int]) -> None:
        """Note that the tiers in which the blocks `rows` of `tenant` can be read have changed. No row is another
        block's yet.
        """


class Listeners:
    """A registry of the objects and functions that are notified of changes in the block index. `by_tier` has each
    tier's listener. `presence` has the listeners to changes of the tiers in which blocks can be read, and `noted` is a
    function that is called with the rows of such changes; `is_followed` is True when there is either. `forgets` and
    `uses` are functions that are called on deletions and on uses."""

    def __init__(self, view: ResidencyView) -> None:
        self._view = view
        self._first: dict[int, TierListener] = {}  # by tier, as `listen` got it
        self._beside: dict[int, TierListener] = {}
        self.by_tier: list[TierListener] = [NullListener() for _ in view.tiers]
        self.presence: list[PresenceListener] = []
        self.by_key: dict[int, KeyListener] = {}  # by tier: those of `by_tier` that know keys
        self.noted: Callable[[Sequence[int]], object] | None = None
        self.is_followed = False
        self.forgets: Callable[[int, Sequence[bytes] | None], None] | None = None
        self.uses: Callable[[Sequence[int], int], None] | None = None

    def listen(self, tier: int, listener: TierListener) -> None:
        """Notify `listener` of the events in `tier` from now on. It replaces the tier's former listener."""
        self._first[tier] = listener
        second = self._beside.get(tier)
        if second is not None:
            listener = (_BesideByKey if isinstance(listener, KeyListener) else _Beside)(listener, second)  # type: ignore[arg-type]
        self.by_tier[tier] = listener
        self.by_key.pop(tier, None)
        if isinstance(listener, KeyListener):
            self.by_key[tier] = listener

    def listen_beside(self, tier: int, second: TierListener | None) -> None:
        """Notify `second`, in addition to the tier's listener, of the events in `tier` from now on. None for `second`
        ends such notifications."""
        self._beside.pop(tier, None)
        if second is not None:
            self._beside[tier] = second
        self.listen(tier, self._first.get(tier, NullListener()))

    def observe(self, listener: PresenceListener) -> None:
        """Notify `listener` of every change of the tiers from which a block can be read, from now on."""
        self.presence.append(listener)
        self.is_followed = True

    def note_with(self, note: Callable[[Sequence[int]], object] | None) -> None:
        """Call `note` with the rows of the blocks whose readable tiers have changed, from now on. It replaces the
        function of an earlier call; with None, no function is called.

        `note` is called for every put, so it should only append the rows and do its work later, from the
        state of the index at that time: the row may be another block's by then, under another generation."""
        self.noted = note
        self.is_followed = note is not None or bool(self.presence)

    def forget_with(self, listener: Callable[[int, Sequence[bytes] | None], None]) -> None:
        """Call `listener` for every deletion by order, after the tiers' listeners, with the tenant and the deleted keys
        (None: all of the tenant's). It replaces the function of an earlier call."""
        self.forgets = listener

    def use_with(self, listener: Callable[[Sequence[int], int], None]) -> None:
        """Call `listener` on each use of blocks, after the use was counted. Its arguments are the rows in chain order,
        and the tiers on the client's device as a mask. It replaces the function of an earlier call."""
        self.uses = listener

    def presence_changed(self, row: int) -> None:
        """Notify the listeners that the tiers in which the block at `row` can be read have changed."""
        self.presence_of_run((row,))

    def presence_of_run(self, rows: Sequence[int]) -> None:
        """Notify the listeners that the tiers in which the blocks `rows`, all of one tenant, can be read have
        changed."""
        if self.noted is not None:
            self.noted(rows)
        for listener in self.presence:
            listener.changed(self._view.tenant_of(rows[0]), rows)

    def forget(self, tenant: int, keys: Sequence[bytes] | None) -> None:
        self._view.deletions += 1
        for listener in self.by_key.values():
            listener.forget(tenant, keys)
        if self.forgets is not None:
            self.forgets(tenant, keys)

    def release(self, row: int, tiers: int) -> None:
        """Notify the listener of each tier in `tiers`, a TierSet as an int, that the block at `row` may perhaps be
        evicted now.
        """
        for tier in MEMBERS[tiers]:
            self.by_tier[tier].released(row)
