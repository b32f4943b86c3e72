"""Storing: what a put does with its blocks, wherever they are: in a client's staging, or in the message itself.

Sorts them: a block that is stored gets the durability that is asked for, one that another put is writing is to be sent
again, the others are taken in. Owns which keys are being written. Never checks a request: the verbs do. Invariants: one
writer a key; a key is free again when its put has ended, however it ended, and whether or not its client is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from kvstore_proto.arena import slot_bytes
from kvstore_proto.identity import NO_PARENT
from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstored.clients.sessions import Session, StagedBlock
from kvstored.clients.staging import Staged
from kvstored.store.blocks import Residency
from kvstored.store.transfer.writeback import WriteBack
from kvstored.telemetry import Counters
from kvstored.verbs.intake import Intake
from kvstored.verbs.present import Present
from kvstored.verbs.settling import Settling, answers

NOWHERE = -1
_MODES = {
    "none": pb.DURABILITY_MODE_NONE,
    "batch": pb.DURABILITY_MODE_BATCH,
    "always": pb.DURABILITY_MODE_ALWAYS,
}


@dataclass(frozen=True, slots=True)
class Offer:
    """Blocks that a put wants stored, in chain order; each sequence has one entry a block. `offsets` are places in
    `staged`; NOWHERE for a block that the client believes to be stored and has not written."""

    group: int
    packed: bytes  # the keys
    keys: Sequence[bytes]
    parents: Sequence[bytes]
    extras: Sequence[bytes]
    payload_bytes: Sequence[int]
    staged: Staged
    offsets: Sequence[int]

    def block(self, position: int) -> StagedBlock:
        payload_bytes = self.payload_bytes[position]
        return StagedBlock(
            self.keys[position], self.parents[position], self.extras[position], self.group, payload_bytes, self.staged,
            self.offsets[position], slot_bytes(payload_bytes),
        )  # fmt: skip


class Storing:
    """See the module. `writeback` is None without an NVMe tier; `default_mode` is of tenants that have none."""

    def __init__(
        self,
        intake: Intake,
        residency: Residency,
        writeback: WriteBack | None,
        counters: Counters,
        *,
        default_mode: str,
    ) -> None:
        self._intake = intake
        self._residency = residency
        self._present = Present(residency, writeback)
        self._counters = counters
        self._default_mode = default_mode
        self.being_written: set[tuple[int, bytes]] = set()  # (tenant, key)

    def store(
        self, session: Session, offer: Offer, asked: pb.DurabilityMode.ValueType
    ) -> AsyncGenerator[pb.StoreReply, None]:
        """One reply when the blocks are published; a second, final one when pending ones have settled. The first blocks
        have begun when this returns."""
        intake, tenant = self._intake, session.tenant_id
        mode = self._mode(session, asked)
        statuses, durability = bytearray([pb.STORE_STATUS_FAILED] * len(offer.keys)), bytearray(len(offer.keys))
        taken: list[tuple[int, StagedBlock]] = []
        present: list[tuple[int, int]] = []
        rows = self._residency.find_each(tenant, offer.packed)
        for position, (key, row) in enumerate(zip(offer.keys, rows, strict=True)):
            if row >= 0 and not intake.may_come_again(row):
                statuses[position] = pb.STORE_STATUS_PRESENT
                present.append((position, row))
            elif key in (offer.parents[position], NO_PARENT):
                continue
            elif (tenant, key) in self.being_written:
                statuses[position] = pb.STORE_STATUS_AGAIN
            elif offer.offsets[position] == NOWHERE:
                statuses[position] = pb.STORE_STATUS_WANTED
            else:
                self.being_written.add((tenant, key))
                taken.append((position, offer.block(position)))
        settling = Settling()
        if present:
            self._counters.add("present_blocks", len(present))
            settling = self._present.settle(present, mode, durability)

        def end(task: asyncio.Task[Settling]) -> None:
            self.being_written.difference_update((tenant, block.key) for _, block in taken)
            session.copying.discard(task)
            session.part_with_staging()

        taking = intake.take_in(session, taken, statuses, mode, end)
        session.copying.add(taking)
        return answers(taking, statuses, durability, settling, mode)

    def _mode(self, session: Session, asked: pb.DurabilityMode.ValueType) -> pb.DurabilityMode.ValueType:
        """What is asked for, or what the tenant is configured for: also where a newer client asks for another one."""
        if asked in _MODES.values():
            return asked
        return _MODES[session.tenant.limits.durability or self._default_mode]
