"""Room for blocks of many sizes, tenants and chains, among leases: what one allocation may cost, and that what stays is
whole.
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kvstore_proto.arena import slot_bytes
from kvstore_tiers.segments import segment_of
from kvstore_tiers.testing.transfers import block, finish
from kvstored.clock import NS_PER_S
from kvstored.store.blocks.check import check
from kvstored.store.transfer.room import NoSlot
from tests.reference.examples import examples
from tests.reference.small_store import SmallStore, small_store
from tests.reference.tiers import HOST, NVME

KIB = 1024
CONTAINER_BYTES = 1024 * KIB
SIZES = (4 * KIB, 15 * KIB, 60 * KIB, 250 * KIB, 400 * KIB)
SMALL = ("host.capacity=6MiB", "host.arena=1MiB", "nvme.capacity=8MiB", "nvme.slab=1MiB")
WITH_MEMORY = (*SMALL, "tier.far.capacity=4MiB", "tier.far.arena=1MiB", "nvme.capacity=64MiB")
TIERS = [
    pytest.param(HOST, SMALL, id="host"),
    pytest.param(NVME, SMALL, id="nvme"),
    pytest.param(HOST, WITH_MEMORY, id="host of three"),
    pytest.param(1, WITH_MEMORY, id="memory of three"),
]

puts = st.tuples(st.just("put"), st.sampled_from(range(3)), st.sampled_from(SIZES), st.integers(1, 40))
chains = st.tuples(st.just("continue"), st.integers(0, 9), st.sampled_from(SIZES), st.integers(1, 12))
others = st.tuples(st.sampled_from(["lease", "expire", "release", "use", "together"]), st.integers(0, 99))


@dataclass
class Model:
    """The plain model: what was stored, and the leases in force."""

    small: SmallStore
    position: int
    sizes: dict[int, int] = field(default_factory=dict)  # by number
    tenants: dict[int, str] = field(default_factory=dict)
    parents: dict[int, int | None] = field(default_factory=dict)
    leases: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # of chains
    refused: int = 0

    def held(self) -> dict[int, int]:
        """Bytes of each block's slot in the tier."""
        residency = self.small.residency
        rows = {number: self.small.find(number, self.tenants[number]) for number in self.sizes}
        return {
            number: residency.slot(row, self.position).nbytes
            for number, row in rows.items()
            if row >= 0 and residency.has(row, self.position)
        }

    async def put(self, tenant: str, payload_bytes: int, parent: int | None) -> int | None:
        """Store one more block; its number, None: refused. AssertionError when it evicted too much."""
        number = len(self.sizes) + 1
        before = self.held()
        row = await self.small.store_in(
            self.position, number, parent, tenant=tenant, payload_bytes=payload_bytes, uses=1
        )
        after = self.held()
        lost_bytes = sum(nbytes for other, nbytes in before.items() if other not in after)
        assert lost_bytes <= CONTAINER_BYTES + slot_bytes(payload_bytes), f"{lost_bytes} bytes went for one block"
        if row < 0:
            self.refused += 1
            return None
        self.sizes[number], self.tenants[number], self.parents[number] = payload_bytes, tenant, parent
        self.small.clock.advance(s=1)
        return number

    async def put_chain(self, tenant: str, payload_bytes: int, parent: int | None, blocks: int) -> None:
        for _ in range(blocks):
            number = await self.put(tenant, payload_bytes, parent)
            if number is None:
                break
            parent = number
        if parent is not None:
            self.ends.append(parent)

    async def continue_chain(self, which: int, payload_bytes: int, blocks: int) -> None:
        if self.ends:
            parent = self.ends.pop(which % len(self.ends))
            if self.small.find(parent, self.tenants[parent]) >= 0:
                await self.put_chain(self.tenants[parent], payload_bytes, parent, blocks)

    async def put_together(self) -> None:
        """Blocks of all sizes at once, of which each may change a container."""
        first = len(self.sizes) + 1
        numbers = range(first, first + 2 * len(SIZES))
        for number in numbers:
            self.sizes[number], self.tenants[number] = SIZES[number % len(SIZES)], f"tenant-{number % 3}"
            self.parents[number] = None
        await asyncio.gather(
            *(
                self.small.store_in(
                    self.position, number, tenant=self.tenants[number], payload_bytes=self.sizes[number]
                )
                for number in numbers
            )
        )

    def lease(self, which: int) -> None:
        held = sorted(self.held())
        if self.position != HOST or not held:
            return
        number = held[which % len(held)]
        row = self.small.find(number, self.tenants[number])
        residency, leases = self.small.residency, self.small.store.leases
        residency.pin(row)
        expires_ns = self.small.clock.monotonic_ns() + 10 * NS_PER_S
        slot = residency.slot(row, HOST)
        lease = leases.grant(1, residency.tenant_of(row), [residency.token(row)], [slot], expires_ns)
        self.leases.append(lease.lease_id)

    def do(self, what: str, which: int) -> None:
        if what == "lease":
            self.lease(which)
        elif what == "expire":
            self.small.clock.advance(s=20)
            self.small.store.leases.expire(self.small.clock.monotonic_ns())
        elif what == "release" and self.leases:
            self.small.store.leases.release(1, self.leases.pop(which % len(self.leases)))
        elif what == "use" and (held := sorted(self.held())):
            number = held[which % len(held)]
            self.small.residency.touch_run(
                [self.small.find(number, self.tenants[number])], self.small.clock.monotonic_ns()
            )

    def must_hold(self) -> None:
        """Books agree, no chain has a hole, and every block is what it was."""
        residency, tier = self.small.residency, self.small.store.tiers[self.position]
        assert check(residency) == [] and tier.check_books() == []
        statistics = tier.statistics()
        assert statistics.used_bytes <= statistics.capacity_bytes
        for number in self.held():
            row = self.small.find(number, self.tenants[number])
            parent = self.parents[number]
            assert parent is None or self.small.find(parent, self.tenants[number]) >= 0, "a hole in a chain"
            header, payload = block(number, self.sizes[number])
            copy, slot = np.zeros_like(payload), residency.slot(row, self.position)
            outcome = finish(lambda done: tier.read(slot, header.key, [segment_of(copy)], done))  # noqa: B023
            assert outcome.ok and np.array_equal(copy, payload), outcome


