"""Lossy copies are made while they are accepted, and not a moment later."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvstore_proto.arena import BlockHeader
from kvstore_tiers.base import MemoryKind, OutcomeKind
from kvstore_tiers.codecs import TESTING_ENVIRONMENT, CodingError, Encoded
from kvstore_tiers.codecs.images import encode_image, image_bytes
from kvstore_tiers.segments import AlignedBuffer
from kvstore_tiers.testing.memory import MemoryTier
from kvstore_tiers.testing.rounding_codec import RoundingCodec
from kvstore_tiers.testing.transfers import as_it_is, block
from kvstored.lifecycle import Cause
from kvstored.store.operations.records import GetRequest
from kvstored.store.transfer import staging as module
from kvstored.tier_set import TierSet
from tests.reference.driven_store import DrivenStore
from tests.reference.small_store import FAR_S, SLOT_BYTES, SmallStore, small_store

SETTINGS = ("nvme.codec=rounding", "nvme.codec_staging=1MiB")


@pytest.fixture(autouse=True)
def allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TESTING_ENVIRONMENT, "1")


async def put_accepting(small: SmallStore, number: int) -> int:
    """Put a block whose put and tenant accept lossy copies; return its row."""
    exactness = small.residency.exactness
    exactness.tenants.add(small.residency.tenant("tenant"))
    row = await small.store_in(small.mapped, number)
    exactness.accept_lossy(row, accepts=True)
    return row


async def write(small: SmallStore, row: int) -> None:
    assert await asyncio.wait_for(asyncio.shield(small.writeback.write_through(row, at_once=True)), FAR_S)


def test_an_exact_put_that_comes_while_a_block_is_encoded_gets_an_exact_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with small_store(tmp_path, *SETTINGS) as small:
            row = await put_accepting(small, 1)
            host, encode = small.store.host, small.store.host.encode
            waiting = list[Any]()

            def meanwhile(*arguments: Any) -> None:
                waiting.append(small.store.lossy_copies.give_way([row]))
                encode(*arguments)

            monkeypatch.setattr(host, "encode", meanwhile)
            await write(small, row)
            exactness, durable = small.residency.exactness, small.residency.durable
            assert small.residency.has(row, durable) and not exactness.has_lossy
            assert waiting == [([row], frozenset({0}))], "its put comes again, as long as the write is coming"

    asyncio.run(main())


def test_lossy_copies_go_and_what_is_exact_is_written_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with small_store(tmp_path, *SETTINGS) as small:
            residency, lossy_copies = small.residency, small.store.lossy_copies
            row = await put_accepting(small, 1)
            await write(small, row)
            assert residency.exactness.is_lossy(row, residency.durable)
            assert lossy_copies.give_way([row, -1]) == ([row, -1], frozenset())
            assert not residency.has(row, residency.durable) and not residency.exactness.is_accepted(row)
            small.store.write_again()
            await small.until(lambda: residency.has(row, residency.durable))
            assert not residency.exactness.is_lossy(row, residency.durable)

            row = await put_accepting(small, 2)
            await write(small, row)
            small.leave_host(row)
            assert await small.fetch(2) and residency.exactness.is_lossy(row, small.mapped), "promoted as it is"
            assert lossy_copies.give_way([row]) == ([-1], frozenset())
            absence = residency.why_missing(residency.tenant("tenant"), small.key(2))
            assert absence.cause is Cause.LOSSY_ONLY and small.find(2) < 0
            assert small.store.counters["replaced_lossy_copies"] == 3

    asyncio.run(main())


class Coarse(RoundingCodec):
    error_made: ClassVar[CodingError | None] = CodingError(0.5, 1000.0)

    def encode(self, *arguments: Any) -> Encoded:
        return Encoded(super().encode(*arguments).nbytes, self.error_made)


@pytest.mark.parametrize("error", [CodingError(0.5, 1000.0), CodingError(0.01, float("inf")), None])
def test_a_block_whose_error_is_over_the_bound_is_stored_as_it_is(
    error: CodingError | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "codec_of", lambda _setting: Coarse())
    monkeypatch.setattr(Coarse, "most_error", 0.1)
    monkeypatch.setattr(Coarse, "error_made", error)

    async def main() -> None:
        async with small_store(tmp_path, *SETTINGS) as small:
            row = await put_accepting(small, 1)
            await write(small, row)
            assert not small.residency.exactness.has_lossy and small.store.counters["uncoded_blocks"] == 1

    asyncio.run(main())


class Late(RoundingCodec):
    """Reads a payload that changed after it was verified."""

    def encode(self, header: BlockHeader, shape: object, payload: memoryview, target: memoryview) -> Encoded:
        payload[1] ^= 0xFF
        return super().encode(header, shape, payload, target)


def test_a_payload_that_changes_before_it_is_encoded_gets_no_lossy_copy() -> None:
    codec, (header, payload) = Late(), block(1, 4096)
    image, target = as_it_is(header, payload), AlignedBuffer(image_bytes(codec, payload.nbytes))
    outcome = encode_image(
        codec, lambda *_: None, image.segment(image.nbytes), header.key, target.segment(target.nbytes)
    )
    assert outcome.kind is OutcomeKind.CORRUPT


def test_a_lossy_copy_on_a_device_serves_who_accepts_it_though_an_exact_one_is_far(tmp_path: Path) -> None:
    async def main() -> None:
        device = MemoryTier(8 * SLOT_BYTES, name="vram", memory=MemoryKind.DEVICE)
        async with small_store(tmp_path, before=[device]) as small:
            driven, residency = DrivenStore(small), small.residency
            row = await small.store_in(small.mapped, 1)
            await write(small, row)
            small.leave_host(row)
            slot = device.allocate(SLOT_BYTES)
            assert slot is not None
            residency.exactness.note(row, 0, 1.0)
            residency.attach(row, 0, slot, small.clock.monotonic_ns())
            client = replace(driven.client, exact=False, device_tiers=TierSet.of(0))
            acquired = driven.operations.get.acquire_mapped(client, GetRequest(small.key(1)))
            assert acquired is not None and acquired.run is not None and acquired.run.slots == [slot]
            driven.operations.get.release(client, [acquired.run.lease_id])
            client.exact = True
            acquired = await driven.operations.get.acquire(client, GetRequest(small.key(1)))
            assert acquired.run is not None and acquired.run.slots == [residency.slot(row, small.mapped)]
            driven.operations.get.release(client, [acquired.run.lease_id])

    asyncio.run(main())
