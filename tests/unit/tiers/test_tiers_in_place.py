"""Arenas that clients write: what is put in place is served as it was checksummed, after a stray write not at all."""

from __future__ import annotations

import mmap
import os
import queue
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvstore_proto.arena import HEADER_BYTES, BlockHeader, Bytes, pack_unsummed, slot_bytes
from kvstore_tiers.arena import writable_owner
from kvstore_tiers.base import Outcome, OutcomeKind, Segment, Slot
from kvstore_tiers.host import HostTier
from kvstore_tiers.host_transfers import ImageRun
from kvstore_tiers.nvme import NvmeTier
from kvstore_tiers.testing.transfers import block, finish, get, put

MIB = 1 << 20
PAYLOAD_BYTES = 10_000
OWNER = writable_owner("a")


@pytest.fixture
def tier() -> Iterator[HostTier]:
    with closing(HostTier(4 * MIB, arena_bytes=MIB)) as tier:
        yield tier


@contextmanager
def mapped(tier: HostTier, container: int) -> Iterator[mmap.mmap]:
    """Map an arena as a client does."""
    fd = tier.arena(container).writable_fd()
    try:
        with mmap.mmap(fd, tier.arena(container).nbytes) as memory:
            yield memory
    finally:
        os.close(fd)


def write(tier: HostTier, slot: Slot, payload: Bytes) -> None:
    with mapped(tier, slot.container) as memory:
        start = slot.offset + HEADER_BYTES
        memory[start : start + len(payload)] = payload.tobytes()


def store(tier: HostTier, slot: Slot, header: BlockHeader) -> Outcome:
    payload = tier.slot_segment(slot).part(HEADER_BYTES, header.payload_bytes)
    return finish(lambda done: tier.write(slot, header, [payload], done))


def put_in_place(tier: HostTier, number: int, owner: str = OWNER) -> tuple[Slot, BlockHeader, Bytes]:
    header, payload = block(number, PAYLOAD_BYTES)
    slot = tier.allocate(slot_bytes(PAYLOAD_BYTES), owner)
    assert slot is not None
    write(tier, slot, payload)
    assert store(tier, slot, header).ok
    return slot, header, payload


def test_a_payload_written_in_place_is_a_block(tier: HostTier) -> None:
    slot, header, payload = put_in_place(tier, 1)
    outcome, copy = get(tier, slot, header.key, PAYLOAD_BYTES)
    assert outcome.ok and np.array_equal(copy, payload)
    assert outcome.header is not None and outcome.header.tokens == header.tokens
    assert finish(lambda done: tier.verify(slot, header.key, done)).ok


def test_only_arenas_that_are_for_it_are_handed_out_writable(tier: HostTier) -> None:
    header, payload = block(2, PAYLOAD_BYTES)
    slot = put(tier, header, payload, "a")
    assert slot is not None and tier.writable == set()
    with pytest.raises(RuntimeError, match="not to be written"):
        tier.arena(slot.container).writable_fd()
    other, _, _ = put_in_place(tier, 3)
    assert other.container != slot.container and tier.writable == {other.container}


def test_a_sealed_arena_is_never_handed_out_writable() -> None:
    with closing(HostTier(4 * MIB, arena_bytes=MIB, mode="sealed")) as tier:
        slot = tier.allocate(8192, OWNER)
        assert slot is not None
        with pytest.raises(RuntimeError):
            tier.arena(slot.container).writable_fd()


@pytest.mark.parametrize("place", [0, 8, 60, 128, 152, 300, HEADER_BYTES, HEADER_BYTES + PAYLOAD_BYTES - 1])
def test_a_stray_write_is_found_wherever_it_is(tier: HostTier, place: int) -> None:
    slot, header, _ = put_in_place(tier, 4)
    with mapped(tier, slot.container) as memory:
        memory[slot.offset + place] ^= 1
    assert finish(lambda done: tier.verify(slot, header.key, done)).kind is OutcomeKind.CORRUPT
    outcome, _ = get(tier, slot, header.key, PAYLOAD_BYTES)
    assert outcome.kind is OutcomeKind.CORRUPT


def test_a_forged_header_that_holds_is_not_believed(tier: HostTier, tmp_path: Path) -> None:
    """The header's checksum is no secret: a client could name another tenant in it, and have that written to NVMe."""
    slot, header, _ = put_in_place(tier, 5)
    outcome = finish(lambda done: tier.verify(slot, header.key, done))
    assert outcome.header is not None
    fields = vars(outcome.header) | {"tenant": b"t" * 16}
    with mapped(tier, slot.container) as memory:
        memory[slot.offset : slot.offset + HEADER_BYTES] = BlockHeader(**fields).pack()
    assert finish(lambda done: tier.verify(slot, header.key, done)).kind is OutcomeKind.CORRUPT
    with closing(NvmeTier.open(tmp_path / "nvme", 8 * MIB, slab_bytes=MIB)) as nvme:
        target = nvme.allocate(slot.nbytes)
        assert target is not None
        source = tier.slot_segment(slot)
        assert finish(lambda done: nvme.move_in(target, source, header.key, done)).kind is OutcomeKind.CORRUPT


