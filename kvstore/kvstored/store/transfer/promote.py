"""Promotion: give a block of a slower tier a copy in the mapped tier, once, however many callers ask.

Owns promotions under way. The block is read by the link of the fastest tier that has it and can be read, verified on
the way; one that turns out damaged there is forgotten, its descendants become unreachable (placeholder), and the miss
says why. Invariants: a slot is readable only after its bytes were verified; prefetches that wait hold at most
`prefetch_room_bytes` of the mapped tier, since a queued promotion has its slot and demand must find room beside any
number of hints.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from kvstore_proto.arena import slot_bytes
from kvstore_tiers.base import Outcome, OutcomeKind, Slot
from kvstored.lifecycle import Cause
from kvstored.store.blocks import Residency
from kvstored.store.degraded.breaker import TierBreaker
from kvstored.store.degraded.modes import DegradedModes
from kvstored.store.transfer.damage import Damage
from kvstored.store.transfer.lane import Priority
from kvstored.store.transfer.link import TierLink
from kvstored.store.transfer.moves import BlockMove, Moves, Unmoved
from kvstored.store.transfer.room import Room
from kvstored.telemetry import Counters, Flows
from kvstored.tier_set import MEMBERS, TIER_SETS, TierSet

log = logging.getLogger(__name__)
MAPPED_US = 1  # what a block that is mapped already costs to have
PATIENCE, LEAST_PATIENCE_MS = 8, 1000  # no request waits for a read that takes so many times its estimate, and so long
OVERDUE_US = 250_000
MAX_SUSPECTS = 4096


@dataclass(slots=True, eq=False)
class _Promotion(BlockMove):
    """A move to the mapped tier. A hint is one waiter, and never gives up. `answer` resolves to whether the block has a
    mapped copy; `on_end(is_mapped, is_late)` is called at the end."""

    answer: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    on_end: Callable[[bool, bool], None] | None = None


def _alike(promotions: Iterable[_Promotion]) -> Iterator[list[_Promotion]]:
    """Yield the promotions in lists of neighbours with slots of one size, of one tenant."""
    for _, alike in groupby(promotions, lambda promotion: (promotion.nbytes, promotion.tenant)):
        yield list(alike)


class Promoter:
    """A component that copies blocks from slower tiers to the tier that clients map. `links` lead to it from every
    other tier, fastest first. Promotions that no client waits for hold at most `prefetch_room_bytes` of it."""

    def __init__(
        self,
        residency: Residency,
        links: Sequence[TierLink],
        room: Room,
        counters: Counters,
        flows: Flows,
        damage: Damage,
        modes: DegradedModes,
        *,
        prefetch_room_bytes: int,
    ) -> None:
        self._residency, self._exactness = residency, residency.exactness
        self._links = {link.source: link for link in links}
        self._gated = [link for link in links if link.breaker is not None]
        self.room = room
        self.moves: Moves[_Promotion] = Moves(residency, room.allocate)
        self._counters = counters
        self._flows = flows
        self._prefetch_room_bytes = prefetch_room_bytes
        self._damage = damage
        self._suspects: OrderedDict[int, None] = OrderedDict()  # tokens whose last read failed
        self._demanded: Counter[int] = Counter()  # by tenant
        self._seeking: set[int] = set()  # tokens of prefetches for which room is being made
        modes.on_change.append(self._follow_mode)

    @property
    def reaches_all(self) -> bool:
        """True when every slower tier can be read now. Otherwise lookups and gets leave out the blocks that only
        unreadable tiers have."""
        return all(link.is_open for link in self._gated)

    @property
    def _reach(self) -> TierSet:
        """Return the tiers that can be read now."""
        return TierSet.of(self._residency.mapped, *(link.source for link in self._links.values() if link.is_open))

    def is_out_of_reach(self, row: int) -> bool:
        """Return whether the block at `row` is stored only in tiers that cannot be read now."""
        return not self.reaches_all and not self._residency.tier_mask(row) & self._reach

    def needs_new_copy(self, row: int) -> bool:
        """Return whether a put of the block at `row`, which is stored, should store it again: no tier that has it can
        be read now.
        """
        return self.is_out_of_reach(row) and not self._residency.being_filled(row)

    def reachable(self, rows: list[int], *, exact: bool = True) -> list[int]:
        """Return `rows` with -1 in the place of each that is out of reach, or has no exact copy for an `exact`
        reader."""
        if self.reaches_all and not (exact and self._exactness.has_lossy):
            return rows
        mask, reach = self._exactness.masks(exact=exact), self._reach
        return [row if row >= 0 and mask[row] & reach else -1 for row in rows]

    def reachable_run(self, rows: list[int], *, exact: bool = True) -> list[int]:
        """Return the leading rows that `reachable` leaves as they are."""
        if self.reaches_all and not (exact and self._exactness.has_lossy):
            return rows
        mask, reach = self._exactness.masks(exact=exact), self._reach
        return rows[: next((at for at, row in enumerate(rows) if not mask[row] & reach), len(rows))]

    def patience_ms(self, rows: Sequence[int]) -> int:
        """Return for how many milliseconds to wait at most for the promotion of `rows`: a multiple of its estimated
        time.
        """
        return max(LEAST_PATIENCE_MS, PATIENCE * sum(self.estimate_us(rows)) // 1000)

    def promote(self, row: int, priority: Priority, due_ns: int | None = None) -> asyncio.Future[bool]:
        """Copy the block at `row` to the mapped tier, as `promote_run` does."""
        return self.promote_run([row], priority, due_ns)[0]

    def promote_run(
        self, rows: Sequence[int], priority: Priority, due_ns: int | None = None
    ) -> list[asyncio.Future[bool]]:
        """Copy the blocks `rows` to the mapped tier. Return a future for each, which resolves to whether it has a copy
        there. If a promotion of it is under way, join that, and raise it to the higher `priority`. The caller stops
        waiting at `due_ns` (monotonic)."""
        residency, answers, fresh = self._residency, list[asyncio.Future[bool]](), list[_Promotion]()
        for row in rows:
            known = self.moves.find(residency.token(row))
            if known is not None:
                answers.append(self._join(known, priority, due_ns))
                continue
            link = self._link_of(row)
            if link is None or residency.state(row, residency.mapped):  # a put is filling it: its tier was out of reach
                answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
                answer.set_result(residency.has(row, residency.mapped))
                answers.append(answer)
                continue
            fresh.append(self._new(row, priority, link, due_ns))
            answers.append(fresh[-1].answer)
        for alike in _alike(fresh):
            is_first = priority is not Priority.PREFETCH and not self.moves.without_slot  # else others wait
            nbytes, tenant = alike[0].nbytes, alike[0].tenant
            self._begin(alike, self.room.allocate_run(len(alike), nbytes, tenant, evicting=is_first))
        return answers

    def _join(self, known: _Promotion, priority: Priority, due_ns: int | None) -> asyncio.Future[bool]:
        known.waiters += 1
        known.is_asked_again |= known.has_ended
        if priority < known.priority:
            self._hold_room(known, -1)
            known.raise_priority(priority, due_ns)
            self._hold_room(known, +1)
        elif due_ns is not None and priority == known.priority:
            known.raise_priority(priority, due_ns if known.due_ns is None else min(known.due_ns, due_ns))
        return known.answer

    def _new(self, row: int, priority: Priority, link: TierLink, due_ns: int | None = None) -> _Promotion:
        residency, tenant = self._residency, self._residency.tenant_of(row)
        promotion = _Promotion(residency.token(row), residency.slot_bytes(row), tenant, link, priority, due_ns)
        self._hold_room(promotion, +1)
        return promotion

    def _begin(self, promotions: Sequence[_Promotion], slots: Sequence[Slot]) -> None:
        """Begin to read into `slots`, and, beyond their number, into slots for which room is made first."""
        for promotion in promotions[len(slots) :]:
            if promotion.priority is Priority.PREFETCH:
                self._seeking.add(promotion.token)
        self.moves.begin(promotions, self._promote, slots)

    def give_up(self, token: int) -> None:
        """Note that one caller no longer waits for the promotion of the block that `token` names. When no caller is
        left and the read has not begun, it is cancelled.
        """
        promotion = self.moves.find(token)
        if promotion is not None:
            promotion.give_up()

    def prefetch(self, row: int) -> bool:
        """Queue a promotion of the block at `row` that no client waits for. Return False when waiting prefetches hold
        all the bytes they may, or fill the lane's queue."""
        link = self._link_of(row)
        if link is None or self._prefetch_room_bytes < self._residency.slot_bytes(row):
            return False
        self.promote(row, Priority.PREFETCH)
        return self.is_coming(row)

    def prefetch_if(self, row: int, pays: Callable[[int], bool], ended: Callable[[bool, bool], None]) -> bool:
        """Queue a prefetch of the block at `row`, if it is not being promoted: into a free slot, or into the slot of
        the policy's next victim if `pays(victim)` is True. At the end `ended(is_mapped, is_late)` is called; `is_late`
        is True when a request has asked for the block meanwhile. Return False, without a call of `ended`, when it did
        not begin."""
        residency, link, nbytes = self._residency, self._link_of(row), self._residency.slot_bytes(row)
        if link is None or self._prefetch_room_bytes < nbytes:
            return False
        if residency.token(row) in self.moves or self.is_coming(row):
            return False
        slot = self.room.allocate_now(nbytes, residency.tenant_of(row))
        if slot is None:
            victim = self.room.next_victim(nbytes, residency.tenant_of(row))
            if victim < 0 or not pays(victim):
                return False
        promotion = self._new(row, Priority.PREFETCH, link)
        self._begin([promotion], [] if slot is None else [slot])
        if promotion.is_refused:
            return False
        promotion.on_end = ended
        return True

    @property
    def prefetch_seeks_room(self) -> bool:
        """True while a block is being evicted to make room for a prefetch."""
        return bool(self._seeking)

    def is_coming(self, row: int) -> bool:
        """Return whether the block at `row` is in the mapped tier, or is being promoted or put."""
        known = self.moves.find(self._residency.token(row))
        is_promoted = known is not None and (not known.is_refused or known.is_asked_again)
        return is_promoted or bool(self._residency.state(row, self._residency.mapped))

    def seconds_of(self, row: int) -> tuple[int, float]:
        """Return the tier from which the block at `row` would be read, and the seconds that the read takes. Return (-1,
        0.0) when no tier that can be read has it.
        """
        link = self._link_of(row)
        if link is None:
            return -1, 0.0
        return link.source, link.lane.estimate_us(self._residency.slot(row, link.source).nbytes, queued=False) / 1e6

    def reads_from(self, position: int) -> bool:
        """Return whether blocks may be read from the tier at `position` now."""
        return self._links[position].is_open

    def breaker_of(self, position: int) -> TierBreaker | None:
        return self._links[position].breaker

    def answered(self, position: int, seconds: float) -> None:
        """Note that the tier at `position` answered a question after `seconds`, so a read from it takes at least that
        long.
        """
        self._links[position].lane.service.answered(seconds)

    def load_us(self, position: int, payload_bytes: int) -> float:
        """Return how many microseconds it takes to load a block of `payload_bytes` from the tier at `position`, without
        the time for blocks queued before it.
        """
        return self._links[position].lane.estimate_us(slot_bytes(payload_bytes), queued=False)

    def demanded_blocks(self, tenant: int | None) -> int:
        """Return how many blocks of `tenant` (None: of all tenants) were promoted because a request waited for them."""
        return self._demanded.total() if tenant is None else self._demanded[tenant]

    def estimate_us(self, rows: Sequence[int], readable: int = 0) -> list[int]:
        """Return a list with the microseconds that each of `rows` adds to the time until all are readable, if they were
        requested now in this order. The sum over the first rows is their load time. A row of -1 adds 0. `readable` is
        the set of tiers that the caller reads in place."""
        mask, readable = self._residency.rows.mask, TIER_SETS[readable].with_tier(self._residency.mapped)
        if -1 not in rows and 0 not in map(readable.__and__, set(map(mask.__getitem__, rows))):  # as a rule
            return [MAPPED_US] * len(rows)
        ahead_bytes: dict[int, int] = {}  # by tier: their links move side by side
        ahead_us: dict[int, int] = {}
        load_us = 0  # of the rows so far
        estimates = []
        for row in rows:
            if row < 0 or mask[row] & readable:
                estimates.append(MAPPED_US if row >= 0 else 0)
                continue
            source = self._residency.fastest(row)
            link = self._links.get(source)
            if link is None:  # it is being filled: it will be mapped
                estimates.append(MAPPED_US)
                continue
            nbytes = ahead_bytes.get(source, 0) + self._residency.slot(row, source).nbytes
            ahead_bytes[source] = nbytes
            if source not in ahead_us:  # the first block that has to be read waits for what hangs
                ahead_us[source] = _stall_us(link)
            until_us = round(link.lane.estimate_us(nbytes)) + ahead_us[source]
            estimates.append(max(0, until_us - load_us))
            load_us = max(load_us, until_us)
        return estimates

    def _link_of(self, row: int) -> TierLink | None:
        """Return the link of the fastest tier that has the block and can be read, of an exact copy if there is one."""
        for tiers in (self._exactness.exact_tiers(row), self._exactness.lossy_tiers(row)):
            for source, link in self._links.items():
                if source in MEMBERS[tiers] and link.is_open:
                    return link
        return None

    async def _promote(self, promotion: _Promotion) -> bool:
        is_mapped = False
        try:
            while True:
                outcome = await self.moves.copied(promotion)
                self._seeking.discard(promotion.token)
                row = self._residency.current(promotion.token)
                if isinstance(outcome, Unmoved):  # its tier was shed, perhaps, and a put brought the block again
                    is_mapped = row >= 0 and self._residency.has(row, self._residency.mapped)
                else:
                    self._judge(promotion, row, outcome)
                    is_mapped = outcome.ok
                if is_mapped or not self._begins_again(promotion, outcome):
                    break
        finally:
            self._seeking.discard(promotion.token)
            self._hold_room(promotion, -1)
            self.moves.end(promotion)
            if not promotion.answer.done():
                promotion.answer.set_result(is_mapped)
            if promotion.on_end is not None:
                promotion.on_end(is_mapped, promotion.priority is not Priority.PREFETCH)
        return is_mapped

    def _judge(self, promotion: _Promotion, row: int, outcome: Outcome) -> None:
        """Count a read that went well, and deal with the copy of one that did not."""
        source = promotion.link.source
        if outcome.ok:
            self._suspects.pop(promotion.token, None)
            self._counters.add("promoted_blocks")
            self._counters.add("promoted_bytes", promotion.nbytes)
            if promotion.priority is Priority.PREFETCH:
                self._counters.add("prefetched_blocks")
            else:
                self._demanded[promotion.tenant] += 1
            self._flows.tiers[source].promoted_blocks += 1
        elif row < 0 or not self._residency.has(row, source):
            return  # removed by force meanwhile
        elif outcome.kind is OutcomeKind.CORRUPT:
            self._damage.found(source, row, outcome.message)
        elif outcome.kind is OutcomeKind.MISSING:
            self._damage.lost(source, row, outcome.message)
        elif outcome.kind is OutcomeKind.UNREADABLE:
            self._damage.unreadable(source, row, outcome.message)
        elif outcome.kind is OutcomeKind.FAILED and promotion.link.is_open:
            self._unreadable(promotion, row, outcome)

    def _begins_again(self, promotion: _Promotion, outcome: Outcome | Unmoved) -> bool:
        """Say whether to begin again after a read that came to nothing: for a caller who asked when it had just ended,
        or with the copy of another tier, where one in memory was of no use."""
        is_asked, promotion.is_asked_again = promotion.is_asked_again and not promotion.answer.done(), False
        row = self._residency.current(promotion.token)
        link = self._link_of(row) if row >= 0 else None
        was_read = isinstance(outcome, Outcome) and outcome.kind is not OutcomeKind.CANCELLED
        is_elsewhere = was_read and promotion.link.breaker is None and link is not promotion.link
        if link is None or not (is_asked or is_elsewhere):
            return False
        promotion.link = link
        return True

    def _unreadable(self, promotion: _Promotion, row: int, outcome: Outcome) -> None:
        """Give up a copy that the medium refuses: in memory at once where another tier has one; else once may be
        chance, and a block that fails twice while others are read is given up."""
        source, key = promotion.link.source, self._residency.key(row).hex()
        if promotion.link.breaker is None and len(TIER_SETS[self._residency.tier_mask(row)]) > 1:
            self._damage.lost(source, row, outcome.message)
            return
        self._counters.add("read_failures")
        if promotion.token not in self._suspects:
            log.warning("block %s cannot be read: %s", key, outcome.message)
            self._suspects[promotion.token] = None
            if len(self._suspects) > MAX_SUSPECTS:
                self._suspects.popitem(last=False)
            return
        if self._residency.being_filled(row):
            return  # another read of it is under way
        del self._suspects[promotion.token]
        self._counters.add("given_up_blocks")
        log.error("block %s cannot be read (%s): given up, will be recomputed", key, outcome.message)
        self._damage.forget(row, Cause.READ_FAILED, outcome.message)

    def _follow_mode(self, _part: str) -> None:
        """Let the callers of a tier that is shed have a shorter prefix now, and queued reads give their slots back.
        Reads in flight still end by themselves."""
        for promotion in list(self.moves.under_way.values()):
            if promotion.link.is_open:
                continue
            if not promotion.answer.done():
                promotion.answer.set_result(False)
            promotion.cancel()

    def _hold_room(self, promotion: _Promotion, sign: int) -> None:
        if promotion.priority is Priority.PREFETCH:
            self._prefetch_room_bytes -= sign * promotion.nbytes


def _stall_us(link: TierLink) -> int:
    """Return the microseconds by which the oldest transfer is overdue; a reader has to expect them in addition."""
    stalled_us = link.breaker.stalled_us() if link.breaker is not None else 0
    return stalled_us if stalled_us > OVERDUE_US else 0
