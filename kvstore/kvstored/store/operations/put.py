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
from typing import Any

from kvstore_proto.arena import pack_unsummed
from kvstore_proto.identity import NO_PARENT
from kvstore_tiers.base import Outcome, OutcomeKind, Slot
from kvstored.lifecycle import Cause, CopyState
from kvstored.store.assembly import Store
from kvstored.store.blocks import CyclicChainError
from kvstored.store.operations.client import Client
from kvstored.store.operations.durability import DurabilityMode, Settling, answers_of, settle_present, with_terms
from kvstored.store.operations.intake import Intake, Part, leading_chain
from kvstored.store.operations.records import NOWHERE, Offer, PutAnswer, StagedBlock, StoreStatus
from kvstored.store.transfer.room import NoSlot

log = logging.getLogger(__name__)
# A part's copies run while the next part begins and the one before is published. None is more than half a millisecond
# of the control thread. (A smaller first one starts no copies earlier: their threads wake up to find the GIL held.)
PART_BYTES = 32 * 2**20
PART_BLOCKS, HASHES_A_PART = 32, 1024
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
        and a final one when it is known which are durable. The first part has begun when this returns, if it needs no
        eviction.

        A client that dies meanwhile must not leave half a block behind: a task stores the blocks to the end. If an
        error in the code ends the task, it takes back the begun blocks, and raises the error."""
        tenant = client.tenant_id
        self._feed.put(
            tenant, leading_chain(offer), offer.parents[0] if offer.keys else b"", self._clock.monotonic_ns()
        )
        statuses, terms = bytearray([StoreStatus.FAILED] * len(offer.keys)), self._retention.of_new(tenant, offer.terms)
        intake = Intake(client, mode, statuses, terms, offer.before)
        present: list[tuple[int, int]] = []
        rows, waiting = self._retention.find_each(tenant, offer.packed), frozenset[int]()
        if client.exact:
            rows, waiting = self._lossy.give_way(rows)
        being_written, make_way = self.being_written, self._retention.make_way if self._retention.has_expiries else None
        for position, (key, row) in enumerate(zip(offer.keys, rows, strict=True)):
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
                intake.blocks.append(offer.block(position))
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
        let_go = self._retention.pins.hold(tenant, terms.pin, sum(block.nbytes for block in intake.blocks))
        storing = asyncio.create_task(self._store_rest(intake, mistake))
        self._running[storing] = tenant
        client.copying.add(storing)
        storing.add_done_callback(partial(self._ended, intake, offer))
        storing.add_done_callback(lambda _: let_go())
        return answers_of(storing, intake.statuses, durability, settling, mode)

    def _ended(self, intake: Intake, offer: Offer, storing: asyncio.Task[Settling]) -> None:
        client = intake.client
        self._running.pop(storing, None)
        self.being_written.difference_update((client.tenant_id, block.key) for block in intake.blocks)
        if offer.reserved is not None:
            offer.reserved.end()
        client.copying.discard(storing)
        client.put_ended()

    async def _store_rest(self, intake: Intake, mistake: Exception | None) -> Settling:
        """Begin the blocks that have not begun, and publish all."""
        client, settling = intake.client, Settling()
        try:
            try:
                if mistake is not None:
                    raise mistake
                if intake.begun < len(intake.blocks):
                    async with client.turn:  # requests of one client begin in order: parents before children
                        while intake.begun < len(intake.blocks):
                            await asyncio.sleep(0)  # others on the loop have their turn
                            intake.parts.append(Part(kept=self._retention.kept(intake.terms)))
                            await self._begin_part(intake)
            finally:
                client.beginning -= 1
            for part in intake.parts:
                if part.copied is not None:
                    for block, outcome in zip(part.copying, await part.copied, strict=True):
                        block.outcome = outcome
                settling |= self._publish(intake, part)
        except Exception:
            await self._take_back(intake.parts)
            raise
        return settling

    # Slots, rows and copies

    def _announce(self, intake: Intake) -> None:
        """Notify the policy of the blocks that will be stored, a piece of a chain at a time."""
        first, blocks, tenant = 0, intake.blocks, intake.client.tenant_id
        for at in range(1, len(blocks) + 1):
            if at == len(blocks) or blocks[at].parent != blocks[at - 1].key:
                if self._refusal(intake.client, blocks[first]) is None:
                    parent = self._residency.find_any(tenant, blocks[first].parent)
                    coming = blocks[first : min(at, first + ANNOUNCED_MAX)]
                    self._room.announce(tenant, parent, [block.key for block in coming])
                first = at

    def _part_end(self, intake: Intake) -> int:
        """Return where the next part ends: after work for half a millisecond of the control thread."""
        begun, blocks, fingerprint = intake.begun, intake.blocks, intake.client.fingerprint
        if begun == len(blocks):
            return begun
        hashes = fingerprint.block_tokens // fingerprint.engine_block_tokens
        most = min(PART_BLOCKS, HASHES_A_PART // hashes, PART_BYTES // blocks[begun].payload_bytes)
        return min(begun + max(most, 1), len(blocks))

    def _begin_blocks(self, intake: Intake, end: int, slot: Slot | None = None) -> None:
        """Give blocks up to `end` a slot and a row each, until one needs room to be made; `slot` is for the first."""
        residency, client, tenant = self._residency, intake.client, intake.client.tenant_id
        index = residency.tenants[tenant]
        kept = [slot] if slot is not None else []
        try:
            while intake.begun < end:
                block = intake.blocks[intake.begun]
                refusal = self._refusal(client, block)
                if refusal is not None:
                    intake.statuses[block.position] = refusal
                    intake.begun += 1
                    continue
                parent = residency.find_any(tenant, block.parent)
                is_alone = (parent < 0 and block.parent != NO_PARENT) or residency.find_any(tenant, block.key) >= 0
                if kept and kept[0].nbytes != block.nbytes:  # kept from a block that was refused
                    self._host.free(kept.pop())
                # A slot counts against the tenant's maximum once it is a block's: before, none may be taken beside it.
                run = [block] if is_alone or kept else intake.run_from(index, end)
                if block.reserved is not None:
                    kept = [block.reserved.take(each.offset) for each in run]
                elif not kept:
                    kept = self._room.allocate_run(len(run), block.nbytes, tenant)
                    run = run[: len(kept)]
                    if not run:
                        break
                intake.begun += len(run)
                try:
                    depth = self._enter(client, run, parent, kept)
                except CyclicChainError as error:
                    log.warning("client %s of %s: %s", client.client_name, client.tenant.name, error)
                    if block.reserved is not None:  # that slot has this block's payload
                        self._host.free(kept.pop())
                    continue
                intake.parts[-1].begun += run  # from here on they are taken back as blocks
                slots, kept = kept, []
                self._add(client, run, slots, depth, intake.parts[-1])
        finally:
            for left in kept:
                self._host.free(left)

    def _enter(self, client: Client, run: list[StagedBlock], parent: int, slots: list[Slot]) -> int:
        """Give the blocks of `run`, which continue the row `parent`, a row each and the `slots`. Return the depth of
        the first. Raises CyclicChainError for a block that would be its own ancestor; it has no row and slot then."""
        residency, tenant, first = self._residency, client.tenant_id, run[0]
        now_ns, depth = self._clock.monotonic_ns(), residency.depth(parent) + 1 if parent >= 0 else 0
        if len(run) == 1:
            row = residency.find(tenant, first.key)  # stored, but out of reach
            if row < 0:
                row = residency.insert(
                    tenant, first.key, first.parent, fingerprint_id=client.fingerprint_id, group=first.group,
                    depth=depth, payload_bytes=first.payload_bytes, now_ns=now_ns,
                )  # fmt: skip
            residency.attach(row, residency.mapped, slots[0], now_ns, filling=True)
            rows = [row]
        else:
            rows = residency.store_run(
                tenant, [block.key for block in run], parent, residency.mapped, slots,
                fingerprint_id=client.fingerprint_id, group=first.group, payload_bytes=first.payload_bytes,
                now_ns=now_ns, filling=True,
            )  # fmt: skip
        for block, token in zip(run, residency.rows.tokens_of(rows), strict=True):
            block.token = token
        return depth

    def _add(self, client: Client, run: list[StagedBlock], slots: list[Slot], depth: int, part: Part) -> None:
        """Handle blocks that have a slot and a row each: their copies are among the part's, unless the tokens of one do
        not match its key.
        """
        fingerprint, tenant, created_ns = client.fingerprint_digest, client.tenant.digest, self._clock.wall_ns()
        for block, slot in zip(run, slots, strict=True):
            tokens = block.staged.tokens_at(block.offset)
            if block.is_made_of(tokens, client):
                part.copying.append(block)
                at = part.images.add(slot, block.staged.payload_at(block.offset, block.payload_bytes))
                pack_unsummed(
                    part.images.headers, at, block.key, block.parent, block.extra, fingerprint, tenant, block.group,
                    block.payload_bytes, tokens, depth, slot.generation, created_ns, part.kept,
                )  # fmt: skip
            else:
                block.outcome = Outcome(OutcomeKind.CORRUPT, message="tokens do not hash to the key")
            depth += 1

    def _start_copies(self, part: Part) -> None:
        if len(part.images):
            part.copied = self._completions.outcome_of(partial(self._host.write_many, part.images))

    def _refusal(self, client: Client, block: StagedBlock) -> StoreStatus | None:
        """Return why the block is not stored, or None if it is. An orphan could not be reached: under full attention,
        without the block before it. That block may have been evicted since the client saw it, or found no room
        itself.
        """
        residency = self._residency
        row = residency.find(client.tenant_id, block.key)
        if row >= 0 and not self._needs_new_copy(row):
            return StoreStatus.PRESENT
        if block.parent == NO_PARENT or not client.needs_parents(block.group):
            return None
        parent = residency.find_any(client.tenant_id, block.parent)
        if parent >= 0 and (residency.tier_mask(parent) or residency.being_filled(parent)):
            return None
        return StoreStatus.ORPHANED

    # Room

    async def _begin_part(self, intake: Intake) -> None:
        """Begin one more part, making room if there is none."""
        end, tenant, part = self._part_end(intake), intake.client.tenant_id, intake.parts[-1]
        while intake.begun < end:
            block, slot = intake.blocks[intake.begun], None
            if block.reserved is None and self._refusal(intake.client, block) is None:
                slot = self._room.allocate_now(block.nbytes, tenant)
                if slot is None:
                    parent = self._residency.find_any(tenant, block.parent)
                    run = intake.run_from(self._residency.tenants[tenant], end)
                    newcomers: list[tuple[bytes, int]] = []
                    # No policy may decline a block that goes to NVMe: it is written from its DRAM slot.
                    if self._writeback is None or intake.mode == DurabilityMode.NONE:
                        depth = self._residency.depth(parent) + 1 if parent >= 0 else 0
                        newcomers = [(each.key, depth + at) for at, each in enumerate(run)]
                    if self._room.make_room(len(run), block.nbytes, tenant, parent=parent, newcomers=newcomers):
                        self._begin_blocks(intake, end)
                        continue
                    newcomer = newcomers[0] if newcomers else None
                    found = await self._room.allocate_for(newcomer, block.nbytes, tenant, parent=parent)
                    if isinstance(found, NoSlot):
                        self._refuse(intake, found)
                        continue
                    slot = found
            self._begin_blocks(intake, end, slot)
        self._start_copies(part)

    def _refuse(self, intake: Intake, why: NoSlot) -> None:
        """Give no slot to the next block, nor to the blocks that continue it: they could not be reached without it, or
        are worth no more. A later miss of any of them gives this reason.
        """
        status, cause, counter = _REFUSED[why]
        first = intake.blocks[intake.begun]
        takes_others = why is NoSlot.DECLINED or intake.client.needs_parents(first.group)
        now_ns, key = self._clock.monotonic_ns(), first.parent
        for block in intake.blocks[intake.begun :]:
            if block.parent != key or not (block is first or takes_others):
                return
            intake.statuses[block.position] = status
            self._residency.record_refusal(intake.client.tenant_id, block.key, cause, now_ns)
            self._counters.add(counter)
            intake.begun += 1
            key = block.key

    # Publication

    def _publish(self, intake: Intake, part: Part) -> Settling:
        """Make whole blocks readable, in chain order, once their copies have ended, and begin to write through the ones
        that need it. Write-through pins its blocks, so it begins in this turn of the loop: a turn later they may
        have been evicted and their rows be other blocks'.
        """
        residency, now_ns = self._residency, self._clock.monotonic_ns()
        published, stored_bytes = dict[int, int](), 0  # rows by position
        for block in part.begun:
            row, outcome = residency.current(block.token), block.outcome
            assert row >= 0 and outcome is not None, "a block went away while it was being filled"
            if not outcome.ok:
                self._host.free(residency.detach(row, residency.mapped))
                if outcome.kind is OutcomeKind.CORRUPT:
                    intake.statuses[block.position] = StoreStatus.KEY_MISMATCH
                else:
                    log.warning("a block could not be stored: %s", outcome.message)
                continue
            intake.statuses[block.position] = StoreStatus.STORED
            published[block.position] = row
            stored_bytes += block.payload_bytes
        for run in residency.rows.chains_of(published.values()):
            residency.publish_run(run, residency.mapped, now_ns)
        if not intake.client.exact:
            for row in published.values():
                self._lossy.accept(row)
        if published:
            self._counters.add("stored_blocks", len(published))
            self._counters.add("stored_bytes", stored_bytes)
            self._retention.stored(list(published.values()), intake.terms)
            self._boundaries.stored(list(published.values()), intake.before)
            residency.touch_run(list(published.values()), now_ns, intake.client.device_tiers)
        writeback, at_once = self._writeback, intake.mode == DurabilityMode.ALWAYS
        if writeback is None or intake.mode == DurabilityMode.NONE:
            return {}
        wanted = {at: row for at, row in published.items() if at_once or writeback.gate.admits(row)}
        settling = dict(zip(wanted, writeback.write_through_run(list(wanted.values()), at_once=at_once), strict=True))
        return with_terms(self._retention, published.items(), settling)

    async def _take_back(self, parts: Sequence[Part]) -> None:
        """Take back blocks that are not published, as if they had never begun, once nothing copies into them."""
        for part in parts:
            if part.copied is not None:
                await part.copied
        for block in (block for part in parts for block in part.begun):
            row = self._residency.current(block.token)
            if row >= 0 and self._residency.state(row, self._residency.mapped) is CopyState.FILLING:
                self._host.free(self._residency.detach(row, self._residency.mapped))
