"""Parts of warm restart by themselves: numbers of arenas, which arenas are handed out, blocks that are dropped."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore_proto.arena import DEVICE_ARENAS, HEADER_BYTES
from kvstore_proto.errors import KVStoreError
from kvstore_proto.v1 import handshake_pb2 as hs
from kvstore_tiers.adoption import HEADER
from kvstore_tiers.base import Slot
from kvstore_tiers.host import HostTier
from kvstored.clients.arena_grants import ArenaGrants
from kvstored.clients.tenants import TenantDirectory
from kvstored.lifetime.recovery import ArenaImport
from kvstored.lifetime.warm import restart
from kvstored.lifetime.warm.descriptor_holder import DescriptorHolder
from kvstored.lifetime.warm.former_clients import FormerClients, start_ticks
from kvstored.lifetime.warm.ledger import Ledger
from kvstored.lifetime.warm.restart import Adopted, WarmRestart
from kvstored.store.blocks import Residency
from kvstored.store.leases import LeaseTable
from kvstored.telemetry import Counters
from tests.reference.tiers import HOST

MIB = 1 << 20
SLOT = 16 << 10
OWNER = "ab" * 16


class Deaf(DescriptorHolder):
    """One that cannot be reached."""

    name = "deaf"

    def fetch(self) -> dict[str, int]:
        return {}

    def _send(self, name: str, descriptor: int) -> bool:
        return False

    def close(self, *, forget: bool) -> None:
        pass


@pytest.fixture
def host() -> Iterator[HostTier]:
    with closing(HostTier(4 * MIB, arena_bytes=MIB)) as tier:
        yield tier


def test_the_number_of_an_arena_that_was_not_kept_is_not_used_again(tmp_path: Path) -> None:
    """Clients have it mapped under that number, and go on using it where the epoch is the same."""
    ledger = Ledger(tmp_path)
    later_fd = os.dup(ledger.fd)
    with closing(HostTier(4 * MIB, arena_bytes=MIB, witness=WarmRestart(Deaf(), ledger, {}))) as tier:
        slot = tier.allocate(SLOT, OWNER)
        assert slot is not None
        with closing(Ledger(tmp_path, later_fd)) as later:  # what the process after a crash finds
            assert later.arenas() == [] and later.epoch == ledger.epoch
            assert later.next_arena == slot.container + 1
    ledger.close()


class Slow(Deaf):
    """One that takes two packets at a time, and is read only now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[str] = []
        self.queue = 0

    def _send(self, name: str, descriptor: int) -> bool:
        if self.queue == 2:
            return False
        self.queue += 1
        self.taken.append(f"{'keep' if descriptor >= 0 else 'drop'} {name}")
        return True


def test_what_a_kill_would_lose_is_kept_before_others_are_dropped() -> None:
    holder = Slow()
    assert holder.keep("a", 3) and holder.keep("b", 4)
    for name in ("a", "b"):
        holder.drop(name)
    assert not holder.keep("c", 5) and not holder.keep("d", 6)
    holder.queue = 0
    assert holder.retry() == ["c", "d"]
    holder.queue = 0
    assert holder.retry() == [] and holder.taken[-2:] == ["drop a", "drop b"]


async def _fall_behind(warm: WarmRestart, holder: Slow) -> None:
    running = asyncio.create_task(warm.run())
    await asyncio.sleep(0)  # it has begun to wait
    holder.queue = 2
    assert not holder.keep("late", 3)
    holder.queue = 0
    try:
        async with asyncio.timeout(30):
            while holder.unkept:
                await asyncio.sleep(0.01)
    finally:
        running.cancel()


def test_what_falls_behind_while_nothing_was_is_kept_before_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart, "LOOK_S", 3600.0)
    holder = Slow()
    with closing(Ledger(tmp_path)) as ledger:
        asyncio.run(_fall_behind(WarmRestart(holder, ledger, {}), holder))
    assert holder.taken == ["keep late"]


