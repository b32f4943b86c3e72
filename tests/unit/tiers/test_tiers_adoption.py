"""Arenas taken over from a process that has ended: which blocks are there, and which are not."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from kvstore_proto.arena import HEADER_BYTES, BlockHeader, payload_checksum
from kvstore_tiers.adoption import AdoptedArena
from kvstore_tiers.arena import Arena, ArenaRecord
from kvstore_tiers.arena_memory import ForeignMemory, empty_memory
from kvstore_tiers.base import Slot
from kvstore_tiers.host import HostTier
from kvstore_tiers.segments import segment_of
from kvstore_tiers.testing.transfers import get, put
from tests.reference.stored_blocks import stored_slot

MIB = 1 << 20
SLOT = 16 << 10
OWNER = bytes(range(16))


class Keeping:
    """Keeps descriptors and records as a daemon's holder and ledger do."""

    def __init__(self) -> None:
        self.descriptors: dict[int, int] = {}
        self.records: dict[int, ArenaRecord] = {}

    def made(self, arena: Arena) -> None:
        self.descriptors[arena.number] = os.dup(arena.fd)
        self.records[arena.number] = arena.record

    def changed(self, arena: Arena) -> None:
        if arena.number in self.records:
            self.records[arena.number] = arena.record

    def given_up(self, number: int) -> None:
        del self.records[number]

    def released(self, number: int) -> None:
        os.close(self.descriptors.pop(number))


@pytest.fixture
def keeping() -> Iterator[Keeping]:
    kept = Keeping()
    yield kept
    for descriptor in kept.descriptors.values():
        os.close(descriptor)


def block(number: int, nbytes: int = 10_000, tenant: bytes = OWNER) -> tuple[BlockHeader, np.ndarray]:  # type: ignore[type-arg]
    payload = np.random.default_rng(number).integers(0, 256, nbytes, dtype=np.uint8)
    key = number.to_bytes(16, "little")
    return BlockHeader(key, bytes(16), bytes(32), tenant, nbytes, tokens=bytes(64), depth=number), payload


def filled(keeping: Keeping, count: int, capacity: int = 4 * MIB) -> tuple[HostTier, list[Slot]]:
    tier = HostTier(capacity, arena_bytes=MIB, witness=keeping)
    slots = []
    for number in range(count):
        header, payload = block(number)
        slot = tier.allocate(SLOT, OWNER.hex())
        assert slot is not None
        tier.write(slot, header, [segment_of(payload)], lambda outcome: None)
        slots.append(slot)
    tier.leave()
    return tier, slots


def adopt_all(keeping: Keeping, tier: HostTier) -> dict[int, AdoptedArena]:
    found = {}
    for number, record in sorted(keeping.records.items()):
        adopted = tier.adopt(record, os.dup(keeping.descriptors[number]))
        assert adopted is not None
        found[number] = adopted
    return found


def keys(adopted: AdoptedArena) -> list[int]:
    return [int.from_bytes(key, "little") for key in adopted.headers["key"].tolist()]


def test_every_block_is_there_with_its_bytes(keeping: Keeping) -> None:
    _, slots = filled(keeping, 100)
    with closing(HostTier(4 * MIB, arena_bytes=MIB)) as tier:
        found = adopt_all(keeping, tier)
        assert sorted(number for adopted in found.values() for number in keys(adopted)) == list(range(100))
        assert sorted(slot for adopted in found.values() for slot in adopted.slots) == sorted(slots)
        assert tier.statistics().blocks == 100 and tier.used_bytes == 2 * MIB
        for adopted in found.values():
            for slot, number in zip(adopted.slots, keys(adopted), strict=True):
                header, payload = block(number)
                outcome, got = get(tier, slot, header.key, len(payload))
                assert outcome.ok and np.array_equal(got, payload)
        for adopted in found.values():
            for slot in adopted.slots:
                tier.free(slot)
        assert tier.statistics().blocks == 0


