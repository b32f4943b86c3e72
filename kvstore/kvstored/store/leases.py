"""Leases: which client may read which slots, until when; and limbo, where a slot waits for its last reader.

A lease pins its blocks while it lives. When it expires they may be evicted, but their bytes are not recycled: a slot
with readers left is held in limbo and freed on the release of its last reader or the end of that reader's connection.
The module only keeps records: the time is an argument, slots are freed by a callback. Invariants: a slot is freed
exactly once, with no readers; expiries given to `grant` and `renew` never go back (one time to live for all), so the
next to expire is found at once.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore_tiers.base import Slot
from kvstored.store.blocks.runs import RowRun

Place = tuple[int, int]  # container and offset: a slot without its generation
Named = Sequence[int] | RowRun  # blocks, by their tokens or as a run of rows


@dataclass(slots=True)
class GrantedLease:
    """A client's right to read blocks in given slots. `tokens` name the pinned blocks; the list is empty once the lease
    has expired. With `continues` the lease belongs to the request of an earlier lease, and does not count against the
    client's limit."""

    lease_id: int
    session_id: int
    tenant: int
    tokens: Named
    slots: Sequence[Slot]
    expires_ns: int
    expired: bool = False
    continues: bool = False


class LeaseBook(Protocol):
    """A record of leases outside the process, from which the daemon's next process reads them."""

    def record_lease(self, lease_id: int, session_id: int, slots: Sequence[Slot]) -> None: ...

    def end_lease(self, lease_id: int) -> None: ...


