"""Blocks get the form of a tier's codec before they get a slot there: along every way between tiers, within bounds."""

from __future__ import annotations

import asyncio
import logging
from contextlib import closing
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from kvstore_proto.arena import HEADER_BYTES, BlockHeader, slot_bytes
from kvstore_tiers.base import Coding, Completion, Outcome, OutcomeKind, Segment
from kvstore_tiers.codecs import TESTING_ENVIRONMENT, Codec, Encoded, ShapeOf
from kvstore_tiers.codecs.shapes import PayloadShape
from kvstore_tiers.host import HostTier
from kvstore_tiers.keyed import KeyedTier
from kvstore_tiers.segments import view_at
from kvstore_tiers.testing.lossy_store import LossyStore
from kvstore_tiers.testing.made_up_codec import MadeUpCodec
from kvstore_tiers.testing.transfers import block_with_pattern
from kvstored.completions import CompletionQueue
from kvstored.store.blocks.check import check
from kvstored.store.endurance.budget import COMMIT_BYTES, OVERHEAD_BYTES
from kvstored.store.transfer import staging as module
from kvstored.store.transfer.demotion import Demotion
from kvstored.store.transfer.staging import CodecStaging, StagedImage
from kvstored.telemetry import Counters
from tests.reference.small_store import FAR_S, PAYLOAD_BYTES, SmallStore, small_store
from tests.reference.stored_blocks import stored_slot

NUMBERS = range(1, 901)
WHOLE_BYTES = slot_bytes(PAYLOAD_BYTES)
SMALL = ("host.capacity=4MiB", "host.policy=lru", "nvme.capacity=7MiB", "nvme.policy=lru")
FAR = ("tier.far.capacity=2MiB", "tier.far.arena=1MiB", "tier.far.policy=lru")
STAGED = {tier: (f"{tier}.codec=made-up", f"{tier}.codec_staging=1MiB") for tier in ("tier.far", "nvme")}


@pytest.fixture(autouse=True)
def allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TESTING_ENVIRONMENT, "1")
    monkeypatch.setattr("tests.reference.small_store.block", block_with_pattern)


def _pays_for_what_it_stored(counters: Counters) -> bool:
    """Return whether what was charged for payloads as they are was given back, as long as nothing was relocated."""
    paid_bytes = counters["endurance_bytes"] - OVERHEAD_BYTES * counters["written_back_blocks"]
    commits, left_bytes = divmod(paid_bytes - counters["written_back_bytes"], COMMIT_BYTES)
    return commits > 0 and not left_bytes and counters["relocated_blocks"] == 0