def test_an_arena_is_granted_without_a_look_at_the_others(host: HostTier, monkeypatch: pytest.MonkeyPatch) -> None:
    slot = host.allocate(SLOT, OWNER)
    assert slot is not None
    store: Any = SimpleNamespace(host=host, exporter_of=lambda _number, _tiers: None)
    arenas = ArenaGrants(store)
    monkeypatch.setattr(host, "containers", lambda: pytest.fail("a report of all arenas"))
    session: Any = SimpleNamespace(tenant=SimpleNamespace(index_name=OWNER), device_tiers=0)
    grant, descriptor = arenas.grant(session, hs.ArenaRequest(arena_id=slot.container))
    os.close(descriptor)
    assert (grant.arena_id, grant.size_bytes) == (slot.container, MIB)
    session.tenant.index_name = "another"
    for arena_id in (slot.container, slot.container + 1):
        with pytest.raises(KVStoreError, match=f"no arena {arena_id}"):
            arenas.grant(session, hs.ArenaRequest(arena_id=arena_id))
    with pytest.raises(KVStoreError, match=f"no chunk of device memory {DEVICE_ARENAS}"):
        arenas.grant(session, hs.ArenaRequest(arena_id=DEVICE_ARENAS))


def test_blocks_behind_one_that_is_dropped_are_entered_all_the_same(host: HostTier, tmp_path: Path) -> None:
    """A block that names itself as its parent is dropped; others name it as theirs."""
    keys = [number.to_bytes(16, "little") for number in range(1, 5)]
    headers = np.zeros(4, HEADER)
    slots: list[Slot] = []
    for depth, key in enumerate(keys):
        parent = keys[0] if depth <= 1 else keys[depth - 1]
        headers[depth] = (
            b"KVB1", 2, 0, key, parent, bytes(16), bytes(32), bytes(16), 0, 0, 0, SLOT - HEADER_BYTES, 1, 0, 0, depth,
            0, 0, bytes(16), 0,
        )  # fmt: skip
        slot = host.allocate(SLOT, OWNER)
        assert slot is not None
        slots.append(slot)
    residency = Residency(("host",))
    tenant = residency.tenant(OWNER)
    entering = ArenaImport(host, HOST, residency, TenantDirectory(tmp_path, (), "by-uid"), 1)
    found: Any = SimpleNamespace(headers=headers, slots=slots)
    entering.enter(found, tenant)
    assert entering.dropped_slots == 1 and len(entering.rows) == 3
    assert [residency.find(tenant, key) >= 0 and residency.has(residency.find(tenant, key), HOST) for key in keys] == [
        False, True, True, True,
    ]  # fmt: skip
    assert host.statistics().blocks == 3, "every slot is a block's or free"


@pytest.mark.parametrize(("adopted_chunk", "kept"), [(False, [1]), (True, [])])
def test_a_former_lease_on_device_memory_too(tmp_path: Path, adopted_chunk: bool, kept: list[int]) -> None:
    """The client may still read in DRAM where the lease's chunk is gone. Where the chunk is held again but the slot has
    no block, the slot will be used anew: the whole lease has ended.
    """
    in_dram, on_device = Slot(1, 0, SLOT, 1), Slot(DEVICE_ARENAS, 0, SLOT, 1)
    ledger = Ledger(tmp_path)
    ledger.open_session(5, os.getpid(), start_ticks(os.getpid()) or 0, b"t" * 16)
    ledger.record_lease(1, 5, [in_dram, on_device])
    ledger.record_lease(2, 5, [on_device])
    residency = Residency(("host",))
    tenant, key = residency.tenant(OWNER), bytes(16)
    (row,) = residency.store_run(
        tenant, [key], -1, HOST, [in_dram], fingerprint_id=0, group=0, payload_bytes=8, now_ns=1
    )
    leases = LeaseTable(residency.unpin_run, lambda slot: None)
    adopted = Adopted({(1, 0): row}, containers={1, DEVICE_ARENAS} if adopted_chunk else {1})

    async def restore(kept: Ledger) -> None:
        former = FormerClients(kept, leases, Counters())
        former.restore(adopted, residency, 1 << 60)
        former.close()

    with closing(Ledger(tmp_path, os.dup(ledger.fd))) as kept_ledger:
        ledger.close()
        asyncio.run(restore(kept_ledger))
    assert leases.of_session(5) == kept and leases.has_readers(in_dram) == bool(kept)
    assert not leases.has_readers(on_device), "the number names other memory from now on"
