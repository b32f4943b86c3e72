"""Many lives of a host tier, each ended by a kill somewhere, each taken over by the next, against a plain model.

What is killed is this half of a daemon: arenas, ledger, holder, residency and leases, of which nothing is closed or
settled; what outlives it are the descriptors that the holder had. A kill may come between any two calls of the holder.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvstore_proto.arena import HEADER_BYTES, BlockHeader
from kvstore_proto.identity import NO_PARENT
from kvstore_tiers.arena import Arena
from kvstore_tiers.base import Slot
from kvstore_tiers.host import HostTier
from kvstore_tiers.segments import segment_of
from kvstore_tiers.testing.transfers import finish, get
from kvstored.clients.tenants import TenantDirectory
from kvstored.clock import SystemClock
from kvstored.lifecycle import Cause
from kvstored.lifetime.warm.descriptor_holder import DescriptorHolder
from kvstored.lifetime.warm.former_clients import FormerClients, start_ticks
from kvstored.lifetime.warm.ledger import Ledger
from kvstored.lifetime.warm.restart import LEDGER_NAME, WarmRestart
from kvstored.store.blocks import Residency
from kvstored.store.leases import LeaseTable
from kvstored.telemetry import Counters
from tests.reference.examples import each_nth, examples
from tests.reference.tiers import HOST

ARENA = 128 << 10
CAPACITY = 8 * ARENA
OWNERS = ("0a" * 16, "0b" * 16)
SIZES = (4096, 12_288, 28_672)  # of slots
SESSIONS = 4


class Killed(BaseException):
    """The process is no more."""


@dataclass(frozen=True)
class Block:
    owner: str
    key: bytes
    parent: bytes
    depth: int
    nbytes: int

    @property
    def header(self) -> BlockHeader:
        return BlockHeader(
            self.key, self.parent, bytes(32), bytes.fromhex(self.owner), self.nbytes, tokens=self.key[:4],
            depth=self.depth,
        )  # fmt: skip

    @property
    def payload(self) -> np.ndarray:  # type: ignore[type-arg]
        seed = int.from_bytes(self.key, "little")
        return np.random.default_rng(seed).integers(0, 256, self.nbytes, dtype=np.uint8)


@dataclass
class World:
    """The things that outlive each daemon: kept descriptors, clients with their views, and the
    answers they received.
    """

    state_dir: Path
    kept: dict[str, int] = field(default_factory=dict)
    blocks: dict[bytes, Block] = field(default_factory=dict)  # those that must be there
    unsure: set[bytes] = field(default_factory=set)  # stored or removed when the kill came
    views: dict[int, tuple[int, list[tuple[mmap.mmap, Slot, Block]]]] = field(default_factory=dict)  # by lease
    numbers: int = 0
    is_short: bool = False  # a process that had no room for all arenas was killed before it could say what it dropped


class Keeping(DescriptorHolder):
    """Keeps descriptors in the world; the process may be killed before or after any call."""

    name = "test"

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self.calls_left = -1

    def fetch(self) -> dict[str, int]:
        self._kept.update(self._world.kept)
        return {name: os.dup(descriptor) for name, descriptor in self._world.kept.items()}

    def _send(self, name: str, descriptor: int) -> bool:
        self._live()
        before = self._world.kept.pop(name, -1)
        if before >= 0:
            os.close(before)
        if descriptor >= 0:
            self._world.kept[name] = os.dup(descriptor)
        self._live()
        return True

    def _live(self) -> None:
        self.calls_left -= 1
        if self.calls_left == 0:
            raise Killed

    def close(self, *, forget: bool) -> None:
        raise AssertionError("nothing is closed")


class Life:
    """One process, from taking over to its kill."""

    def __init__(self, world: World, capacity: int, calls: int) -> None:
        self.world = world
        self.holder = Keeping(world)
        kept = self.holder.fetch()
        ledger_fd = kept.pop(LEDGER_NAME, None)
        self.ledger = Ledger(world.state_dir, ledger_fd)
        if ledger_fd is None:
            self.holder.keep(LEDGER_NAME, self.ledger.fd)
        self.holder.calls_left = calls
        self.warm = WarmRestart(self.holder, self.ledger, kept)
        self.arenas: list[Arena] = []
        self.tier = HostTier(
            capacity, arena_bytes=ARENA, witness=self.warm, first_number=self.ledger.next_arena, copy_threads=1
        )
        self.residency = Residency(("host",))
        self.leases = LeaseTable(self._unpin, self.tier.free, self.tier.retire)
        self.former = FormerClients(self.ledger, self.leases, Counters())

    def take_over(self) -> int:
        """Take over, and return how many arenas were dropped."""
        tenants = TenantDirectory(self.world.state_dir, (), "by-uid")
        adopted = self.warm.adopt([self.tier], self.residency, tenants, SystemClock())
        self.former.restore(adopted, self.residency, 1 << 62)
        assert adopted.dropped_slots == 0
        return adopted.dropped_arenas

    def end(self) -> None:
        """End as by a kill: the system closes descriptors and ends threads, and does nothing else."""
        self.holder.calls_left = -1
        with suppress(RuntimeError):
            self.former.close()
        self.tier._transfers.close()
        descriptors = {self.ledger.fd, *self.warm._kept.values()}
        for arena in {id(each): each for each in (*self.warm._arenas.values(), *self.tier._arenas)}.values():
            each: Arena | None = arena
            while each is not None:
                descriptors.add(each.fd)
                each.fd, following = -1, each._donor
                each._donor, each = None, following
        for descriptor in descriptors:
            with suppress(OSError):  # those that it had just parted with
                os.close(descriptor)

    def _unpin(self, tokens: object) -> None:
        for row in map(self.residency.current, tokens):  # type: ignore[call-overload]
            if row >= 0:
                self.residency.unpin(row)

    def row(self, block: Block) -> int:
        row = self.residency.find(self.residency.tenant(block.owner), block.key)
        return row if row >= 0 and self.residency.has(row, HOST) else -1

    def held_bytes(self) -> int:
        """Memory of all arenas that this process or the holder has, by the kernel's account."""
        descriptors = [fd for name, fd in self.world.kept.items() if name != LEDGER_NAME]
        for arena in self.tier._arenas:
            each: Arena | None = arena
            while each is not None:
                descriptors.append(each.fd)
                each = each._donor
        found = map(os.fstat, descriptors)
        return sum({status.st_ino: status.st_blocks * 512 for status in found}.values())

    # What a daemon does

    def store(self, chosen: np.random.Generator) -> None:
        """One more block of a chain, or the first of one."""
        world = self.world
        owner = OWNERS[chosen.integers(2)]
        tenant = self.residency.tenant(owner)
        mine = [block for block in world.blocks.values() if block.owner == owner]
        before = mine[chosen.integers(len(mine))] if mine and chosen.random() < 0.7 else None
        world.numbers += 1
        block = Block(
            owner, world.numbers.to_bytes(16, "little"), before.key if before else NO_PARENT,
            before.depth + 1 if before else 0, int(chosen.choice(SIZES)) - HEADER_BYTES,
        )  # fmt: skip
        world.unsure.add(block.key)
        slot = self.tier.allocate(block.nbytes + HEADER_BYTES, owner)
        if slot is None:
            world.unsure.discard(block.key)
            self.forget_leaf(chosen)
            return
        if chosen.random() < 0.1:  # a put that was never written, nor answered
            self.tier.free(slot)
            world.unsure.discard(block.key)
            return
        done = finish(partial(self.tier.write, slot, block.header, [segment_of(block.payload)]))
        assert done.ok
        row = self.residency.insert(
            tenant, block.key, block.parent, fingerprint_id=1, group=0, depth=block.depth,
            payload_bytes=block.nbytes, now_ns=1,
        )  # fmt: skip
        self.residency.attach(row, HOST, slot, 1)
        world.unsure.discard(block.key)
        world.blocks[block.key] = block

    def forget_leaf(self, chosen: np.random.Generator) -> None:
        leaves = [b for b in self.world.blocks.values() if self.residency.may_forget(self.row(b))]
        if leaves:
            self._remove(leaves[chosen.integers(len(leaves))], Cause.EVICTED)

    def delete(self, chosen: np.random.Generator) -> None:
        """A block, even one that clients read."""
        blocks = [b for b in self.world.blocks.values() if not self.residency.rows.links[self.row(b)]]
        if blocks:
            self._remove(blocks[chosen.integers(len(blocks))], Cause.INVALIDATED)

    def forget_owner(self, chosen: np.random.Generator) -> None:
        """Empties arenas, which go to others."""
        owner = OWNERS[chosen.integers(2)]
        for block in sorted(self.world.blocks.values(), key=lambda block: -block.depth):
            if block.owner == owner:
                self._remove(block, Cause.INVALIDATED)

    def _remove(self, block: Block, cause: Cause) -> None:
        self.world.unsure.add(block.key)
        del self.world.blocks[block.key]
        for taken in self.residency.remove(self.row(block), cause, 1):
            self.leases.retire(taken.slot, self.residency.tenant(block.owner))
        self.world.unsure.discard(block.key)

    def lend(self, chosen: np.random.Generator) -> None:
        blocks = list(self.world.blocks.values())
        owner = OWNERS[chosen.integers(2)]
        blocks = [block for block in blocks if block.owner == owner]
        if not blocks:
            return
        session = int(chosen.integers(1, 1 + SESSIONS)) * 2 + OWNERS.index(owner)
        picked = [blocks[at] for at in chosen.choice(len(blocks), min(len(blocks), 3), replace=False)]
        rows = [self.row(block) for block in picked]
        self.residency.pin_run(rows)
        if not self.is_known(session):
            self.ledger.open_session(
                session, os.getpid(), start_ticks(os.getpid()) or 0, session.to_bytes(16, "little")
            )
        slots = [self.residency.slot(row, HOST) for row in rows]
        lease = self.leases.grant(
            session, self.residency.tenant(owner), [self.residency.token(row) for row in rows], slots, 1 << 62
        )
        views = []
        for slot, block in zip(slots, picked, strict=True):
            descriptor = self.tier.arena(slot.container).readonly_fd()
            views.append((mmap.mmap(descriptor, ARENA, prot=mmap.PROT_READ), slot, block))
            os.close(descriptor)
        self.world.views[lease.lease_id] = (session, views)

    def give_back(self, chosen: np.random.Generator) -> None:
        if self.world.views:
            lease_id = list(self.world.views)[chosen.integers(len(self.world.views))]
            session, _ = self.world.views.pop(lease_id)
            assert self.leases.release(session, lease_id)

    def end_session(self, chosen: np.random.Generator) -> None:
        session = int(chosen.integers(1, 1 + SESSIONS)) * 2 + int(chosen.integers(2))
        for lease_id in [number for number, (owner, _) in self.world.views.items() if owner == session]:
            del self.world.views[lease_id]
        self.leases.release_session(session)
        if self.is_known(session):
            self.ledger.close_session(session)

    def is_known(self, session: int) -> bool:
        return session in self.ledger._row_of_session

    # What must be

    def check(self, capacity: int) -> None:
        world = self.world
        assert self.held_bytes() <= capacity and self.tier.used_bytes <= capacity
        for block in world.blocks.values():
            row = self.row(block)
            assert row >= 0, f"{block} is not there"
            outcome, payload = get(self.tier, self.residency.slot(row, HOST), block.key, block.nbytes)
            assert outcome.ok and np.array_equal(payload, block.payload)
        assert self.residency.copies[HOST].blocks == len(world.blocks), "what was removed is there again"
        for _, views in world.views.values():
            for memory, slot, block in views:
                seen = np.frombuffer(memory, np.uint8, block.nbytes, slot.offset + HEADER_BYTES)
                assert np.array_equal(seen, block.payload), "a reader's bytes changed"


