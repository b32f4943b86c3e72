"""The lookup indexes: for each tenant that asks, a table in shared memory that says where its blocks are.

The module owns one memfd for each tenant, from the first session that asks for it to the end of the last, and bounds
the memory of all of them together. It follows residency by its presence events, so a stored block is in the table
before its put is answered. It serves no bytes. A tenant gets the descriptor of its own table only, read-only; the memfd
is sealed, so that not even root opens it writable.

Invariants: a table in state SERVING holds every block of its tenant that an exact reader may have, in a slot or in an
overflow count; only this process writes it, on the control thread; a table that is no longer updated says CLOSED.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

from kvstore_proto import lookup_index as layout
from kvstore_proto.lookup_index import IndexLayout, IndexState
from kvstore_proto.v1 import handshake_pb2 as hs
from kvstore_tiers.arena_memory import F_SEAL_FUTURE_WRITE
from kvstored.clients.codes import codes_by_mask
from kvstored.clients.sessions import ClientSession
from kvstored.store.blocks import Residency

log = logging.getLogger(__name__)
FEWEST_TABLES = 4  # tables that the memory has room for, at least
KEYS_A_SLICE, ROWS_A_SLICE = 200, 2000  # each some 0.4 ms of the control thread; most rows may be free


class IndexTable:
    """The writer of one lookup index: a hash table in shared memory that maps a tenant's keys to tier codes. Keys that
    do not fit into their bucket are remembered here and only counted in the table.
    """

    def __init__(self, fixed: IndexLayout) -> None:
        self.layout = fixed
        self.keys = 0
        self._seed, self._buckets = fixed.seed, fixed.buckets
        self._overflow: dict[int, dict[int, int]] = {}  # bucket offset -> tag -> tier code
        self._overflowed = 0
        self._changes = 0
        self._state = IndexState.BUILDING
        self._fd = os.memfd_create("kvstored-lookup-index", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(self._fd, 0o600)
            os.ftruncate(self._fd, fixed.size_bytes)
            os.pwrite(self._fd, fixed.pack(), 0)  # before the seals, which forbid it for ever
            self._memory = mmap.mmap(self._fd, fixed.size_bytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | F_SEAL_FUTURE_WRITE
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, seals)
        except OSError:
            os.close(self._fd)
            raise
        self._publish()

    @property
    def state(self) -> IndexState:
        return self._state

    def set_state(self, state: IndexState) -> None:
        self._state = state
        self._publish()

    def _buckets_of(self, keys: Iterable[bytes]) -> Iterator[tuple[int, int, int, list[int]]]:
        """Yield the tag of each of `keys`, and the offset, the control word and the tags of its bucket."""
        for key in keys:
            tag = layout.key_tag(key, self._seed)
            offset = layout.bucket_offset(tag, self._buckets)
            control, *tags = layout.BODY.unpack_from(self._memory, offset + layout.CHECKSUM_BYTES)
            yield tag, offset, control, tags

    def put(self, keys: Iterable[bytes], code: int) -> None:
        """Enter the blocks `keys` with `code`, the tier code of the fastest tier that has a readable copy of each."""
        for tag, offset, control, tags in self._buckets_of(keys):
            if tag in tags:
                slot = tags.index(tag)
                if control >> 8 * slot & 0xFF == code:
                    continue
            elif 0 in tags:
                slot = tags.index(0)
                self.keys += 1
            else:
                waiting = self._overflow.setdefault(offset, {})
                self._overflowed += tag not in waiting
                waiting[tag] = code
                self._write(offset, layout.with_overflow(control, len(waiting)), tags)
                continue
            tags[slot] = tag
            self._write(offset, layout.with_tier(control, slot, code), tags)
        self._publish()

    def remove(self, keys: Iterable[bytes]) -> None:
        """Remove the blocks `keys`, which are no longer readable, from the table. A key that did not fit into the same
        bucket of the table gets a free place."""
        for tag, offset, control, tags in self._buckets_of(keys):
            waiting = self._overflow.get(offset, {})
            if tag in tags:
                slot, code = tags.index(tag), layout.ABSENT
                if waiting:
                    tags[slot], code = waiting.popitem()
                    self._overflowed -= 1
                else:
                    tags[slot] = 0
                    self.keys -= 1
                control = layout.with_tier(control, slot, code)
            elif waiting.pop(tag, None) is not None:
                self._overflowed -= 1
            else:
                continue
            if not waiting:
                self._overflow.pop(offset, None)
            self._write(offset, layout.with_overflow(control, len(waiting)), tags)
        self._publish()

    def readonly_fd(self) -> int:
        """Return a new read-only descriptor of the table, for a client. The caller closes it."""
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Write the state CLOSED, which processes that still map the table can see, and release the table. A second
        call does nothing."""
        if self._fd >= 0:
            self.set_state(IndexState.CLOSED)
            self._memory.close()
            os.close(self._fd)
            self._fd = -1

    def _write(self, offset: int, control: int, tags: list[int]) -> None:
        layout.BUCKET.pack_into(self._memory, offset, *layout.pack_bucket(control, tags))
        self._changes += 1

    def _publish(self) -> None:
        layout.LIVE.pack_into(self._memory, layout.LIVE_OFFSET, self._state, self.keys, self._overflowed, self._changes)


