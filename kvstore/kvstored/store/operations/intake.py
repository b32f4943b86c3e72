"""Intake: from the bytes of a put to blocks that everybody finds.

Owns which blocks begin when, with a slot and an unreadable row each; how they become readable is the filler's.
Never decides which blocks may come: `Put` does, and brings no key twice at a time. Invariants: a block is visible to
the very next lookup once it is answered; what has begun ends, also when its client is gone, or else is taken back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from kvstore_proto.identity import NO_PARENT
from kvstore_tiers.base import Slot
from kvstore_tiers.host import HostTier
from kvstored.clock import Clock
from kvstored.completions import CompletionQueue
from kvstored.store.blocks import CyclicChainError, Residency
from kvstored.store.operations.client import Client
from kvstored.store.operations.filling import Filler, Filling, Part
from kvstored.store.operations.offer import DurabilityMode, Settling, StagedBlock, StoreStatus
from kvstored.store.tiering import MAPPED
from kvstored.store.transfer.room import BYPASSED, Room
from kvstored.store.transfer.writeback import WriteBack
from kvstored.telemetry import Counters

log = logging.getLogger(__name__)
# A part's copies run while the next part begins and the one before is published. None is more than half a millisecond
# of the control thread. (A smaller first one starts no copies earlier: their threads wake up to find the GIL held.)
PART_BYTES = 32 * 2**20
PART_BLOCKS, HASHES_A_PART = 32, 1024
ANNOUNCED_MAX = 1024  # of a piece of a chain; a policy takes up to a microsecond for each
Taken = Sequence[tuple[int, StagedBlock]]
"""Blocks to take in, each with its place in the request and in the answer."""


class Intake:
    """See the module. `writeback` is None without a durable tier: everything is volatile then. `may_come_again(row)`:
    whether a block that is stored should get a new copy, since nobody can have it now."""

    def __init__(
        self,
        residency: Residency,
        host: HostTier,
        room: Room,
        writeback: WriteBack | None,
        completions: CompletionQueue,
        clock: Clock,
        counters: Counters,
        may_come_again: Callable[[int], bool] = lambda row: False,
    ) -> None:
        self._residency = residency
        self._host = host
        self._room = room
        self._writeback = writeback
        self._filler = Filler(residency, host, completions, clock, counters)
        self._clock = clock
        self._counters = counters
        self._running: set[asyncio.Task[Settling]] = set()
        self.may_come_again = may_come_again

    async def finish(self) -> None:
        """Wait for what is under way, whether or not the clients are still there."""
        while self._running:
            await asyncio.wait(set(self._running))

    def take_in(
        self,
        client: Client,
        taken: Taken,
        statuses: bytearray,
        mode: DurabilityMode,
        end: Callable[[asyncio.Task[Settling]], None],
    ) -> asyncio.Task[Settling]:
        """Slots, copies, publication, write-through; what became of each block is in `statuses` at the end of the task,
        which calls `end` then, whatever happened.

        In parts, so that the first are copied while the next get their slots, and nobody on the loop waits long. The
        first part begins at once where it needs no eviction. A client that dies meanwhile must not leave half a block
        behind: the task runs to its end. Nor must a mistake of ours: the task takes back what has begun, and raises it.
        """
        parts: list[Part] = []
        began = 0
        mistake: Exception | None = None
        try:
            self._announce(client, taken)
            if not client.beginning:
                parts.append(Part())
                began = self._begin_blocks(client, taken, 0, self._part_end(client, taken, 0), statuses, parts[0])
                self._filler.start_copies(client, parts[0])
        except Exception as error:
            mistake = error
        client.beginning += 1
        task = asyncio.create_task(self._take_all(client, taken, began, statuses, mode, parts, mistake))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(end)
        return task

    async def _take_all(
        self,
        client: Client,
        taken: Taken,
        began: int,
        statuses: bytearray,
        mode: DurabilityMode,
        parts: list[Part],
        mistake: Exception | None,
    ) -> Settling:
        settling: Settling = {}
        try:
            try:
                if mistake is not None:
                    raise mistake
                await self._begin_rest(client, taken, began, statuses, mode, parts)
            finally:
                client.beginning -= 1
            for part in parts:
                await part.copies_ended()
                # Write-through pins its blocks, so it begins in the same turn of the loop as publication: a turn later
                # they may have been evicted and their rows be other blocks'.
                settling |= self._settling(self._filler.publish(part, statuses), mode)
        except Exception:
            await self._filler.undo(parts)
            raise
        return settling

    async def _begin_rest(
        self, client: Client, taken: Taken, began: int, statuses: bytearray, mode: DurabilityMode, parts: list[Part]
    ) -> None:
        if began == len(taken):
            return
        async with client.turn:  # requests of one client begin in order: parents before children
            while began < len(taken):
                await asyncio.sleep(0)  # others on the loop have their turn
                parts.append(Part())
                began = await self._begin_part(client, taken, began, statuses, mode, parts[-1])
                self._filler.start_copies(client, parts[-1])

    def _part_end(self, client: Client, taken: Taken, began: int) -> int:
        """Where the part ends that begins at `began`: after work for half a millisecond of the control thread."""
        if began == len(taken):
            return began
        hashes = client.fingerprint.block_tokens // client.fingerprint.engine_block_tokens
        most = min(PART_BLOCKS, HASHES_A_PART // hashes, PART_BYTES // taken[began][1].payload_bytes)
        return min(began + max(most, 1), len(taken))

    async def _begin_part(
        self, client: Client, taken: Taken, began: int, statuses: bytearray, mode: DurabilityMode, part: Part
    ) -> int:
        """Begin one more part, making room where there is none; how many blocks have begun then."""
        end, tenant = self._part_end(client, taken, began), client.tenant_id
        while began < end:
            position, block = taken[began]
            slot = None
            if block.reserved is None and self._refusal(client, block) is None:
                slot = self._room.allocate_now(block.nbytes, tenant)
                if slot is None:
                    parent = self._residency.find_any(tenant, block.parent)
                    newcomer = self._newcomer(block, parent, mode)
                    found = await self._room.allocate_for(newcomer, block.nbytes, tenant, parent=parent)
                    if found is BYPASSED:
                        began = self._record_bypass(tenant, taken, began, statuses)
                        continue
                    slot = found
                if slot is None:
                    statuses[position] = StoreStatus.THROTTLED
                    self._counters.add("throttled_blocks")
                    began += 1
                    continue
            began = self._begin_blocks(client, taken, began, end, statuses, part, slot)
        return began

    def _announce(self, client: Client, taken: Taken) -> None:
        """Tell the policy which blocks are coming, a piece of a chain at a time."""
        first = 0
        for at in range(1, len(taken) + 1):
            if at == len(taken) or taken[at][1].parent != taken[at - 1][1].key:
                if self._refusal(client, taken[first][1]) is None:
                    parent = self._residency.find_any(client.tenant_id, taken[first][1].parent)
                    coming = taken[first : min(at, first + ANNOUNCED_MAX)]
                    self._room.announce(client.tenant_id, parent, [block.key for _, block in coming])
                first = at

    def _newcomer(self, block: StagedBlock, parent: int, mode: DurabilityMode) -> tuple[bytes, int] | None:
        """What the policy may decline: nothing that is to be written to NVMe, which takes it from its place in DRAM."""
        if self._writeback is not None and mode != DurabilityMode.NONE:
            return None
        return block.key, self._residency.depth(parent) + 1 if parent >= 0 else 0

    def _record_bypass(self, tenant: int, taken: Taken, began: int, statuses: bytearray) -> int:
        """The policy would rather keep what is here than block `began`: nor do those come that continue it."""
        now_ns = self._clock.monotonic_ns()
        while True:
            position, block = taken[began]
            statuses[position] = StoreStatus.THROTTLED
            self._residency.record_bypass(tenant, block.key, now_ns)
            self._counters.add("bypassed_blocks")
            began += 1
            if began == len(taken) or taken[began][1].parent != block.key:
                return began

    def _begin_blocks(
        self,
        client: Client,
        taken: Taken,
        began: int,
        end: int,
        statuses: bytearray,
        part: Part,
        slot: Slot | None = None,
    ) -> int:
        """Give blocks `began` to `end` a slot and an unreadable row each; `slot` is for the first of them. How many
        have begun then: fewer than `end` where one needs room to be made."""
        residency, room, tenant = self._residency, self._room, client.tenant_id
        now_ns = self._clock.monotonic_ns()
        key, depth = NO_PARENT, 0  # of the block that began last
        try:
            for position, block in taken[began:end]:
                is_next = block.parent == key != NO_PARENT and residency.find(tenant, block.key) < 0
                if not is_next:  # else its parent began just now, and neither of them is stored
                    refusal = self._refusal(client, block)
                    if refusal is not None:
                        statuses[position] = refusal
                        began += 1
                        continue
                    parent = residency.find_any(tenant, block.parent)
                    depth = residency.depth(parent) if parent >= 0 else -1
                if slot is not None and slot.nbytes != block.nbytes:  # kept from a block that was refused
                    self._host.free(slot)
                    slot = None
                if slot is None and block.reserved is None:
                    slot = room.allocate_now(block.nbytes, tenant)
                    if slot is None:
                        break
                began += 1
                try:
                    row = -1 if is_next else residency.find(tenant, block.key)  # stored, but out of reach
                    if row < 0:
                        row = residency.insert(
                            tenant, block.key, block.parent, fingerprint_id=client.fingerprint_id, group=block.group,
                            depth=depth + 1, payload_bytes=block.payload_bytes, now_ns=now_ns,
                        )  # fmt: skip
                except CyclicChainError as error:
                    log.warning("client %s of %s: %s", client.client_name, client.tenant.name, error)
                    continue
                key, depth = block.key, depth + 1
                taken_slot = slot if block.reserved is None else block.reserved.take(block.offset)
                assert taken_slot is not None
                residency.attach(row, MAPPED, taken_slot, now_ns, filling=True)
                part.fillings.append(Filling(position, block, residency.token(row), taken_slot, depth))
                slot = None
        finally:
            if slot is not None:
                self._host.free(slot)
        return began

    def _refusal(self, client: Client, block: StagedBlock) -> StoreStatus | None:
        """Why the block is not to be stored, if so. An orphan could not be reached: under full attention, without the
        block before it. That one may have been evicted since this client was told of it, or found no room itself."""
        residency = self._residency
        row = residency.find(client.tenant_id, block.key)
        if row >= 0 and not self.may_come_again(row):
            return StoreStatus.PRESENT
        group = client.fingerprint.group(block.group)
        if block.parent == NO_PARENT or group is None or group.kind != "full":
            return None
        parent = residency.find_any(client.tenant_id, block.parent)
        if parent >= 0 and (residency.tier_mask(parent) or residency.being_filled(parent)):
            return None
        return StoreStatus.ORPHANED

    def _settling(self, published: dict[int, int], mode: DurabilityMode) -> Settling:
        writeback = self._writeback
        if writeback is None or mode == DurabilityMode.NONE:
            return {}
        at_once = mode == DurabilityMode.ALWAYS
        return {
            position: writeback.write_through(row, at_once=at_once)
            for position, row in published.items()
            if at_once or writeback.admits(row)
        }
