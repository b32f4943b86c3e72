"""The host tier's own promises: arenas, owners, charges, prefault, what clients can and cannot map."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress

import numpy as np
import pytest

from kvstore_proto.arena import HEADER_BYTES, read_header
from kvstore_tiers import arena_memory, host_transfers
from kvstore_tiers.arena_memory import F_SEAL_FUTURE_WRITE, ArenaMemory
from kvstore_tiers.base import Outcome, Slot, TierState
from kvstore_tiers.host import HostTier
from kvstore_tiers.segments import segment_of
from kvstore_tiers.testing.transfers import block, finish_all, get, image_run
from tests.reference.stored_blocks import stored_slot

MIB = 1 << 20


@pytest.fixture
def tier() -> Iterator[HostTier]:
    with closing(HostTier(4 * MIB, arena_bytes=MIB)) as tier:
        yield tier


def refused(number: int) -> Callable[..., int]:
    def refuse(*_arguments: object) -> int:
        raise OSError(number, os.strerror(number))

    return refuse


class Refusing:
    """A module of which one call fails for want of memory."""

    def __init__(self, call: str) -> None:
        module, name = call.split(".")
        self._module = sys.modules[module]
        setattr(self, name, refused(errno.ENOMEM))

    def __getattr__(self, name: str) -> object:
        return getattr(self._module, name)


def fill(tier: HostTier, nbytes: int, owner: str) -> list[Slot]:
    slots = []
    while (slot := tier.allocate(nbytes, owner)) is not None:
        slots.append(slot)
    return slots


def test_a_client_maps_blocks_in_place_and_cannot_write(tier: HostTier) -> None:
    header, payload = block(1, 10_000)
    slot = stored_slot(tier, header, payload, "a")
    fd = tier.arena(slot.container).readonly_fd()
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(fd, tier.arena(slot.container).nbytes, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(fd, b"x", 0)
        with mmap.mmap(fd, tier.arena(slot.container).nbytes, prot=mmap.PROT_READ) as mapped:
            seen = read_header(mapped[slot.offset : slot.offset + HEADER_BYTES])
            assert not isinstance(seen, str)
            assert (seen.key, seen.generation) == (header.key, slot.generation)
            start = slot.offset + HEADER_BYTES
            assert mapped[start : start + 10_000] == payload.tobytes()
    finally:
        os.close(fd)


def test_arenas_are_private_to_the_uid_and_sealed(tier: HostTier) -> None:
    slot = tier.allocate(8192, "a")
    assert slot is not None
    fd = tier.arena(slot.container).readonly_fd()
    try:
        assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o600
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        assert seals == fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    finally:
        os.close(fd)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_another_uid_cannot_reopen_its_descriptor_writable(tier: HostTier) -> None:
    slot = tier.allocate(8192, "a")
    assert slot is not None
    fd = tier.arena(slot.container).readonly_fd()
    program = f"import os; os.setgid(65534); os.setuid(65534); os.open('/proc/self/fd/{fd}', os.O_RDWR)"
    try:
        done = subprocess.run([sys.executable, "-c", program], pass_fds=[fd], capture_output=True, text=True)
    finally:
        os.close(fd)
    assert "PermissionError" in done.stderr, done.stderr


def test_sealed_arenas_take_no_writer_at_all_yet_work() -> None:
    with closing(HostTier(2 * MIB, arena_bytes=MIB, mode="sealed")) as tier:
        header, payload = block(1, 5000)
        slot = stored_slot(tier, header, payload, "a")
        fd = tier.arena(slot.container).readonly_fd()
        try:
            assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & F_SEAL_FUTURE_WRITE
            writable = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
            try:
                with pytest.raises(PermissionError):
                    os.pwrite(writable, b"x", 0)
            finally:
                os.close(writable)
        finally:
            os.close(fd)
        assert get(tier, slot, header.key, 5000)[0].ok
        for one in [slot, *fill(tier, 8192, "a")]:
            tier.free(one)
        assert tier.allocate(8192, "b") is None, "a sealed arena cannot be taken from its owner's clients"


def test_owners_never_share_an_arena_and_numbers_are_not_reused(tier: HostTier) -> None:
    first = fill(tier, 16384, "a")[:4]
    with closing(HostTier(8 * MIB, arena_bytes=MIB)) as both:
        for _ in range(20):
            both.allocate(16384, "a")
            both.allocate(16384, "b")
        assert all(report.owner in ("a", "b") for report in both.containers())
        assert len({report.container for report in both.containers()}) == 2
    numbers = {report.container for report in tier.containers()}
    for report in tier.containers():
        assert report.owner == "a"
    assert tier.allocate(16384, "b") is None
    convertible = [report.container for report in tier.convertible(16384, "b")]
    assert set(convertible) == numbers and not tier.convertible(16384, "a") and first
    emptied = convertible[0]
    for slot in [Slot(emptied, i * 16384, 16384, 1) for i in range(MIB // 16384)]:
        tier.free(slot)
    other = tier.allocate(16384, "b")
    assert other is not None and other.container not in numbers
    assert tier.statistics().used_bytes <= 4 * MIB


def test_memory_taken_over_by_another_owner_is_zeros_for_the_former_clients() -> None:
    with closing(HostTier(MIB, arena_bytes=MIB)) as tier:
        header, payload = block(1, 60_000)
        slot = stored_slot(tier, header, payload, "a")
        fd = tier.arena(slot.container).readonly_fd()
        with mmap.mmap(fd, MIB, prot=mmap.PROT_READ) as mapped:
            tier.free(slot)
            assert mapped[HEADER_BYTES : HEADER_BYTES + 60_000] == payload.tobytes()
            taken = fill(tier, 65536, "b")
            assert len(taken) == MIB // 65536
            assert not any(mapped[:])
        os.close(fd)


def test_without_a_descriptor_for_a_new_arena_the_old_one_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(HostTier(MIB, arena_bytes=MIB)) as tier:
        slot = tier.allocate(65536, "a")
        assert slot is not None
        tier.free(slot)
        with monkeypatch.context() as patched:
            patched.setattr(arena_memory, "_new_memory", refused(errno.EMFILE))
            assert tier.allocate(65536, "b") is None, "a full tier, not a broken one"
        assert tier.used_bytes == MIB and tier.containers()[0].owner == "a"
        again = tier.allocate(65536, "a")
        assert again is not None and again.container == slot.container
        tier.free(again)
        other = tier.allocate(65536, "b")
        assert other is not None and tier.used_bytes == MIB and len(tier.containers()) == 1


@pytest.mark.parametrize("call", ["mmap.mmap", "fcntl.fcntl", "os.ftruncate"])
def test_an_arena_that_cannot_be_made_leaves_nothing(
    tier: HostTier, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched:
        patched.setattr(arena_memory, call.split(".")[0], Refusing(call))
        assert tier.allocate(8192, "a") is None
    assert len(os.listdir("/proc/self/fd")) == before and tier.used_bytes == 0
    assert tier.allocate(8192, "a") is not None


def test_an_arena_taken_over_gives_memory_back_as_fast_as_it_is_taken() -> None:
    """The old and the new arena hold at no moment more than one arena's memory."""
    with closing(HostTier(MIB, arena_bytes=MIB)) as tier:
        tier.free(fill(tier, MIB, "a")[0])
        tier.precreate("a", MIB)
        while tier.prefault_slice(MIB)[0] < MIB:
            pass
        old_fd = tier.arena(tier.containers()[0].container).readonly_fd()
        for taken in range(1, 17):
            slot = tier.allocate(65536, "b")
            assert slot is not None
            tier.view(slot)[:] = 1
            new_fd = tier.arena(slot.container).readonly_fd()
            held_bytes = sum(os.fstat(fd).st_blocks * 512 for fd in (old_fd, new_fd))
            os.close(new_fd)
            assert held_bytes <= MIB, taken
        os.close(old_fd)