class LookupIndexes:
    """The lookup indexes of all tenants. A lookup index is a table in shared memory in which a client sees which of its
    tenant's blocks are stored. All tables together take at most `total_bytes`; each has room for `slots` keys as far as
    its part of that allows. `schedule` runs a function soon, on the control thread."""

    def __init__(
        self, slots: int, total_bytes: int, residency: Residency, schedule: Callable[[Callable[[], None]], object]
    ) -> None:
        self._residency = residency
        self._schedule = schedule
        self._buckets = layout.buckets_for(slots, total_bytes // FEWEST_TABLES)
        self.total_bytes = total_bytes
        self.used_bytes = 0
        self._tables: dict[int, IndexTable] = {}
        self._holders: dict[int, set[int]] = {}  # tenant -> sessions that were granted its table
        self._code_of_mask = codes_by_mask(residency)

    @property
    def offered(self) -> bool:
        return self._buckets > 0

    def changed(self, tenant: int, rows: Sequence[int]) -> None:
        """Update the table of `tenant`: the tiers in which the blocks `rows` can be read have changed."""
        table, residency = self._tables.get(tenant), self._residency
        if table is None:
            return
        masks = residency.exactness.masks(exact=True)
        for mask, alike in groupby(rows, lambda row: masks[row]):
            keys = map(residency.key, alike)
            if mask:
                table.put(keys, self._code_of_mask[mask])
            else:
                table.remove(keys)

    def grant(self, session: ClientSession) -> tuple[hs.LookupIndexGrant, int | None]:
        """Return the message that lets the client of `session` map its tenant's lookup table, and the table's
        descriptor. The table is made if it does not exist. When there is no table, the message has the reason, and the
        descriptor is None."""
        if not self.offered:
            return hs.LookupIndexGrant(reason="this daemon keeps no lookup index (index.slots = 0)"), None
        if not session.exact:
            return hs.LookupIndexGrant(
                reason="a lookup index has exact copies alone, and this client accepts lossy ones"
            ), None
        tenant = session.tenant_id
        table = self._tables.get(tenant)
        if table is None:
            made = self._make(tenant, session.tenant.digest)
            if isinstance(made, str):
                return hs.LookupIndexGrant(reason=made), None
            table = made
        try:
            descriptor = table.readonly_fd()
        except OSError as error:
            return hs.LookupIndexGrant(reason=f"no descriptor to spare: {error.strerror}"), None
        finally:
            self._hold(tenant, session)
        return hs.LookupIndexGrant(size_bytes=table.layout.size_bytes), descriptor

    def _make(self, tenant: int, digest: bytes) -> IndexTable | str:
        fixed = IndexLayout(self._buckets, int.from_bytes(os.urandom(8), "little"), digest)
        if self.used_bytes + fixed.size_bytes > self.total_bytes:
            return f"lookup indexes of {len(self._tables)} tenants take all the memory that is set aside for them"
        try:
            table = IndexTable(fixed)
        except OSError as error:
            return f"no memory for a lookup index: {error.strerror}"
        self._tables[tenant] = table
        self.used_bytes += fixed.size_bytes
        self._build(tenant, table, 0)
        return table

    def _build(self, tenant: int, table: IndexTable, first_row: int) -> None:
        """Enter the blocks that are stored already, a slice at a time. Changes meanwhile arrive through `changed`."""
        if self._tables.get(tenant) is not table:
            return
        rows, masks = self._residency.rows, self._residency.exactness.masks(exact=True)
        entered, row = 0, first_row
        end = min(first_row + ROWS_A_SLICE, rows.capacity)
        while row < end and entered < KEYS_A_SLICE:
            key, mask = rows.key(row), masks[row]
            if key is not None and mask and self._residency.tenant_of(row) == tenant:
                table.put((key,), self._code_of_mask[mask])
                entered += 1
            row += 1
        if row < rows.capacity:
            self._schedule(lambda: self._build(tenant, table, row))
        else:
            table.set_state(IndexState.SERVING)
            log.info("lookup index of tenant %d: %d keys, %d bytes", tenant, table.keys, table.layout.size_bytes)

    def _hold(self, tenant: int, session: ClientSession) -> None:
        holders = self._holders.setdefault(tenant, set())
        if session.session_id in holders:
            return
        holders.add(session.session_id)

        def let_go() -> None:
            holders.discard(session.session_id)
            if not holders:
                del self._holders[tenant]
                self.close(tenant)

        session.on_close.append(let_go)

    def close(self, tenant: int) -> None:
        """Close the table of `tenant`, if there is one: who maps it sees no later change. Clients that connect from now
        on get another; the others ask the daemon."""
        table = self._tables.pop(tenant, None)
        if table is not None:
            table.close()
            self.used_bytes -= table.layout.size_bytes