@pytest.mark.parametrize("place", [8, 128, 300, HEADER_BYTES - 1])
def test_a_stray_write_to_one_block_of_a_run_is_found(tier: HostTier, place: int) -> None:
    """Blocks of one run have headers of different lengths."""
    slots, headers = tier.allocate_run(3, slot_bytes(PAYLOAD_BYTES), OWNER), [block(number, 1) for number in range(3)]
    keys, tokens, images = [header.key for header, _ in headers], [b"", b"a" * 64, b"b" * 256], ImageRun()
    pack_unsummed(
        images.add(slots, [tier.slot_segment(slot).address + HEADER_BYTES for slot in slots], PAYLOAD_BYTES, tier),
        keys=keys, parents=keys, extras=keys, fingerprint=bytes(32), tenant=bytes(16), group=0, tokens=tokens,
        payload_bytes=PAYLOAD_BYTES, depth=0, generations=[slot.generation for slot in slots], created_ns=1, kept=0,
    )  # fmt: skip
    stored = queue.SimpleQueue[Sequence[Outcome]]()
    tier.write_many(images, stored.put)
    assert all(outcome.ok for outcome in stored.get(timeout=10))
    verified = [finish(lambda done, at=at: tier.verify(slots[at], keys[at], done)) for at in range(3)]
    assert [outcome.header.tokens for outcome in verified if outcome.header is not None] == tokens
    with mapped(tier, slots[1].container) as memory:
        memory[slots[1].offset + place] ^= 1
    kinds = [finish(lambda done, at=at: tier.verify(slots[at], keys[at], done)).kind for at in range(3)]
    assert kinds == [OutcomeKind.DONE, OutcomeKind.CORRUPT, OutcomeKind.DONE]


def test_a_header_in_a_slot_that_was_not_stored_is_not_believed(tier: HostTier) -> None:
    slot = tier.allocate(slot_bytes(PAYLOAD_BYTES), OWNER)
    assert slot is not None
    header, _ = block(6, PAYLOAD_BYTES)
    with mapped(tier, slot.container) as memory:
        memory[slot.offset : slot.offset + HEADER_BYTES] = header.stamped(slot.generation, 0).pack()
    assert finish(lambda done: tier.verify(slot, header.key, done)).kind is OutcomeKind.CORRUPT


def test_a_slot_that_is_used_again_knows_nothing_of_the_block_before(tier: HostTier) -> None:
    slot, header, _ = put_in_place(tier, 7)
    tier.free(slot)
    again = tier.allocate(slot.nbytes, OWNER)
    assert again is not None and again.offset == slot.offset and again.generation > slot.generation
    assert finish(lambda done: tier.verify(again, header.key, done)).kind is OutcomeKind.CORRUPT


@pytest.mark.parametrize("owner", ["a", OWNER])
def test_a_block_that_is_moved_is_judged_by_what_is_vouched_for(tier: HostTier, owner: str) -> None:
    slot, header, payload = put_in_place(tier, 8)
    target = tier.allocate(slot.nbytes, owner)
    assert target is not None
    assert finish(lambda done: tier.relocate(slot, target, header.key, done)).ok
    outcome, copy = get(tier, target, header.key, PAYLOAD_BYTES)
    assert outcome.ok and np.array_equal(copy, payload)
    with mapped(tier, slot.container) as memory:
        memory[slot.offset + HEADER_BYTES] ^= 1
    again = tier.allocate(slot.nbytes, owner)
    assert again is not None
    outcome = finish(lambda done: tier.relocate(slot, again, header.key, done))
    assert outcome.kind is OutcomeKind.CORRUPT


def test_it_goes_to_nvme_with_the_header_that_is_vouched_for(tier: HostTier, tmp_path: Path) -> None:
    slot, header, payload = put_in_place(tier, 9)
    with closing(NvmeTier.open(tmp_path / "nvme", 8 * MIB, slab_bytes=MIB)) as nvme:
        target = nvme.allocate(slot.nbytes)
        assert target is not None
        source: Segment = tier.slot_segment(slot)
        assert finish(lambda done: nvme.move_in(target, source, header.key, done)).ok
        outcome, copy = get(nvme, target, header.key, PAYLOAD_BYTES)
        assert outcome.ok and np.array_equal(copy, payload)
