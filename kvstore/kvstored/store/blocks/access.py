"""Uses of blocks: counts and times of last use, and the events that policies learn from."""

from __future__ import annotations

from collections.abc import Sequence

from kvstored.lifecycle import Cause
from kvstored.store.blocks.events import Listeners
from kvstored.store.blocks.view import ResidencyView

_ACCESSES_MAX = 0xFFFF


class AccessLog:
    """Records uses in the columns `accesses` and `last_access_ns`."""

    def __init__(self, view: ResidencyView, listeners: Listeners) -> None:
        self._view = view
        self._listeners = listeners

    def touch_run(self, rows: Sequence[int], now_ns: int, device_tiers: int = 0) -> None:
        """An access of `rows` together, in chain order (head first): a hit, or the storing of new blocks.
        `device_tiers`: those on the client's device, as a mask."""
        columns = self._view.rows
        last_access_ns, accesses, mask = columns.last_access_ns, columns.accesses, columns.mask
        everywhere = 0xFF
        somewhere = 0
        for row in rows:
            last_access_ns[row] = now_ns
            if accesses[row] != _ACCESSES_MAX:
                accesses[row] += 1
            tiers = mask[row]
            everywhere &= tiers
            somewhere |= tiers
        for tier, listener in enumerate(self._listeners.by_tier):
            bit = 1 << tier
            if rows and everywhere & bit:
                listener.accessed(rows, now_ns)
            elif somewhere & bit:
                listener.accessed([row for row in rows if mask[row] & bit], now_ns)
        if self._listeners.uses is not None:
            self._listeners.uses(rows, device_tiers)

    def request_run(
        self, tenant: int, rows: Sequence[int], missing: Sequence[bytes], now_ns: int, device_tiers: int = 0
    ) -> None:
        """`touch_run` of what a request found, which asked for the blocks `missing` after it as well."""
        if not missing:
            self.touch_run(rows, now_ns, device_tiers)
            return
        last_access_ns, accesses, mask = self._view.rows.last_access_ns, self._view.rows.accesses, self._view.rows.mask
        for row in rows:
            last_access_ns[row] = now_ns
            accesses[row] = min(accesses[row] + 1, _ACCESSES_MAX)
        for tier, listener in enumerate(self._listeners.by_tier):
            here = [row for row in rows if mask[row] >> tier & 1]
            if tier in self._listeners.by_key:
                self._listeners.by_key[tier].requested(here, missing, tenant, now_ns)
            elif here:
                listener.accessed(here, now_ns)
        if self._listeners.uses is not None:
            self._listeners.uses(rows, device_tiers)

    def record_refusal(self, tenant: int, key: bytes, cause: Cause, now_ns: int) -> None:
        """A block that was to be stored is not. One that was DECLINED counts as if it had been stored, used and evicted
        at once."""
        ghost = self._view.tenants[tenant].ghost
        ghost.remember(key, cause, now_ns, ghost.accesses(key) + (cause is Cause.DECLINED))
