"""Put: store the blocks of a chain, from a client's staging memory, from its slots, or from a message.

A block that is stored already gets the requested durability; one that another put is writing must be sent again; the
others get a slot and an unreadable row each, are copied and published. They begin in parts, so that the first are
copied while the next get their slots, and no other request waits long for the control thread. A client can write its
staging memory at any time, so nothing in it is trusted: the daemon copies first and checks the copy, takes every header
field but the token ids from the request, and refuses tokens that do not hash to the key.

The module owns which keys are being written, and the blocks that are not published yet. Invariants: one writer a key; a
key is free again when its put has ended, however it ended; begun blocks end, also when their client is gone, or are
taken back; a slot that is being copied into is neither published nor freed; a block is visible to the very next lookup
once it is answered.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from itertools import repeat
from typing import Any

from kvstore_proto.arena import pack_unsummed, slot_bytes
from kvstore_proto.identity import NO_PARENT
from kvstore_tiers.base import Outcome, Slot
from kvstored.lifecycle import Cause, CopyState
from kvstored.store.assembly import Store
from kvstored.store.blocks import CyclicChainError
from kvstored.store.operations.client import Client
from kvstored.store.operations.durability import DurabilityMode, Settling, answers_of, settle_present, with_terms
from kvstored.store.operations.intake import Intake, Part, is_new_throughout, leading_chain
from kvstored.store.operations.records import NOWHERE, Offer, PutAnswer, StoreStatus
from kvstored.store.transfer.room import NoSlot

log = logging.getLogger(__name__)
# A part's copies run while the next part begins and the one before is published. None is more than a millisecond
# of the control thread. (A smaller first one starts no copies earlier: their threads wake up to find the GIL held.)
PART_BYTES = 32 * 2**20
PART_BLOCKS, HASHES_A_PART = 64, 1024
ANNOUNCED_MAX = 1024  # of a piece of a chain; a policy takes up to a microsecond for each
_REFUSED = {
    NoSlot.NO_ROOM: (StoreStatus.NO_ROOM, Cause.NO_ROOM, "no_room_blocks"),
    NoSlot.OVER_QUOTA: (StoreStatus.OVER_QUOTA, Cause.OVER_QUOTA, "over_quota_blocks"),
    NoSlot.DECLINED: (StoreStatus.DECLINED, Cause.DECLINED, "declined_blocks"),
}


class Puts:
    """The operation that stores blocks for clients. Without a durable tier every block is volatile."""

    def __init__(self, store: Store) -> None:
        self._residency = store.residency
        self._host = store.host
        self._room = store.room
        self._writeback = store.writeback
        self._completions = store.completions
        self._clock = store.clock
        self._counters = store.counters
        self._needs_new_copy = store.promoter.needs_new_copy  # of a block that is stored, where it cannot be read now
        self._retention, self._boundaries = store.retention, store.boundaries
        self._feed, self._lossy = store.feed, store.lossy_copies
        self._running: dict[asyncio.Task[Settling], int] = {}  # with the tenant
        self.being_written: set[tuple[int, bytes]] = set()  # (tenant, key)

    async def finish(self) -> None:
        """Wait for all puts under way, also those whose clients have gone."""
        while self._running:
            await asyncio.wait(set(self._running))

    def under_way(self, tenant: int) -> set[asyncio.Task[Any]]:
        """Return the puts of `tenant` that have not ended, also those whose clients have gone."""
        return {storing for storing, owner in self._running.items() if owner == tenant}

    def store(self, client: Client, offer: Offer, mode: DurabilityMode) -> AsyncGenerator[PutAnswer, None]:
        """Start a put of the blocks in `offer`, and yield its answers: one when the blocks are published (readable),
        and a final one when it is known which are durable. The first part has begun on return, unless it evicts.

        A client that dies meanwhile must not leave half a block behind: a task stores the blocks to the end. If an
        error in the code ends the task, it takes back the begun blocks, and raises the error."""
        tenant = client.tenant_id
        before = offer.parents[0] if offer.keys else b""
        self._feed.put(tenant, leading_chain(offer), before, self._clock.monotonic_ns())
        statuses, terms = bytearray([StoreStatus.FAILED] * len(offer.keys)), self._retention.of_new(tenant, offer.terms)
        wanted, present = self._sort_out(client, offer, statuses)
        intake = Intake(client, mode, offer, wanted, statuses, terms)
        durability, settling = bytearray(len(offer.keys)), Settling()
        if present:
            self._counters.add("present_blocks", len(present))
            self._retention.stored_before([row for _, row in present], offer.terms)
            settling = settle_present(self._residency, self._writeback, present, mode, durability)
            settling = with_terms(self._retention, present, settling, durability)
        mistake: Exception | None = None
        try:
            self._announce(intake)
            if not client.beginning:
                intake.parts.append(part := Part(kept=self._retention.kept(intake.terms)))
                self._begin_blocks(intake, self._part_end(intake))
                self._start_copies(part)
        except Exception as error:
            mistake = error
        client.beginning += 1
        nbytes = sum(map(slot_bytes, intake.payload_bytes)) if terms.pin else 0
        let_go = self._retention.pins.hold(tenant, terms.pin, nbytes)
        storing = asyncio.create_task(self._store_rest(intake, mistake))
        self._running[storing] = tenant
        client.copying.add(storing)
        storing.add_done_callback(partial(self._ended, intake))
        storing.add_done_callback(lambda _: let_go())
        return answers_of(storing, intake.statuses, durability, settling, mode)

    def _sort_out(self, client: Client, offer: Offer, statuses: bytearray) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the positions of the blocks of `offer` to store, which are being written from now on, and the position
        and row of each that is stored already. The others get their status in `statuses`."""
        tenant, wanted, present = client.tenant_id, list[int](), list[tuple[int, int]]()
        rows, waiting = self._retention.find_each(tenant, offer.packed), frozenset[int]()
        if client.exact:
            rows, waiting = self._lossy.give_way(rows)
        being_written, make_way = self.being_written, self._retention.make_way if self._retention.has_expiries else None
        is_new = make_way is None and not waiting and is_new_throughout(offer, rows)
        if is_new and being_written.isdisjoint(named := set(zip(repeat(tenant), offer.keys))):
            being_written |= named
            wanted = list(range(len(rows)))
        for position, (key, row) in enumerate(zip(offer.keys, rows, strict=True) if not wanted else ()):
            if position in waiting:
                statuses[position] = StoreStatus.AGAIN
            elif row >= 0 and not self._needs_new_copy(row):
                statuses[position] = StoreStatus.PRESENT
                present.append((position, row))
            elif key == offer.parents[position] or key == NO_PARENT:
                continue
            elif (tenant, key) in being_written or (make_way is not None and not make_way(tenant, key)):
                statuses[position] = StoreStatus.AGAIN
            elif offer.offsets[position] == NOWHERE:
                statuses[position] = StoreStatus.WANTED
            else:
                being_written.add((tenant, key))
                wanted.append(position)
        return wanted, present

    def _ended(self, intake: Intake, storing: asyncio.Task[Settling]) -> None:
        client = intake.client
        self._running.pop(storing, None)
        self.being_written.difference_update(zip(repeat(client.tenant_id), intake.keys))
        if intake.offer.reserved is not None:
            intake.offer.reserved.end()
        client.copying.discard(storing)
        client.put_ended()

    async def _store_rest(self, intake: Intake, mistake: Exception | None) -> Settling:
        """Begin the blocks that have not begun, and publish all."""
        client, settling = intake.client, Settling()
        try:
            try:
                if mistake is not None:
                    raise mistake
                if intake.begun < len(intake):
                    async with client.turn:  # requests of one client begin in order: parents before children
                        while intake.begun < len(intake):
                            await asyncio.sleep(0)  # others on the loop have their turn
                            intake.parts.append(Part(kept=self._retention.kept(intake.terms)))
                            await self._begin_part(intake)
            finally:
                client.beginning -= 1
            for part in intake.parts:
                outcomes = await part.copied if part.copied is not None else ()
                settling |= self._publish(intake, part, outcomes)
        except Exception:
            await self._take_back(intake.parts)
            raise
        return settling

    # Slots, rows and copies

    def _announce(self, intake: Intake) -> None:
        """Notify the policy of the blocks that will be stored, a piece of a chain at a time."""
        tenant = intake.client.tenant_id
        for run in intake.chains():
            if self._refusal(intake, run.start) is None:
                parent = self._residency.find_any(tenant, intake.parents[run.start])
                self._room.announce(tenant, parent, intake.keys[run.start : min(run.stop, run.start + ANNOUNCED_MAX)])

    def _part_end(self, intake: Intake) -> int:
        """Return where the next part ends: after work for up to a millisecond of the control thread."""
        begun, fingerprint = intake.begun, intake.client.fingerprint
        if begun == len(intake):
            return begun
        hashes = fingerprint.block_tokens // fingerprint.engine_block_tokens
        most = min(PART_BLOCKS, HASHES_A_PART // hashes, PART_BYTES // intake.payload_bytes[begun])
        return min(begun + max(most, 1), len(intake))

    def _begin_blocks(self, intake: Intake, end: int, slot: Slot | None = None) -> None:
        """Give blocks up to `end` a slot and a row each, until one needs room to be made; `slot` is for the first."""
        residency, client, tenant, part = self._residency, intake.client, intake.client.tenant_id, intake.parts[-1]
        index, reserved = residency.tenants[tenant], intake.offer.reserved
        kept = [slot] if slot is not None else []
        try:
            while intake.begun < end:
                at = intake.begun
                refusal = self._refusal(intake, at)
                if refusal is not None:
                    intake.statuses[intake.positions[at]] = refusal
                    intake.begun += 1
                    continue
                key, above, nbytes = intake.keys[at], intake.parents[at], slot_bytes(intake.payload_bytes[at])
                parent = residency.find_any(tenant, above)
                is_alone = (parent < 0 and above != NO_PARENT) or residency.find_any(tenant, key) >= 0
                if kept and kept[0].nbytes != nbytes:  # kept from a block that was refused
                    self._host.free(kept.pop())
                # A slot counts against the tenant's maximum once it is a block's: before, none may be taken beside it.
                run = range(at, at + 1) if is_alone or kept else intake.run_from(index, end)
                if reserved is not None:
                    kept = [reserved.take(intake.offsets[each]) for each in run]
                elif not kept:
                    kept = self._room.allocate_run(len(run), nbytes, tenant)
                    run = run[: len(kept)]
                    if not run:
                        break
                intake.begun += len(run)
                try:
                    depth, tokens = self._enter(intake, run, parent, kept)
                except CyclicChainError as error:
                    log.warning("client %s of %s: %s", client.client_name, client.tenant.name, error)
                    if reserved is not None:  # that slot has this block's payload
                        self._host.free(kept.pop())
                    continue
                part.begun += run  # from here on they are taken back as blocks
                part.tokens += tokens
                slots, kept = kept, []
                self._add(intake, run, slots, depth, part)
        finally:
            for left in kept:
                self._host.free(left)

    def _enter(self, intake: Intake, run: range, parent: int, slots: list[Slot]) -> tuple[int, list[int]]:
        """Give the blocks of `run`, which continue the row `parent`, a row each and the `slots`. Return the depth of
        the first, and the rows' tokens. Raises CyclicChainError for a block that would be its own ancestor; it has no
        row and slot then."""
        residency, client, first, group = self._residency, intake.client, run.start, intake.offer.group
        tenant, key, payload_bytes = client.tenant_id, intake.keys[first], intake.payload_bytes[first]
        now_ns, depth = self._clock.monotonic_ns(), residency.depth(parent) + 1 if parent >= 0 else 0
        if len(run) == 1:
            row = residency.find(tenant, key)  # stored, but out of reach
            if row < 0:
                row = residency.insert(
                    tenant, key, intake.parents[first], fingerprint_id=client.fingerprint_id, group=group,
                    depth=depth, payload_bytes=payload_bytes, now_ns=now_ns,
                )  # fmt: skip
            residency.attach(row, residency.mapped, slots[0], now_ns, filling=True)
            rows = [row]
        else:
            rows = residency.store_run(
                tenant, intake.keys[first : run.stop], parent, residency.mapped, slots,
                fingerprint_id=client.fingerprint_id, group=group, payload_bytes=payload_bytes,
                now_ns=now_ns, filling=True,
            )  # fmt: skip
        return depth, residency.rows.tokens_of(rows)

    def _add(self, intake: Intake, run: range, slots: list[Slot], depth: int, part: Part) -> None:
        """Handle the blocks of `run`, which have a slot and a row each: their copies are among the part's, unless the
        tokens of one do not match its key. The first is at `depth`.
        """
        client, offer, first, end = intake.client, intake.offer, run.start, run.stop
        offsets, payload_bytes = intake.offsets[first:end], intake.payload_bytes[first]
        tokens = offer.staged.tokens_of(offsets)
        if false := intake.false_blocks(run, tokens):
            part.false.update(false)
            for at in run:
                if at not in part.false:
                    self._add(intake, range(at, at + 1), [slots[at - first]], depth + at - first, part)
            return
        part.copying += run
        addresses, owner = offer.staged.payloads_at(offsets)
        pack_unsummed(
            part.images.add(slots, addresses, payload_bytes, owner), keys=intake.keys[first:end],
            parents=intake.parents[first:end], extras=intake.extras[first:end], fingerprint=client.fingerprint_digest,
            tenant=client.tenant.digest, group=offer.group, payload_bytes=payload_bytes, tokens=tokens, depth=depth,
            generations=[generation for _, _, _, generation in slots], created_ns=self._clock.wall_ns(), kept=part.kept,
        )  # fmt: skip

    def _start_copies(self, part: Part) -> None:
        if len(part.images):
            part.copied = self._completions.outcome_of(partial(self._host.write_many, part.images))

    def _refusal(self, intake: Intake, at: int) -> StoreStatus | None:
        """Return why the block `at` is not stored, or None if it is. An orphan could not be reached: under full
        attention, without the block before it. That block may have been evicted since the client saw it, or found no
        room itself.
        """
        residency, client, above = self._residency, intake.client, intake.parents[at]
        row = residency.find(client.tenant_id, intake.keys[at])
        if row >= 0 and not self._needs_new_copy(row):
            return StoreStatus.PRESENT
        if above == NO_PARENT or not client.needs_parents(intake.offer.group):
            return None
        parent = residency.find_any(client.tenant_id, above)
        if parent >= 0 and (residency.tier_mask(parent) or residency.being_filled(parent)):
            return None
        return StoreStatus.ORPHANED

    # Room

    async def _begin_part(self, intake: Intake) -> None:
        """Begin one more part, making room if there is none."""
        end, tenant = self._part_end(intake), intake.client.tenant_id
        self._begin_blocks(intake, end)
        while (at := intake.begun) < end:  # no slot is free for this one
            nbytes, run = slot_bytes(intake.payload_bytes[at]), intake.run_from(self._residency.tenants[tenant], end)
            parent = self._residency.find_any(tenant, intake.parents[at])
            newcomers: list[tuple[bytes, int]] = []
            # No policy may decline a block that goes to NVMe: it is written from its DRAM slot. A priority precedes it.
            goes_below = self._writeback is not None and intake.mode != DurabilityMode.NONE
            if not (goes_below or intake.terms.pin or (intake.terms.priority or 0) > 0):
                depth = self._residency.depth(parent) + 1 if parent >= 0 else 0
                newcomers = [(intake.keys[each], depth + each - at) for each in run]
            if self._room.make_room(len(run), nbytes, tenant, parent=parent, newcomers=newcomers):
                self._begin_blocks(intake, end)
                if intake.begun > at:
                    continue
            found = await self._room.allocate_for(next(iter(newcomers), None), nbytes, tenant, parent=parent)
            if isinstance(found, NoSlot):
                self._refuse(intake, found)
            self._begin_blocks(intake, end, found if isinstance(found, Slot) else None)
        self._start_copies(intake.parts[-1])

    def _refuse(self, intake: Intake, why: NoSlot) -> None:
        """Give no slot to the next block, nor to the blocks that continue it: they could not be reached without it, or
        are worth no more. A later miss of any of them gives this reason.
        """
        status, cause, counter = _REFUSED[why]
        takes_others = why is NoSlot.DECLINED or intake.client.needs_parents(intake.offer.group)
        first, now_ns, before = intake.begun, self._clock.monotonic_ns(), intake.parents[intake.begun]
        for at in range(first, len(intake)):
            if intake.parents[at] != before or not (at == first or takes_others):
                return
            before = intake.keys[at]
            intake.statuses[intake.positions[at]] = status
            self._residency.record_refusal(intake.client.tenant_id, before, cause, now_ns)
            self._counters.add(counter)
            intake.begun += 1

    # Publication

    def _publish(self, intake: Intake, part: Part, outcomes: Sequence[Outcome]) -> Settling:
        """Make whole blocks readable, in chain order, once their copies have ended, and begin to write through the ones
        that need it. Write-through pins its blocks, so it begins in this turn of the loop: a turn later they may
        have been evicted and their rows be other blocks'.
        """
        residency, now_ns = self._residency, self._clock.monotonic_ns()
        rows = residency.rows.still_there(part.tokens)
        assert len(rows) == len(part.begun), "a block went away while it was being filled"
        lost = {at: outcome.message for at, outcome in zip(part.copying, outcomes, strict=True) if not outcome.ok}
        stored = part.begun
        if lost or part.false:
            rows = self._without_lost(intake, part, rows, lost)
            stored = [at for at in part.begun if at not in lost and at not in part.false]
        published = dict(zip([intake.positions[at] for at in stored], rows, strict=True))  # rows by position
        for position in published:
            intake.statuses[position] = StoreStatus.STORED
        for run in residency.rows.chains_of(published.values()):
            residency.publish_run(run, residency.mapped, now_ns)
        if not intake.client.exact:
            for row in published.values():
                self._lossy.accept(row)
        if published:
            self._counters.add("stored_blocks", len(published))
            self._counters.add("stored_bytes", sum([intake.payload_bytes[at] for at in stored]))
            self._retention.stored(rows, intake.terms)
            self._boundaries.stored(rows, intake.offer.before)
            residency.touch_run(rows, now_ns, intake.client.device_tiers)
        writeback, at_once = self._writeback, intake.mode == DurabilityMode.ALWAYS
        if writeback is None or intake.mode == DurabilityMode.NONE:
            return {}
        wanted = {at: row for at, row in published.items() if at_once or writeback.gate.admits(row)}
        settling = dict(zip(wanted, writeback.write_through_run(list(wanted.values()), at_once=at_once), strict=True))
        return with_terms(self._retention, published.items(), settling)

    def _without_lost(self, intake: Intake, part: Part, rows: Sequence[int], lost: dict[int, str]) -> list[int]:
        """Take the part's blocks out that are false, or `lost` with a reason in their copy; return the rows of the
        others."""
        left = []
        for at, row in zip(part.begun, rows, strict=True):
            if at in lost or at in part.false:
                self._host.free(self._residency.detach(row, self._residency.mapped))
            else:
                left.append(row)
            if at in part.false:
                intake.statuses[intake.positions[at]] = StoreStatus.KEY_MISMATCH
            elif at in lost:
                log.warning("a block could not be stored: %s", lost[at])
        return left

    async def _take_back(self, parts: Sequence[Part]) -> None:
        """Take back blocks that are not published, as if they had never begun, once nothing copies into them."""
        for part in parts:
            if part.copied is not None:
                await part.copied
        for row in self._residency.rows.still_there([token for part in parts for token in part.tokens]):
            if self._residency.state(row, self._residency.mapped) is CopyState.FILLING:
                self._host.free(self._residency.detach(row, self._residency.mapped))