def test_memory_that_cannot_be_taken_from_another_arena_costs_no_slot(
    tier: HostTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    for slot in fill(tier, 65536, "a"):
        tier.free(slot)
    first, *returned = use(tier, 65536, "b", 5)
    for slot in returned:
        tier.free(slot)
    with monkeypatch.context() as patched:
        patched.setattr(ArenaMemory, "punch", refused(errno.ENOMEM))
        taken = tier.allocate_run(8, 65536, "b")
        assert {slot.offset for slot in taken} == {slot.offset for slot in returned}, "those whose memory is there"
        assert tier.allocate_run(8, 65536, "b") == [], "a full tier, not a broken one"
        assert tier.state is TierState.FULL and "no memory" in tier.statistics().message
    later = fill(tier, 65536, "b")
    assert len({first, *taken, *later}) == tier.statistics().blocks == 4 * MIB // 65536


def test_it_says_whose_an_arena_is(tier: HostTier) -> None:
    slot = tier.allocate(8192, "a")
    assert slot is not None
    assert tier.owner(slot.container) == "a" and tier.owner(slot.container + 1) is None


def test_an_arena_that_is_shut_takes_no_block_and_gives_its_memory_to_the_next_ones(tier: HostTier) -> None:
    before_bytes = arena_memory_bytes()
    first, other = use(tier, 64 * 1024, "a", 3), use(tier, 64 * 1024, "b", 16)
    shut, spare = first[0].container, tier.precreate("a", MIB)
    assert spare == MIB
    number = max(report.container for report in tier.containers())
    tier.shut("a")
    tier.free(first.pop())
    later = fill(tier, 64 * 1024, "a")
    assert {slot.container for slot in later}.isdisjoint({shut, number, *(slot.container for slot in other)})
    assert len(later) == 32, "the memory of the empty one was given back"
    assert all(report.container != shut or not tier.makes_room(shut, 64 * 1024, "a") for report in tier.containers())
    assert {report.container for report in tier.convertible(64 * 1024, "a")} >= {shut}
    for slot in first:
        tier.free(slot)
    assert len(fill(tier, 64 * 1024, "a")) == 16
    assert arena_memory_bytes() - before_bytes <= tier.capacity_bytes


def test_charges_count_against_the_same_capacity(tier: HostTier) -> None:
    assert tier.charge(3 * MIB, "staging")
    assert not tier.charge(2 * MIB, "staging")
    slots = fill(tier, 65536, "a")
    assert len(slots) == MIB // 65536
    assert not tier.charge(4096, "ledger")
    assert tier.statistics().used_by["staging"] == 3 * MIB
    for slot in slots:
        tier.free(slot)
    assert tier.charge(4096, "ledger"), "an empty arena gives way to a charge"
    assert tier.statistics().used_bytes == 3 * MIB + 4096


def test_prefault_comes_in_slices_and_changes_nothing(tier: HostTier) -> None:
    header, payload = block(1, 50_000)
    slot = stored_slot(tier, header, payload, "a")
    assert tier.precreate("a", 2 * MIB) == 2 * MIB
    steps = []
    while not steps or steps[-1][0] < steps[-1][1]:
        steps.append(tier.prefault_slice(300_000))
        assert len(steps) < 20
    assert steps[0] == (300_000, 3 * MIB)
    assert steps[-1] == (3 * MIB, 3 * MIB)
    outcome, copy = get(tier, slot, header.key, 50_000)
    assert outcome.ok and np.array_equal(copy, payload)


def test_prefault_without_madvise_populates_all_the_same(tier: HostTier, monkeypatch: pytest.MonkeyPatch) -> None:
    class OldKernel:
        fallocate = arena_memory._libc.fallocate

        @staticmethod
        def madvise(*_arguments: object) -> int:
            ctypes.set_errno(errno.EINVAL)
            return -1

    monkeypatch.setattr(arena_memory, "_libc", OldKernel)
    header, payload = block(1, 50_000)
    slot = stored_slot(tier, header, payload, "a")
    assert tier.prefault_slice(MIB) == (MIB, MIB)
    fd = tier.arena(slot.container).readonly_fd()
    assert os.fstat(fd).st_blocks * 512 >= MIB
    os.close(fd)
    assert get(tier, slot, header.key, 50_000)[0].ok


def test_write_many_ends_each_write_once(tier: HostTier) -> None:
    blocks = [block(number, 12_000) for number in range(9)]
    slots = [tier.allocate(16384, "a") for _ in blocks]
    writes = [(s, h, segment_of(p)) for s, (h, p) in zip(slots, blocks, strict=True) if s is not None]
    ended: list[bool] = []

    def start(done: object) -> None:
        def all_ended(outcomes: Sequence[Outcome]) -> None:
            assert not ended
            ended.extend(outcome.ok for outcome in outcomes)
            done(outcomes[-1])  # type: ignore[operator]

        tier.write_many(image_run(writes), all_ended)

    finish_all([start])
    assert ended == [True] * len(blocks)
    for slot, (header, payload) in zip(slots, blocks, strict=True):
        assert slot is not None
        assert np.array_equal(get(tier, slot, header.key, 12_000)[1], payload)


def test_the_copy_is_checksummed_not_the_clients_memory(tier: HostTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that changes its staging memory during a put harms its own block, and never makes it look sound."""
    header, payload = block(1, 8192)
    as_copied = payload.copy()
    real = host_transfers.gather

    def copy_then_client_writes(destination: int, segments: object) -> None:
        real(destination, segments)  # type: ignore[arg-type]
        payload[:] = 0

    monkeypatch.setattr(host_transfers, "gather", copy_then_client_writes)
    slot = stored_slot(tier, header, payload, "a")
    outcome, copy = get(tier, slot, header.key, 8192)
    assert outcome.ok and np.array_equal(copy, as_copied)


def test_bytes_that_changed_in_memory_are_not_served(tier: HostTier) -> None:
    header, payload = block(1, 8192)
    slot = stored_slot(tier, header, payload, "a")
    tier.view(slot)[HEADER_BYTES + 100] ^= 1
    assert get(tier, slot, header.key, 8192)[0].kind.value == "corrupt"


def test_a_freed_slot_is_no_block_to_who_scans_the_arena(tier: HostTier) -> None:
    slot = stored_slot(tier, *block(1, 8192), "a")
    view = tier.view(slot)
    assert not isinstance(read_header(view[:HEADER_BYTES]), str)
    tier.free(slot)
    assert isinstance(read_header(view[:HEADER_BYTES]), str)


def arena_memory_bytes() -> int:
    """Return the bytes of all arenas of this process by the kernel's account, given up arenas too."""
    held: dict[int, int] = {}
    for number in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{number}"
        with suppress(OSError):
            if "kvstore-arena" in os.readlink(path):
                found = os.stat(path)
                held[found.st_ino] = found.st_blocks * 512
    return sum(held.values())


def use(tier: HostTier, nbytes: int, owner: str, slots: int) -> list[Slot]:
    """Slots with every page touched."""
    used = []
    for _ in range(slots):
        slot = tier.allocate(nbytes, owner)
        assert slot is not None
        tier.view(slot)[:] = 1
        used.append(slot)
    return used


def test_an_arena_that_changes_hands_twice_before_it_was_used_up_takes_no_more_than_the_capacity() -> None:
    before_bytes = arena_memory_bytes()
    with closing(HostTier(MIB, arena_bytes=MIB)) as tier:
        for owner, count in (("a", 256), ("b", 16), ("c", 8), ("d", 200), ("e", 256)):
            slots = use(tier, 4096, owner, count)
            assert arena_memory_bytes() - before_bytes <= MIB
            for slot in slots:
                tier.free(slot)


def test_memory_that_a_client_touches_again_after_it_went_to_another_arena_is_taken_back() -> None:
    before_bytes = arena_memory_bytes()
    with closing(HostTier(MIB, arena_bytes=MIB)) as tier:
        (first, *others) = use(tier, 4096, "a", 256)
        descriptor = tier.arena(first.container).readonly_fd()
        with mmap.mmap(descriptor, MIB, prot=mmap.PROT_READ) as mapped:
            os.close(descriptor)
            for slot in (first, *others):
                tier.free(slot)
            use(tier, 4096, "b", 100)
            assert sum(mapped[offset] for offset in range(0, 100 * 4096, 4096)) == 0
            assert arena_memory_bytes() - before_bytes > MIB  # a read of a hole makes a page
            use(tier, 4096, "b", 1)
            assert arena_memory_bytes() - before_bytes <= MIB