def test_what_is_written_into_slots_that_were_free_is_there_for_the_process_after_the_next(keeping: Keeping) -> None:
    first = HostTier(MIB, arena_bytes=MIB, witness=keeping)
    stays = put(first, *block(1), OWNER.hex())
    goes = put(first, *block(2), OWNER.hex())
    assert stays is not None and goes is not None
    first.free(goes)
    first.leave()
    second = HostTier(MIB, arena_bytes=MIB, witness=keeping)
    adopt_all(keeping, second)
    header, payload = block(7)
    assert put(second, header, payload, OWNER.hex()) is not None
    second.leave()
    with closing(HostTier(MIB, arena_bytes=MIB, witness=keeping)) as third:
        (found,) = adopt_all(keeping, third).values()
        assert keys(found) == [1, 7] and found.damaged_slots == 0


def test_new_slots_have_generations_that_no_slot_had(keeping: Keeping) -> None:
    tier = HostTier(MIB, arena_bytes=MIB, witness=keeping)
    for _ in range(5):
        used = [tier.allocate(SLOT, OWNER.hex()) for _ in range(10)]
        for slot in used:
            assert slot is not None
            tier.free(slot)
    highest = max(slot.generation for slot in used if slot is not None)
    tier.leave()
    with closing(HostTier(MIB, arena_bytes=MIB)) as later:
        (adopted,) = adopt_all(keeping, later).values()
        assert adopted.slots == []
        fresh = later.allocate(SLOT, OWNER.hex())
        assert fresh is not None and fresh.container == adopted.container and fresh.generation > highest


@pytest.mark.parametrize("offset", [0, 4, 9, 90, 105, 108, 113, 121, 130, 146, 153, 200, 300, HEADER_BYTES - 1])
def test_a_header_that_does_not_hold_in_every_byte_is_no_block(keeping: Keeping, offset: int) -> None:
    filled(keeping, 20)
    (number,) = keeping.records
    with mmap.mmap(keeping.descriptors[number], MIB) as memory:
        memory[5 * SLOT + offset] ^= 0x41
    with closing(HostTier(4 * MIB, arena_bytes=MIB)) as tier:
        (adopted,) = adopt_all(keeping, tier).values()
        assert sorted(keys(adopted)) == [number for number in range(20) if number != 5]
        assert adopted.retired == [] and adopted.damaged_slots == (0 if offset == 0 else 1)
        again = tier.allocate(SLOT, OWNER.hex())
        assert again is not None and again.offset == 5 * SLOT, "its slot is free"


def test_a_block_that_was_retired_while_it_was_read_is_listed_separately(keeping: Keeping) -> None:
    tier = HostTier(MIB, arena_bytes=MIB, witness=keeping)
    header, payload = block(1)
    slot = stored_slot(tier, replace(header, checksum=payload_checksum(payload)), payload, OWNER.hex())
    tier.retire(slot)
    tier.leave()
    with closing(HostTier(MIB, arena_bytes=MIB)) as later:
        (adopted,) = adopt_all(keeping, later).values()
        assert adopted.slots == [] and adopted.retired == [Slot(slot.container, slot.offset, slot.nbytes, 1)]
        assert adopted.damaged_slots == 0
        later.free(adopted.retired[0])


def test_bytes_of_a_former_payload_do_not_pass_for_a_block(keeping: Keeping) -> None:
    """A payload that holds a header, where a slot of another size begins later."""
    tier = HostTier(MIB, arena_bytes=MIB, witness=keeping)
    forged, _ = block(7)
    forgery = np.zeros(3 * SLOT - HEADER_BYTES, dtype=np.uint8)
    packed = np.frombuffer(replace(forged, generation=3, checksum=1).pack(), dtype=np.uint8)
    forgery[SLOT - HEADER_BYTES : SLOT] = packed
    slot = stored_slot(tier, block(1, len(forgery))[0], forgery, OWNER.hex())
    tier.free(slot)
    first = tier.allocate(SLOT, OWNER.hex())  # the arena is cut anew
    second = tier.allocate(SLOT, OWNER.hex())
    assert first is not None and second is not None and second.offset == SLOT and second.generation == 3
    tier.leave()
    with closing(HostTier(MIB, arena_bytes=MIB)) as later:
        (adopted,) = adopt_all(keeping, later).values()
        assert adopted.slots == [] and adopted.retired == []