class LeaseTable:
    """The table of all leases of the daemon, and of the slots in limbo (their block is removed, but a client may still
    read them).

    `unpin(tokens)` unpins blocks, `free_slot(slot)` frees a slot, and `mark_retired(slot)` is called for a slot that
    comes into limbo. A tenant has at most `limbo_limit_bytes` in limbo by eviction; drops by an operator may exceed it.
    If a session holds more than `expired_limit` expired leases, the oldest are joined in one, so their number is
    bounded by the number of slots."""

    def __init__(
        self,
        unpin: Callable[[Named], None],
        free_slot: Callable[[Slot], None],
        mark_retired: Callable[[Slot], None] = lambda slot: None,
        *,
        limbo_limit_bytes: int = 2**63,
        expired_limit: int = 2**63,
    ) -> None:
        self._unpin = unpin
        self._free_slot = free_slot
        self._mark_retired = mark_retired
        self._limbo_limit_bytes = limbo_limit_bytes
        self._expired_limit = expired_limit
        self._counted: Counter[int] = Counter()  # by session, of those that live
        self._expired: dict[int, dict[int, GrantedLease]] = {}  # by session and number, the oldest first
        self.book: LeaseBook | None = None  # of what is granted and ended
        self._leases: dict[int, GrantedLease] = {}
        self._of_session: dict[int, set[int]] = {}
        self._due: OrderedDict[int, GrantedLease] = OrderedDict()  # those that live, by expiry
        self._counted_readers: dict[Place, int] = {}
        self._uncounted: dict[int, GrantedLease] = {}  # those whose slots are not in `_counted_readers` yet
        self._limbo: dict[Place, tuple[Slot, int]] = {}
        self._limbo_bytes: dict[int, int] = {}
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def live(self) -> int:
        """The number of leases in this table that have not expired."""
        return len(self._due)

    def count(self, session_id: int) -> int:
        """Return for how many requests the session holds leases that have not expired."""
        return self._counted[session_id]

    def limbo_bytes(self, tenant: int | None = None) -> int:
        return sum(self._limbo_bytes.values()) if tenant is None else self._limbo_bytes.get(tenant, 0)

    def limbo_in(self, is_here: Callable[[int], bool]) -> int:
        """Return the bytes of slots in limbo in containers (arenas or slabs) for which `is_here` returns True."""
        return sum(slot.nbytes for slot, _ in self._limbo.values() if is_here(slot.container))

    def grant(
        self,
        session_id: int,
        tenant: int,
        tokens: Named,
        slots: Sequence[Slot],
        expires_ns: int,
        *,
        continues: bool = False,
    ) -> GrantedLease:
        """Return a new lease of the session `session_id` over `slots`, valid until `expires_ns` (monotonic). The caller
        has pinned the blocks of `tokens`; the table unpins each once, when the lease ends. With `continues` the lease
        belongs to the request of an earlier one."""
        self._last_id += 1
        if self.book is not None:
            self.book.record_lease(self._last_id, session_id, slots)
        lease = GrantedLease(self._last_id, session_id, tenant, tokens, slots, expires_ns, continues=continues)
        return self._hold(lease)

    def restore(
        self, lease_id: int, session_id: int, tenant: int, tokens: list[int], slots: list[Slot], expires_ns: int
    ) -> GrantedLease:
        """Make a lease of an earlier process valid again under its number, until `expires_ns` (monotonic), and return
        it. `tokens`, whose blocks the caller has pinned, may be fewer than `slots`, since the block of a slot may be
        gone."""
        return self._hold(GrantedLease(lease_id, session_id, tenant, tokens, slots, expires_ns))

    def record_in(self, book: LeaseBook, last_id: int) -> None:
        """Record each new lease in `book` from now on; it has the present ones. New leases get numbers above
        `last_id`.
        """
        self.book = book
        self._last_id = max(self._last_id, last_id)

    def of_session(self, session_id: int) -> list[int]:
        return sorted(self._of_session.get(session_id, ()))

    def belong_to(self, session_id: int, tenant: int) -> bool:
        """Return whether all leases of the session are over blocks of `tenant`."""
        return all(self._leases[lease_id].tenant == tenant for lease_id in self._of_session.get(session_id, ()))

    def _hold(self, lease: GrantedLease) -> GrantedLease:
        session_id = lease.session_id
        self._leases[lease.lease_id] = lease
        self._due[lease.lease_id] = lease
        self._of_session.setdefault(session_id, set()).add(lease.lease_id)
        self._counted[session_id] += not lease.continues
        self._uncounted[lease.lease_id] = lease  # as a rule it ends before a slot of its blocks is taken from them
        return lease

    @property
    def _readers(self) -> dict[Place, int]:
        """The number of readers of each slot that has one; readers by new leases count too."""
        readers = self._counted_readers
        for lease in self._uncounted.values():
            for slot in lease.slots:
                place = slot[:2]
                readers[place] = readers.get(place, 0) + 1
        self._uncounted.clear()
        return readers

    def renew(self, session_id: int, lease_id: int, expires_ns: int) -> bool:
        """Move the expiry of the lease `lease_id` to `expires_ns` (monotonic). Return False if it is gone, has expired,
        or is not of this session."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.session_id != session_id or lease.expired:
            return False
        lease.expires_ns = expires_ns
        self._due.move_to_end(lease_id)
        return True

    def release(self, session_id: int, lease_id: int) -> bool:
        """End the lease `lease_id`, expired or not. Return False if this session holds no lease with this number."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.session_id != session_id:
            return False
        self._end(lease)
        return True

    def release_session(self, session_id: int) -> int:
        """End all leases of a session whose client is gone, and return their number."""
        ended = [self._leases[lease_id] for lease_id in self._of_session.get(session_id, ())]
        for lease in ended:
            self._end(lease)
        return len(ended)

    def expire(self, now_ns: int) -> int:
        """End the validity of the leases that are due at `now_ns` (monotonic), and return their number. Their blocks
        may then be evicted; their slots are kept until the reader releases them."""
        lapsed = 0
        while self._due:
            lease = next(iter(self._due.values()))
            if lease.expires_ns > now_ns:
                break
            self._lapse(lease)
            expired = self._expired[lease.session_id]
            if len(expired) > self._expired_limit:
                self._join(list(expired.values())[: (len(expired) + 1) // 2])
            lapsed += 1
        return lapsed

    def has_readers(self, slot: Slot) -> bool:
        return (slot.container, slot.offset) in self._readers

    def may_retire(self, slot: Slot, tenant: int) -> bool:
        """Return whether a block of `tenant` may be evicted from `slot`: no client may still read the slot, or the
        tenant's slots that wait for readers would stay within the limit."""
        return not self.has_readers(slot) or self.limbo_bytes(tenant) + slot.nbytes <= self._limbo_limit_bytes

    def retire(self, slot: Slot, tenant: int) -> None:
        """Free `slot`, from which a block of `tenant` was removed: at once, or when its last reader is done."""
        place = (slot.container, slot.offset)
        if not self.has_readers(slot):
            self._free_slot(slot)
            return
        if place in self._limbo:
            raise RuntimeError(f"slot {slot} retired twice")
        self._mark_retired(slot)
        self._limbo[place] = (slot, tenant)
        self._limbo_bytes[tenant] = self._limbo_bytes.get(tenant, 0) + slot.nbytes

    def _join(self, expired: list[GrantedLease]) -> None:
        """Replace several expired leases of a session by one."""
        slots = {(slot.container, slot.offset): slot for lease in expired for slot in lease.slots}
        first = expired[0]
        self._lapse(self.grant(first.session_id, first.tenant, [], list(slots.values()), first.expires_ns))
        for lease in expired:
            self._end(lease)

    def _lapse(self, lease: GrantedLease) -> None:
        """End a lease's life: its rows may be evicted, and it does not count."""
        self._end_life(lease)
        lease.expired = True
        lease.tokens = []
        self._expired.setdefault(lease.session_id, {})[lease.lease_id] = lease

    def _end_life(self, lease: GrantedLease) -> None:
        del self._due[lease.lease_id]
        self._unpin(lease.tokens)
        self._counted[lease.session_id] -= not lease.continues
        if not self._counted[lease.session_id]:
            del self._counted[lease.session_id]

    def _end(self, lease: GrantedLease) -> None:
        del self._leases[lease.lease_id]
        if self.book is not None:
            self.book.end_lease(lease.lease_id)
        owned = self._of_session[lease.session_id]
        owned.discard(lease.lease_id)
        if not owned:
            del self._of_session[lease.session_id]
        if lease.expired:
            expired = self._expired[lease.session_id]
            del expired[lease.lease_id]
            if not expired:
                del self._expired[lease.session_id]
        else:
            self._end_life(lease)
        if self._uncounted.pop(lease.lease_id, None) is None:
            self._leave(lease.slots)

    def _leave(self, slots: Sequence[Slot]) -> None:
        """Count one reader less of each of `slots`, and free those in limbo that have none left."""
        limbo = self._limbo
        readers = self._readers if limbo else self._counted_readers
        for slot in slots:
            place = slot[:2]
            if left := readers[place] - 1:
                readers[place] = left
                continue
            del readers[place]
            if limbo and (waiting := limbo.pop(place, None)) is not None:
                self._limbo_bytes[waiting[1]] -= slot.nbytes
                self._free_slot(waiting[0])
