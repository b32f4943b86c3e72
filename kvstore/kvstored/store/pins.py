"""Pins keep blocks from eviction for named owners, within bounds for each owner and each tenant.

A pin of a block is one bit of the column `pinned_by`; the names of a tenant's owners are here. All pins of an owner end
together, at a time that is set with them or by an operator. `Retention` alone calls this module to change pins.

Invariants: an owner's bit is given to another owner only when no block has it and no put under way will set it. Work
over all pinned blocks is done in steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import itemgetter

import numpy as np

from kvstore_console.units import human_bytes
from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_tiers.host import HostTier
from kvstored.clock import NS_PER_S, Clock
from kvstored.config.schema import LimitsSection
from kvstored.store.blocks import Residency

OWNERS_MAX = 32  # of pins of one tenant: a bit each
ALL_OWNERS = (1 << OWNERS_MAX) - 1
PINNED_SHARE = 2  # at most one part in so many of the mapped tier is pinned by one tenant
NEVER_PINNED = 4  # one part in four of the bytes beyond all minima is left without pins
STEP_BLOCKS = 256  # unpinned in one step: a millisecond
STEP_ROWS = 1 << 16  # of the index, searched at once for pinned blocks
_ALL = ""  # the owner under which `_coming` counts all of a tenant's owners together


class Pins:
    """The owners of pins, by tenant: what each has pinned, may pin, and when its pins end. `host` is the tier that
    clients map; `limits` are the configured bounds."""

    def __init__(self, residency: Residency, clock: Clock, limits: LimitsSection, host: HostTier) -> None:
        self._residency, self._clock, self._limits, self._host = residency, clock, limits, host
        self._names: dict[int, list[str]] = {}  # by tenant: whose pin each bit is
        self._bytes: Counter[tuple[int, int]] = Counter()  # by tenant and bit, slots of blocks that have the bit
        self._coming: Counter[tuple[int, str]] = Counter()  # by tenant and owner, slots that a put under way will pin
        self.ends: dict[tuple[int, str], int] = {}  # by tenant and owner: the monotonic second at which its pins end
        self._minima: dict[int, int] = {}  # by tenant, bytes of the mapped tier that are its own
        self._charged: dict[int, tuple[int, ...]] = {}  # by tenant: all whose pins count together
        residency.owners_changed = self._count

    def forget_shares(self) -> None:
        """Forget what `set_share` has noted, before it is noted anew for all tenants."""
        self._minima.clear()
        self._charged.clear()

    def set_share(self, tenant: int, min_bytes: int, charged: tuple[int, ...]) -> None:
        """Note that `min_bytes` of the mapped tier are guaranteed to `tenant`, and that its pins count together with
        the pins of the tenants `charged`, itself among them; () is itself alone."""
        self._minima[tenant], self._charged[tenant] = min_bytes, charged or (tenant,)

    def check(self, tenant: int, owner: str, nbytes: int, rows: Sequence[int]) -> None:
        """Check that `tenant` may pin the stored blocks `rows`, and new blocks whose slots have `nbytes`, for `owner`.
        Raises KVStoreError when that is more than the owner or the tenant may pin."""
        of_tenant, of_owner = self.more_bytes(tenant, owner, rows)
        self.check_bytes(tenant, owner, nbytes + of_tenant, nbytes + of_owner)

    def more_bytes(self, tenant: int, owner: str, rows: Sequence[int]) -> tuple[int, int]:
        """Return the bytes of the slots of `rows` that no owner of `tenant` has pinned, and that `owner` has not."""
        bit, residency = self.bit_of(tenant, owner), self._residency
        pinned = [(residency.pinned_by(row), residency.slot_bytes(row)) for row in rows]
        return (
            sum(nbytes for owners, nbytes in pinned if not owners),
            sum(nbytes for owners, nbytes in pinned if not owners & bit),
        )

    def check_bytes(self, tenant: int, owner: str, of_tenant: int, of_owner: int) -> None:
        """Check that `tenant` may have `of_tenant` more bytes pinned, and its `owner` `of_owner` more. Raises
        KVStoreError."""
        bit = self.bit_of(tenant, owner)
        dram_bytes = min(self._host.capacity_bytes, self._host.ceiling_bytes)  # it may be on its way to less
        share = "half of DRAM", dram_bytes // PINNED_SHARE
        most_of_tenant, most_of_owner = self._limits.pinned_per_tenant_bytes, self._limits.pinned_per_owner_bytes
        of_all = sum(map(self._pinned, self._charged.get(tenant, (tenant,))))
        of_this = self._bytes[tenant, bit.bit_length() - 1] + self._coming[tenant, owner]
        bounds = (
            ("the tenant", ("limits.pinned_per_tenant", most_of_tenant), of_all, of_tenant),
            (f"owner {owner!r}", ("limits.pinned_per_owner", most_of_owner), of_this, of_owner),
        )
        for who, most, held_bytes, more_bytes in bounds:
            what, limit_bytes = min(most, share, key=itemgetter(1))
            if more_bytes and held_bytes + more_bytes > limit_bytes:
                raise KVStoreError(
                    ErrorKind.TOO_LARGE,
                    f"{who} has pinned {human_bytes(held_bytes)}, and {human_bytes(more_bytes)} more are over {what}, "
                    f"{human_bytes(limit_bytes)}: unpin some",
                )

        self._check_minima(tenant, of_tenant, dram_bytes)

    def _check_minima(self, tenant: int, more_bytes: int, dram_bytes: int) -> None:
        """Check that the pins of all tenants, with `more_bytes` of `tenant`, leave each its minimum, and some room for
        who has none. Raises KVStoreError."""
        minima = self._minima
        shared_bytes = max(0, dram_bytes - self._host.charged_bytes - sum(minima.values()))
        limit_bytes = shared_bytes - shared_bytes // NEVER_PINNED
        pinned = {each: self._pinned(each) for each in {*self._residency.pinned_bytes, tenant}}
        own_bytes, its_min_bytes = pinned[tenant], minima.get(tenant, 0)
        held_bytes = sum(max(0, nbytes - minima.get(each, 0)) for each, nbytes in pinned.items())
        beyond_bytes = max(0, own_bytes + more_bytes - its_min_bytes) - max(0, own_bytes - its_min_bytes)
        if beyond_bytes and held_bytes + beyond_bytes > limit_bytes:
            raise KVStoreError(
                ErrorKind.TOO_LARGE,
                f"all tenants have pinned {human_bytes(held_bytes)} above their minima, and "
                f"{human_bytes(beyond_bytes)} more are over three quarters of what no minimum reserves of DRAM, "
                f"{human_bytes(limit_bytes)}: unpin some",
            )

    def _pinned(self, tenant: int) -> int:
        """Return the bytes that `tenant` has pinned, or will have by puts under way."""
        return self._residency.pinned_bytes.get(tenant, 0) + self._coming[tenant, _ALL]

    def hold(self, tenant: int, owner: str, nbytes: int) -> Callable[[], None]:
        """Reserve `nbytes` and the owner's bit for what `check` allowed. Return a function that ends the
        reservation; call it once, when the blocks are stored or given up."""
        if not owner:
            return lambda: None

        def count(sign: int) -> None:
            for each in (owner, _ALL):
                self._coming[tenant, each] += sign * nbytes
                if not self._coming[tenant, each]:
                    del self._coming[tenant, each]

        count(1)
        return partial(count, -1)

    def set(self, rows: Sequence[int], pin: str, unpin: str, pin_ttl_s: int | None) -> None:
        """Pin the blocks `rows` for the owner `pin`, and end the pins of the owner `unpin` on them; "" is nobody. All
        pins of `pin` end `pin_ttl_s` seconds from now, 0: never, None: as before."""
        if pin and rows:
            self._set_end(self._residency.tenant_of(rows[0]), pin, pin_ttl_s)
        for row in rows:
            tenant = self._residency.tenant_of(row)
            owners = self._residency.pinned_by(row) & ~self.bit_of(tenant, unpin, is_new=False)
            self._residency.set_owners(row, owners | self.bit_of(tenant, pin))

    def _set_end(self, tenant: int, owner: str, ttl_s: int | None) -> None:
        """Let all pins of `owner` end `ttl_s` seconds from now, for 0 never, for None as before; an owner without pins
        begins without an end."""
        bit = self.bit_of(tenant, owner).bit_length() - 1
        if ttl_s is not None or not self._bytes[tenant, bit]:
            self.ends.pop((tenant, owner), None)
        if ttl_s:
            self.ends[tenant, owner] = self._clock.monotonic_ns() // NS_PER_S + ttl_s

    def names(self, row: int) -> list[str]:
        """Return the names of the owners that have pinned the block at `row`."""
        bits = self._residency.pinned_by(row)
        names = self._names.get(self._residency.tenant_of(row), []) if bits else []
        return [name for bit, name in enumerate(names) if bits >> bit & 1]

    def holds_any(self, tenant: int, owner: str) -> bool:
        """Return whether `owner` has pinned any block of `tenant`."""
        bit = self.bit_of(tenant, owner, is_new=False)
        return bit > 0 and self._bytes[tenant, bit.bit_length() - 1] > 0

    def rows_of(self, tenant: int, owner: str = "", part: slice = slice(None)) -> list[int]:
        """Return the rows of the blocks of `tenant` that `owner` has pinned, or that any owner has (""), of all rows or
        of one `part` of them."""
        bits = self.bit_of(tenant, owner, is_new=False) if owner else ALL_OWNERS
        column = self._residency.rows.optional.view("pinned_by")
        if column is None:
            return []
        rows = np.flatnonzero(column[part] & np.uint32(bits)) + (part.start or 0)
        found: list[int] = rows[self._residency.tenants_of(rows) == tenant].tolist()
        return found

    def steps_to_unpin(self, tenant: int, owner: str = "") -> Iterator[list[int]]:
        """End the pins of `owner` on blocks of `tenant`, or of all its owners (""), a number of blocks at a time. Yield
        the rows of the blocks that lost a pin in each step; the index may change between steps."""
        bits, residency = self.bit_of(tenant, owner, is_new=False) if owner else ALL_OWNERS, self._residency
        for first in range(0, residency.rows.capacity, STEP_ROWS):
            rows = self.rows_of(tenant, owner, slice(first, first + STEP_ROWS))
            for at in range(0, len(rows), STEP_BLOCKS):
                step = [row for row in rows[at : at + STEP_BLOCKS] if residency.pinned_by(row) & bits]
                step = [row for row in step if residency.tenant_of(row) == tenant]
                for row in step:
                    residency.set_owners(row, residency.pinned_by(row) & ~bits)
                yield step

    def due(self) -> list[tuple[int, str]]:
        """Return tenant and name of each owner whose pins should have ended by now."""
        if not self.ends:
            return []
        now_s = self._clock.monotonic_ns() // NS_PER_S
        return [owner for owner, ends_s in self.ends.items() if ends_s <= now_s]

    def bit_of(self, tenant: int, owner: str, *, is_new: bool = True) -> int:
        """Return the bit of `owner` among the tenant's owners of pins; 0 when `owner` is "" or unknown and not
        `is_new`. Raises KVStoreError when the tenant has `OWNERS_MAX` owners already."""
        names = self._names.setdefault(tenant, [])
        if owner and owner in names:  # "" is the name of a bit that was freed
            return 1 << names.index(owner)
        if not owner or not is_new:
            return 0
        if len(names) == OWNERS_MAX:
            self._forget_idle(tenant, names)
        if "" in names:
            names[names.index("")] = owner
        else:
            names.append(owner)
        return 1 << names.index(owner)

    def _forget_idle(self, tenant: int, names: list[str]) -> None:
        """Free the bits of owners that have no pin any more, and that no put under way will pin for. Raises
        KVStoreError when there is no such owner."""
        for bit, name in enumerate(names):
            if not self._bytes[tenant, bit] and not self._coming[tenant, name]:
                self.ends.pop((tenant, name), None)
                names[bit] = ""
        if "" not in names:
            raise KVStoreError(
                ErrorKind.TOO_LARGE, f"{OWNERS_MAX} owners have pins of this tenant, no more can: let one unpin all"
            )

    def _count(self, row: int, before: int, after: int) -> None:
        """Count that the owners of the block at `row` were `before` and are `after`, each a set of bits."""
        tenant, nbytes = self._residency.tenant_of(row), self._residency.slot_bytes(row)
        for bit in range((before | after).bit_length()):
            if (before ^ after) >> bit & 1:
                self._bytes[tenant, bit] += nbytes if after >> bit & 1 else -nbytes