def test_blocks_of_another_tenant_in_an_arena_are_not_taken(keeping: Keeping) -> None:
    tier = HostTier(MIB, arena_bytes=MIB, witness=keeping)
    header, payload = block(1, tenant=bytes(16))
    assert put(tier, header, payload, OWNER.hex()) is not None
    tier.leave()
    with closing(HostTier(MIB, arena_bytes=MIB)) as later:
        (adopted,) = adopt_all(keeping, later).values()
        assert adopted.slots == [] and adopted.damaged_slots == 1


def test_the_capacity_holds(keeping: Keeping) -> None:
    filled(keeping, 200)
    with closing(HostTier(3 * MIB, arena_bytes=MIB)) as tier:
        assert tier.charge(MIB, "staging")
        adopted = [
            tier.adopt(record, os.dup(keeping.descriptors[number])) for number, record in keeping.records.items()
        ]
        assert [found is not None for found in adopted] == [True, True, False, False]
        assert tier.used_bytes == 3 * MIB


def test_only_the_arena_itself_is_taken(keeping: Keeping) -> None:
    filled(keeping, 1)
    ((number, record),) = keeping.records.items()
    descriptor = keeping.descriptors[number]
    plain = os.memfd_create("kvstore-arena-1")
    os.ftruncate(plain, record.nbytes)
    with closing(HostTier(4 * MIB, arena_bytes=MIB)) as tier:
        for wrong, handed in (
            (replace(record, number=2), descriptor), (replace(record, nbytes=2 * MIB), descriptor),
            (replace(record, slot_bytes=2 * MIB), descriptor), (record, plain),
        ):  # fmt: skip
            with pytest.raises(ForeignMemory):
                tier.adopt(wrong, handed)
        read_only = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
        with pytest.raises(OSError, match="denied"):
            tier.adopt(record, read_only)
        os.fchmod(descriptor, 0o644)
        with pytest.raises(ForeignMemory, match="mode 644"):
            tier.adopt(record, descriptor)
        assert tier.used_bytes == 0
    os.close(read_only)
    os.close(plain)


def test_memory_that_is_not_wanted_goes_at_once_and_nothing_else_does(keeping: Keeping) -> None:
    filled(keeping, 10)
    ((number, record),) = keeping.records.items()
    descriptor = keeping.descriptors[number]
    with mmap.mmap(descriptor, record.nbytes) as memory:  # as a client of before would
        assert memory[:4] == b"KVB1"
        empty_memory(descriptor)
        assert memory[:4] == bytes(4) and os.fstat(descriptor).st_blocks * 512 <= mmap.PAGESIZE
    other = os.memfd_create("mine")
    os.write(other, b"keep")
    empty_memory(other)
    assert os.pread(other, 4, 0) == b"keep"
    os.close(other)


def test_a_donor_goes_when_the_process_leaves(keeping: Keeping) -> None:
    """An arena that took over another one's memory bit by bit: only one of them is left for the next process."""
    tier = HostTier(MIB, arena_bytes=MIB, witness=keeping)
    first = tier.allocate(SLOT, OWNER.hex())
    assert first is not None
    tier.free(first)
    second = tier.allocate(SLOT, bytes(16).hex())
    assert second is not None and second.container != first.container
    assert len(keeping.descriptors) == 2 and len(keeping.records) == 1
    tier.leave()
    assert list(keeping.descriptors) == [second.container] == list(keeping.records)


def test_arenas_that_are_used_in_part_and_change_hands_do_not_pile_up(keeping: Keeping) -> None:
    """An arena keeps only the last of the arenas that it took over, until its memory is taken: tenants come and go."""
    tier = HostTier(MIB, arena_bytes=MIB, witness=keeping)
    for owner in range(20):
        slot = tier.allocate(SLOT, owner.to_bytes(16, "big").hex())
        assert slot is not None and len(keeping.descriptors) <= 2
        tier.view(slot)[:] = 1
        tier.free(slot)
    held = sum(os.fstat(descriptor).st_blocks * 512 for descriptor in keeping.descriptors.values())
    assert held <= MIB and len(keeping.records) == 1
    tier.close()