@pytest.mark.slow
@pytest.mark.parametrize(("position", "chosen"), TIERS)
@settings(max_examples=examples(25), deadline=None)
@given(steps=st.lists(st.one_of(puts, puts, chains, others), min_size=5, max_size=30))
def test_one_block_costs_at_most_a_container(
    position: int, chosen: tuple[str, ...], steps: list[tuple[object, ...]]
) -> None:
    async def run() -> None:
        with tempfile.TemporaryDirectory() as directory:
            async with small_store(Path(directory), *chosen) as small:
                model = Model(small, position)
                for step in steps:
                    match step:
                        case ("put", int(tenant), int(size), int(blocks)):
                            await model.put_chain(f"tenant-{tenant}", size, None, blocks)
                        case ("continue", int(which), int(size), int(blocks)):
                            await model.continue_chain(which, size, blocks)
                        case ("together", _):
                            await model.put_together()
                        case (str(what), int(which)):
                            model.do(what, which)
                model.must_hold()
                for lease_id in model.leases:
                    small.store.leases.release(1, lease_id)

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize(("position", "chosen"), TIERS)
def test_one_block_of_a_new_size_leaves_a_full_tier_nearly_full(
    tmp_path: Path, position: int, chosen: tuple[str, ...]
) -> None:
    """Chains of a conversation's length, whose blocks are spread over all containers, as a cache in use has them."""

    async def run() -> None:
        async with small_store(tmp_path, *chosen) as small:
            model = Model(small, position)
            for _ in range(4):
                for _chain in range(8):
                    if len(model.ends) < 8:
                        await model.put_chain("tenant-0", 60 * KIB, None, 4)
                    else:
                        await model.continue_chain(0, 60 * KIB, 4)
            full_bytes = sum(model.held().values())
            await model.put("tenant-0", 1000, None)
            assert sum(model.held().values()) >= full_bytes - CONTAINER_BYTES
            assert small.store.counters.snapshot()["relocated_blocks"] > 0
            model.must_hold()

    asyncio.run(run())


ROOMY = ("host.capacity=16MiB", "host.arena=1MiB", "nvme.capacity=24MiB", "nvme.slab=1MiB")
pieces = st.lists(
    st.tuples(st.integers(0, 5), st.integers(3, 15), st.booleans(), st.sampled_from(["", "lease", "use"])),
    min_size=4, max_size=12,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("position", [HOST, NVME])
@pytest.mark.parametrize("policy", ["lru", "chain-hazard"])
@settings(max_examples=examples(8), deadline=None, phases=[Phase.explicit, Phase.generate])
@given(pieces=pieces, wanted=st.integers(1, 12))
def test_blocks_that_leave_together_are_those_that_would_leave_one_by_one(
    position: int, policy: str, pieces: list[tuple[int, int, bool, str]], wanted: int
) -> None:
    """`pieces` continue chains, are made durable or not, and are leased or used; then `wanted` blocks want room."""

    async def left_behind(together: bool, count: int) -> tuple[int, object]:
        with tempfile.TemporaryDirectory() as directory:
            async with small_store(Path(directory), *ROOMY, f"host.policy={policy}", f"nvme.policy={policy}") as small:
                model, ends = Model(small, position), dict[int, int]()
                for chain, blocks, is_durable, then in pieces:
                    parent = ends.get(chain)
                    if parent is not None and small.find(parent, "tenant-0") < 0:
                        parent = None
                    await model.put_chain("tenant-0", 60 * KIB, parent, blocks)
                    if model.ends:
                        ends[chain] = model.ends[-1]
                    if is_durable and position == HOST and parent is not None and small.find(parent, "tenant-0") >= 0:
                        await small.writeback.write_through(small.find(parent, "tenant-0"), at_once=True)
                    model.do(then, chain)
                assert await small.writeback.flush(60.0) == 0
                room, tenant = small.store.rooms[position], small.residency.tenant("tenant-0")
                nbytes = slot_bytes(60 * KIB)
                while room.allocate_now(nbytes, tenant) is not None:
                    pass
                if together:
                    while count < wanted and (more := room.make_room(wanted - count, nbytes, tenant)):
                        count += more
                        assert len(room.allocate_run(more, nbytes, tenant)) == more
                else:
                    for _ in range(count):
                        assert not isinstance(await room.allocate_for(None, nbytes, tenant), NoSlot)
                assert check(small.residency) == [] and small.store.tiers[position].check_books() == []
                causes = [small.residency.why_missing(tenant, small.key(number)) for number in model.sizes]
                victim, store = room.next_victim(nbytes, tenant), small.store
                evicted = store.flows.tiers[position].evicted_blocks, store.counters["evicted_blocks"]
                return count, (sorted(model.held()), causes, evicted, victim < 0 or small.residency.key(victim))

    async def run() -> None:
        count, together = await left_behind(True, 0)
        assert (await left_behind(False, count))[1] == together

    asyncio.run(run())