def _serves_it(small: SmallStore, number: int) -> bool:
    slot = small.residency.slot(small.find(number), small.mapped)
    held = view_at(small.store.host.slot_segment(slot).address + HEADER_BYTES, PAYLOAD_BYTES)
    return np.array_equal(held, block_with_pattern(number, PAYLOAD_BYTES)[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "coded",
    [
        pytest.param(("tier.far", "nvme"), id="the same codec twice", marks=pytest.mark.slow),
        pytest.param(("tier.far",), id="memory alone", marks=pytest.mark.slow),
        pytest.param(("nvme",), id="NVMe alone"),
    ],
)
def test_every_way_between_tiers_gives_the_payload_back(coded: tuple[str, ...], tmp_path: Path) -> None:
    """Down to slower memory, to NVMe from both, and to a store that takes payloads as they are; and up from each."""
    settings = (*SMALL, *FAR, *(setting for tier in coded for setting in STAGED[tier]))

    async def main() -> None:
        async with small_store(tmp_path, *settings, keyed=[KeyedTier(LossyStore(), 64 << 20)]) as small:
            for number in NUMBERS:
                await small.put(number, mode="always")
                if number % 50 == 0:
                    assert await small.writeback.flush(FAR_S) == 0
                    await small.settle()
                    assert number > 50 or _pays_for_what_it_stored(small.store.counters)
            counters, residency = small.store.counters, small.residency
            positions = {name: residency.tiers.index(name.removeprefix("tier.")) for name in ("tier.far", "nvme")}
            for name, position in positions.items():
                copies = residency.copies[position]
                sizes = [copies.nbytes[row] for row in range(len(copies.nbytes)) if copies.state[row]]
                assert sizes and (min(sizes) < WHOLE_BYTES) == (name in coded)
                assert sum(copies.bytes_by_tenant) == sum(sizes)
                codecs = {residency.codec(row, position) for row in range(len(copies.nbytes)) if copies.state[row]}
                assert (MadeUpCodec.number in codecs) == (name in coded)
            from_all = set()
            for number in reversed(NUMBERS):
                row = small.find(number)
                if row < 0:
                    continue
                from_all.add(residency.tiers[residency.fastest(row)])
                assert await small.fetch(number) and _serves_it(small, number), number
            assert from_all == {"host", "far", "nvme", "remote"}
            await small.settle()
            assert check(residency) == []
            for tier in small.store.tiers:
                assert tier.check_books() == []
                assert tier.statistics().used_bytes <= tier.statistics().capacity_bytes
            assert counters["corrupt_blocks"] == 0

    asyncio.run(main())


def _no_shape(_digest: bytes, _group: int, _payload_bytes: int) -> PayloadShape | None:
    return None


class _Playing(MadeUpCodec):
    """Fails as it is told."""

    answer: ClassVar[int] = 0

    def encode(self, header: BlockHeader, _shape: object, payload: memoryview, target: memoryview) -> Encoded:
        if self.answer < 0:
            raise MemoryError("no memory for it")
        return Encoded(self.answer)


@pytest.mark.parametrize("answer", [-1, 1 << 30])
def test_a_block_whose_codec_fails_is_stored_as_it_is(
    answer: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "codec_of", lambda _name: _Playing())
    monkeypatch.setattr(_Playing, "answer", answer)

    async def main() -> StagedImage | Outcome:
        completions, counters = CompletionQueue(asyncio.get_running_loop()), Counters()
        with closing(HostTier(4 << 20, arena_bytes=1 << 20)) as host:
            staging = CodecStaging(Coding("made-up", 1 << 20), _no_shape, host, completions, counters)
            header, payload = block_with_pattern(4, PAYLOAD_BYTES)
            staged = await staging.stage(
                host, stored_slot(host, header, payload), header.key, WHOLE_BYTES, takes_lossy=False
            )
            assert counters["uncoded_blocks"] == 1 and staging._scratch.out_bytes == 0
            return staged

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(main()) == StagedImage(WHOLE_BYTES)
    assert len(caplog.records) == 1 and "is stored as it is" in caplog.text


def test_staging_is_bounded_and_given_out_in_order() -> None:
    """Three fit at a time; what is too large is stored as it is; a damaged copy is found before it is written."""

    async def main() -> None:
        completions, counters = CompletionQueue(asyncio.get_running_loop()), Counters()
        with closing(HostTier(4 << 20, arena_bytes=1 << 20)) as host:
            one_bytes = HEADER_BYTES + -(-MadeUpCodec().bound(WHOLE_BYTES - HEADER_BYTES) // 4096) * 4096
            staging = CodecStaging(Coding("made-up", 2 * 3 * one_bytes), _no_shape, host, completions, counters)
            blocks = [block_with_pattern(number, PAYLOAD_BYTES) for number in (4, 10, 16, 22, 28)]
            slots = [stored_slot(host, *each) for each in blocks]
            asked = [
                asyncio.ensure_future(staging.stage(host, slot, header.key, WHOLE_BYTES))
                for slot, (header, _) in zip(slots, blocks, strict=True)
            ]
            held: list[StagedImage] = []
            for position, each in enumerate(asked):
                staged = await asyncio.wait_for(each, FAR_S)
                assert isinstance(staged, StagedImage)
                if staged.image is None:
                    continue
                held.append(staged)
                assert staged.slot_bytes < WHOLE_BYTES and staging._scratch.out_bytes <= staging._scratch.most_bytes
                if position >= 2:
                    await completions.drained()
                    assert not any(later.done() for later in asked[position + 1 :]) or len(held) < 3
                    staging.release(held.pop(0))
            for staged in held:
                staging.release(staged)
            assert staging._scratch.out_bytes == 0
            header, payload = block_with_pattern(34, 100_000)
            large = await staging.stage(
                host, stored_slot(host, header, payload), header.key, slot_bytes(100_000), takes_lossy=False
            )
            assert large == StagedImage(slot_bytes(100_000))
            view_at(host.slot_segment(slots[0]).address + HEADER_BYTES, 1)[0] ^= 1
            damaged = await staging.stage(host, slots[0], blocks[0][0].key, WHOLE_BYTES)
            assert isinstance(damaged, Outcome) and damaged.kind is OutcomeKind.CORRUPT
            assert staging._scratch.out_bytes == 0

    asyncio.run(main())


def test_a_block_that_is_damaged_before_it_is_written_costs_no_endurance(tmp_path: Path) -> None:
    async def main() -> None:
        async with small_store(tmp_path, *SMALL, *STAGED["nvme"]) as small:
            assert await small.is_durable(1, mode="always")
            row = await small.store_in(small.mapped, 2)
            slot = small.residency.slot(row, small.mapped)
            view_at(small.store.host.slot_segment(slot).address + HEADER_BYTES, 1)[0] ^= 1
            counters = small.store.counters
            before_bytes = counters["endurance_bytes"]
            assert not await small.writeback.write_through(row, at_once=True)
            assert counters["write_failures"] == 1
            assert counters["endurance_bytes"] - before_bytes in (0, COMMIT_BYTES)

    asyncio.run(main())


def test_a_verdict_on_a_copy_that_was_replaced_meanwhile_says_nothing_of_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with small_store(tmp_path, *SMALL, *FAR, *STAGED["tier.far"]) as small:
            assert await small.is_durable(1, mode="always")
            row, residency = small.find(1), small.residency

            def encode(
                _codec: Codec, _of: ShapeOf, _source: Segment, _key: bytes, _target: Segment, done: Completion
            ) -> None:
                small.leave_host(row)
                slot = small.store.room.allocate_now(WHOLE_BYTES, residency.tenant_of(row))
                assert slot is not None and residency.attach(row, small.mapped, slot, 0) is None
                done(Outcome(OutcomeKind.CORRUPT, message="the slot holds another block"))

            monkeypatch.setattr(small.store.host, "encode", encode)
            (demotion,) = (each for each in small.store.copiers if isinstance(each, Demotion))
            assert not await demotion.write_back(row)
            assert residency.has(row, small.mapped) and small.store.counters["corrupt_blocks"] == 0

    asyncio.run(main())
