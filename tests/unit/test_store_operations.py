"""The store without a socket or a wire message: put, lookup, get, hints and delete on plain records."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path

import numpy as np
import pytest

from kvstore_proto.fingerprint import Fingerprint, LayerGroup
from kvstore_proto.identity import KEY_BYTES, NO_PARENT
from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstore_tiers.segments import segment_of
from kvstored.clients.tenants import Tenant
from kvstored.config.schema import TenantSection
from kvstored.lifecycle import Cause
from kvstored.store.blocks.check import check
from kvstored.store.operations import Client, Operations, offer
from kvstored.store.operations.delete import Fate
from kvstored.store.operations.get import Acquired, Expected, LeasedRun, Wanted
from kvstored.store.operations.offer import Durability, DurabilityMode, Offer, Stored, StoreStatus
from kvstored.telemetry import DeletionLog
from tests.reference.small_store import PAYLOAD_BYTES, SmallStore, small_store
from tests.reference.tiers import HOST, NVME

BLOCKS = 5
FINGERPRINT = Fingerprint("m", "w", groups=(LayerGroup(0),))
KEYS = [bytes([number + 1]) * KEY_BYTES for number in range(BLOCKS)]
PACKED = b"".join(KEYS)


class Payloads:
    """Implements `Staged`: block `n` is full of bytes `n`."""

    def __init__(self) -> None:
        self.arrays = [np.full(PAYLOAD_BYTES, number, np.uint8) for number in range(BLOCKS)]

    def tokens_at(self, offset: int) -> bytes:
        return b""

    def payload_at(self, offset: int, nbytes: int) -> object:
        return segment_of(self.arrays[offset])


class Driven:
    def __init__(self, small: SmallStore) -> None:
        self.small = small
        self.operations = Operations(small.store, DeletionLog(small.clock))
        self.client = self.new_client(1)

    def new_client(self, number: int, tenant: str = "tenant") -> Client:
        return Client(
            session_id=number, client_name=f"client {number}",
            tenant=Tenant(tenant, bytes(16), b"", TenantSection("t")),
            tenant_id=self.small.residency.tenant(tenant), fingerprint=FINGERPRINT,
            fingerprint_digest=FINGERPRINT.digest(), fingerprint_id=1, roots={},
        )  # fmt: skip

    async def put(self, mode: DurabilityMode, blocks: int = BLOCKS) -> list[Stored]:
        offered = Offer(
            0, b"".join(KEYS[:blocks]), KEYS[:blocks], [NO_PARENT, *KEYS[: blocks - 1]], [bytes(KEY_BYTES)] * blocks,
            [PAYLOAD_BYTES] * blocks, Payloads(), range(blocks),
        )  # fmt: skip
        return [answer async for answer in self.operations.put.store(self.client, offered, mode)]

    async def only_on_nvme(self) -> None:
        await self.put(DurabilityMode.ALWAYS)
        for key in KEYS:
            row = self.small.residency.find(self.client.tenant_id, key)
            self.small.store.retire[HOST](self.small.residency.detach(row, HOST), self.client.tenant_id)

    async def stream(self, wanted: Wanted, held: int = 0) -> tuple[Expected, list[LeasedRun], Acquired]:
        answers = [answer async for answer in self.operations.get.acquire_in_order(self.client, wanted, held)]
        expected, *runs, end = answers
        assert isinstance(expected, Expected) and isinstance(end, Acquired)
        return expected, [run for run in runs if isinstance(run, LeasedRun)], end

    def payloads(self, run: LeasedRun) -> list[int]:
        """Of each block of a lease: the byte that it is full of."""
        found = []
        for slot in run.slots:
            values = set(self.small.store.host.view(slot)[4096 : 4096 + PAYLOAD_BYTES].tolist())
            (value,) = values
            found.append(value)
        return found


def over_a_store(*settings: str) -> Callable[[Callable[[Driven], Coroutine[None, None, None]]], Callable[[Path], None]]:
    def decorate(scenario: Callable[[Driven], Coroutine[None, None, None]]) -> Callable[[Path], None]:
        def run(tmp_path: Path) -> None:
            async def main() -> None:
                async with small_store(tmp_path, *settings) as small:
                    driven = Driven(small)
                    await scenario(driven)
                    small.store.leases.release_session(driven.client.session_id)
                    assert not small.residency.pins and check(small.residency) == []

            asyncio.run(main())

        run.__name__, run.__doc__ = scenario.__name__, scenario.__doc__
        return run

    return decorate


@over_a_store()
async def test_what_is_put_is_found_got_and_deleted(driven: Driven) -> None:
    first, last = await driven.put(DurabilityMode.BATCH)
    assert list(first.statuses) == [StoreStatus.STORED] * BLOCKS
    assert (first.final, last.final) == (False, True)
    assert set(last.durability) <= {Durability.DURABLE, Durability.VOLATILE}
    found = driven.operations.look_up.look_up(driven.client, PACKED + b"?" * KEY_BYTES)
    assert (found.usable, found.cause) == (BLOCKS, Cause.NEVER_STORED)
    held = driven.operations.get.acquire_mapped(driven.client, Wanted(PACKED))
    assert held is not None and held.run is not None and (held.blocks, held.cause) == (BLOCKS, None)
    assert driven.payloads(held.run) == list(range(BLOCKS))
    in_use = await driven.operations.delete.delete(driven.client, KEYS)
    assert in_use.fates[-1] is Fate.IN_USE
    assert driven.operations.get.release(driven.client, [held.run.lease_id]) == 1
    deleted = await driven.operations.delete.delete(driven.client, KEYS)
    assert deleted.fates == [Fate.DELETED] * BLOCKS and deleted.nbytes == BLOCKS * PAYLOAD_BYTES


@over_a_store()
async def test_another_tenant_finds_nothing_and_releases_nothing(driven: Driven) -> None:
    await driven.put(DurabilityMode.NONE)
    held = driven.operations.get.acquire_mapped(driven.client, Wanted(PACKED))
    assert held is not None and held.run is not None
    stranger = driven.new_client(2, "another")
    assert driven.operations.look_up.look_up(stranger, PACKED).usable == 0
    nothing = await driven.operations.get.acquire(stranger, Wanted(PACKED))
    assert (nothing.blocks, nothing.run, nothing.cause) == (0, None, Cause.NEVER_STORED)
    assert driven.operations.get.release(stranger, [held.run.lease_id]) == 0


@pytest.mark.parametrize("from_back", [False, True])
def test_blocks_below_come_in_the_order_that_is_asked_for(tmp_path: Path, from_back: bool) -> None:
    @over_a_store("movement.in_flight=1")
    async def scenario(driven: Driven) -> None:
        await driven.only_on_nvme()
        expected, runs, end = await driven.stream(Wanted(PACKED, from_back=from_back))
        assert list(expected.tiers) == [NVME] * BLOCKS and sorted(expected.ready_us) == list(expected.ready_us)
        order = [run.first for run in runs]
        assert order == sorted(order, reverse=from_back) and len(order) > 1
        assert sum(run.promoted[NVME] for run in runs) == BLOCKS == end.blocks
        assert {at: value for run in runs for at, value in enumerate(driven.payloads(run), run.first)} == {
            number: number for number in range(BLOCKS)
        }

    scenario(tmp_path)


@over_a_store()
async def test_blocks_that_the_engine_holds_are_counted_and_not_loaded(driven: Driven) -> None:
    await driven.only_on_nvme()
    _, runs, end = await driven.stream(Wanted(PACKED), held=2)
    assert sorted(at for run in runs for at in range(run.first, run.first + len(run.rows))) == [2, 3, 4]
    assert end.blocks == BLOCKS
    row = driven.small.residency.find(driven.client.tenant_id, KEYS[0])
    assert not driven.small.residency.has(row, HOST) and driven.small.residency.rows.accesses[row] >= 2


@over_a_store("movement.in_flight=1")
async def test_a_stream_that_its_caller_leaves_gives_everything_back(driven: Driven) -> None:
    await driven.only_on_nvme()
    answers = driven.operations.get.acquire_in_order(driven.client, Wanted(PACKED))
    await anext(answers)
    run = await anext(answers)
    assert isinstance(run, LeasedRun)
    await answers.aclose()
    assert driven.operations.get.release(driven.client, [run.lease_id]) == 1
    await driven.small.settle()


@over_a_store()
async def test_a_prefetch_is_a_get_that_nobody_waits_for(driven: Driven) -> None:
    await driven.only_on_nvme()
    queued = driven.operations.hints.prefetch(driven.client, PACKED, budget_bytes=3 * PAYLOAD_BYTES)
    assert (queued.resident_blocks, queued.scheduled_blocks) == (0, 3)
    held = await driven.operations.get.acquire(driven.client, Wanted(PACKED))
    assert held.blocks == BLOCKS and held.run is not None and held.run.promoted.total() == BLOCKS


def test_the_numbers_are_those_of_the_wire() -> None:
    for ours, theirs, prefix in (
        (offer.StoreStatus, pb.StoreStatus, "STORE_STATUS_"),
        (offer.Durability, pb.Durability, "DURABILITY_"),
        (offer.DurabilityMode, pb.DurabilityMode, "DURABILITY_MODE_"),
    ):
        wire = {name.removeprefix(prefix): number for name, number in theirs.items()}
        wire.pop("DEFAULT", None)  # the translation's to resolve
        assert {each.name: each.value for each in ours} == wire
    assert {cause.name: cause.value for cause in Cause}.items() <= {
        name.removeprefix("MISS_REASON_"): number for name, number in pb.MissReason.items()
    }.items()
