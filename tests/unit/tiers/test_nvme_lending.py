"""Slots of the NVMe tier that another tier reads from the slab by itself."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvstore_proto.arena import HEADER_BYTES, slot_bytes
from kvstore_tiers import failpoints
from kvstore_tiers.base import ERRORS_IN_A_ROW, Coding, Completion, FileImage, Outcome, OutcomeKind, Slot, TierState
from kvstore_tiers.nvme import NvmeTier
from kvstore_tiers.testing.made_up_codec import MadeUpCodec
from kvstore_tiers.testing.memory import MemoryTier
from kvstore_tiers.testing.transfers import block, block_with_pattern, finish, get, put_encoded
from tests.reference.stored_blocks import stored_slot

PAYLOAD_BYTES = 10_000
BLOCK = block(1, PAYLOAD_BYTES)


@pytest.fixture
def nvme(tmp_path: Path) -> Iterator[NvmeTier]:
    with closing(NvmeTier.open(tmp_path, 16 << 20, slab_bytes=1 << 20)) as tier:
        yield tier
    failpoints.disarm()


def lend(tier: NvmeTier, slot: Slot, ends: Outcome) -> tuple[Outcome, list[FileImage]]:
    """Lend to a reader that does not read."""
    images: list[FileImage] = []

    def load(image: FileImage, ended: Completion) -> None:
        os.close(image.descriptor)
        images.append(image)
        ended(ends)

    return finish(lambda done: tier.lend(slot, load, done)), images


def test_another_tier_reads_a_slot_and_cannot_write_it(nvme: NvmeTier, tmp_path: Path) -> None:
    slot, found = stored_slot(nvme, *BLOCK), list[FileImage]()

    def load(image: FileImage, ended: Completion) -> None:
        found.append(image)
        with pytest.raises(OSError) as refused:
            os.pwrite(image.descriptor, bytes(4096), image.offset)
        assert refused.value.errno == errno.EBADF
        os.close(image.descriptor)
        ended(Outcome(OutcomeKind.DONE, nbytes=PAYLOAD_BYTES))

    assert finish(lambda done: nvme.lend(slot, load, done)).ok
    (image,) = found
    assert (image.offset, image.payload_bytes, image.generation) == (slot.offset, PAYLOAD_BYTES, slot.generation)
    assert image.nbytes == slot_bytes(PAYLOAD_BYTES)
    assert nvme.statistics().reads == 1


def test_a_memory_tier_loads_what_is_lent(nvme: NvmeTier) -> None:
    with closing(MemoryTier(1 << 20)) as memory:
        header, payload = BLOCK
        source, slot = stored_slot(nvme, *BLOCK), memory.allocate(slot_bytes(PAYLOAD_BYTES))
        assert slot is not None
        outcome = finish(lambda done: nvme.lend(source, memory.loader(slot, header.key), done))
        assert outcome.ok
        read, copy = get(memory, slot, header.key, PAYLOAD_BYTES)
        assert read.ok and bytes(copy) == bytes(payload)


def test_the_file_is_the_slab_whatever_its_name_is(nvme: NvmeTier) -> None:
    slot, raw = stored_slot(nvme, *BLOCK), list[bytes]()
    path = Path(nvme.location(slot).rpartition(":")[0])
    path.rename(path.with_suffix(".other"))
    path.write_bytes(bytes(1 << 20))

    def load(image: FileImage, ended: Completion) -> None:
        with open(f"/proc/self/fd/{image.descriptor}", "rb") as file:
            file.seek(image.offset + HEADER_BYTES)
            raw.append(file.read(PAYLOAD_BYTES))
        os.close(image.descriptor)
        ended(Outcome(OutcomeKind.DONE, nbytes=PAYLOAD_BYTES))

    assert finish(lambda done: nvme.lend(slot, load, done)).ok
    assert raw == [bytes(BLOCK[1])]
    path.unlink()
    path.with_suffix(".other").rename(path)


def test_a_slot_that_was_never_written_is_not_lent(nvme: NvmeTier) -> None:
    stored_slot(nvme, *BLOCK)
    slot = nvme.allocate(slot_bytes(PAYLOAD_BYTES))
    assert slot is not None
    outcome, images = lend(nvme, slot, Outcome(OutcomeKind.DONE))
    assert outcome.kind is OutcomeKind.CORRUPT and not images


def test_bytes_of_a_codec_are_not_lent_and_nobody_is_to_blame(nvme: NvmeTier) -> None:
    """The other tier would serve them as a payload. Its block goes by way of memory, where it is decoded."""
    slot = put_encoded(nvme, MadeUpCodec(), *block_with_pattern(4, PAYLOAD_BYTES))
    assert slot is not None
    outcome, images = lend(nvme, slot, Outcome(OutcomeKind.DONE))
    assert (outcome.kind, outcome.errno, images) == (OutcomeKind.FAILED, 0, []) and "no device reads" in outcome.message
    assert nvme.statistics().errors == 0


def test_a_tier_with_a_codec_lends_nothing(tmp_path: Path) -> None:
    coding = Coding("made-up", 2 << 20)
    with closing(NvmeTier.open(tmp_path / "coded", 16 << 20, slab_bytes=1 << 20, coding=coding)) as tier:
        assert not tier.info.lends_files and tier.info.dram_bytes == coding.staging_bytes


def test_failures_of_the_reader_are_not_those_of_the_medium(nvme: NvmeTier) -> None:
    slot = stored_slot(nvme, *BLOCK)
    for _ in range(2 * ERRORS_IN_A_ROW):
        outcome, _ = lend(nvme, slot, Outcome(OutcomeKind.FAILED, message="the reader died"))
        assert outcome.kind is OutcomeKind.FAILED
    statistics = nvme.statistics()
    assert (statistics.state, statistics.errors, statistics.reads) == (TierState.OK, 0, 0)
    for _ in range(ERRORS_IN_A_ROW):
        lend(nvme, slot, Outcome(OutcomeKind.FAILED, message="I/O error", errno=errno.EIO))
    statistics = nvme.statistics()
    assert (statistics.state, statistics.errors) == (TierState.FAILED, ERRORS_IN_A_ROW)
    assert lend(nvme, slot, Outcome(OutcomeKind.CORRUPT, message="wrong"))[0].kind is OutcomeKind.CORRUPT
    assert nvme.statistics().corrupt == 1


@pytest.mark.parametrize(("name", "is_of_the_medium"), [("EIO", True), ("EMFILE", False)])
def test_a_file_that_cannot_be_opened_is_not_lent(nvme: NvmeTier, name: str, is_of_the_medium: bool) -> None:
    slot = stored_slot(nvme, *BLOCK)
    failpoints.arm(f"nvme.read=error:{name}")
    outcome, images = lend(nvme, slot, Outcome(OutcomeKind.DONE))
    assert outcome.kind is OutcomeKind.FAILED and not images and bool(outcome.errno) == is_of_the_medium
    assert nvme.statistics().errors == is_of_the_medium


def test_a_tier_waits_for_its_readers_before_it_closes(tmp_path: Path) -> None:
    tier = NvmeTier.open(tmp_path, 16 << 20, slab_bytes=1 << 20)
    slot, began, endings, ended = stored_slot(tier, *BLOCK), threading.Event(), list[Completion](), list[Outcome]()

    def load(image: FileImage, end: Completion) -> None:
        os.close(image.descriptor)
        endings.append(end)
        began.set()

    tier.lend(slot, load, ended.append)
    assert began.wait(60)
    closing_thread = threading.Thread(target=tier.close)
    closing_thread.start()
    closing_thread.join(0.1)
    assert closing_thread.is_alive() and not ended
    endings[0](Outcome(OutcomeKind.DONE))
    closing_thread.join(60)
    assert not closing_thread.is_alive() and [outcome.kind for outcome in ended] == [OutcomeKind.DONE]
    late: list[Outcome] = []
    tier.lend(slot, load, late.append)
    assert late[0].kind is OutcomeKind.CANCELLED