ACTIONS = (
    (Life.store, 0.72), (Life.forget_leaf, 0.08), (Life.delete, 0.04), (Life.forget_owner, 0.01), (Life.lend, 0.08),
    (Life.give_back, 0.05), (Life.end_session, 0.02),
)  # fmt: skip


async def live(world: World, chosen: np.random.Generator, capacity: int) -> None:
    """Live from taking over to the kill."""
    life = Life(world, capacity, int(chosen.integers(1, 40)) if chosen.random() < 0.7 else -1)
    try:
        world.is_short |= capacity < CAPACITY
        settle(world, life, life.take_over())
        life.check(capacity)
        for _ in range(chosen.integers(0, 120)):
            action = ACTIONS[chosen.choice(len(ACTIONS), p=[share for _, share in ACTIONS])][0]
            action(life, chosen)
        life.check(capacity)
    except Killed:
        pass
    finally:
        life.end()


def settle(world: World, life: Life, dropped: int) -> None:
    """Settle what could be there or not: it is or is not from here on; dropped arenas took blocks and readers' rights
    along.
    """
    for key in world.unsure:
        world.blocks.pop(key, None)
    for tenant in map(life.residency.tenant, OWNERS):
        for key in world.unsure:
            row = life.residency.find(tenant, key)
            if row >= 0:
                life.residency.remove(row, Cause.INVALIDATED, 1)
    world.unsure.clear()
    assert world.is_short or not dropped
    if world.is_short:
        world.blocks = {key: block for key, block in world.blocks.items() if life.row(block) >= 0}
        world.views = {
            number: held for number, held in world.views.items() if number in life.leases.of_session(held[0])
        }
    world.is_short = False


@pytest.mark.parametrize("seed", each_nth(range(6), 6))
def test_lives_one_after_the_other(tmp_path: Path, seed: int) -> None:
    chosen = np.random.default_rng(seed)
    world = World(tmp_path)
    try:
        for _ in range(max(15, examples(40))):
            asyncio.run(live(world, chosen, CAPACITY - ARENA * int(chosen.choice(4, p=(0.7, 0.1, 0.1, 0.1)))))
    finally:
        for descriptor in world.kept.values():
            os.close(descriptor)
