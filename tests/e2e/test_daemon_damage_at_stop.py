"""A block whose copy on NVMe is found damaged while DRAM has it is on NVMe again after a stop, however soon that is."""

from __future__ import annotations

import tempfile
from pathlib import Path

from kvstored.store.assembly import Store
from tests.reference.clocked_daemon import ClockedDaemon
from tests.reference.conversations import put_conversation

BLOCKS = 4


def damage_all(store: Store) -> None:
    durable = store.residency.durable
    rows = [row for row in range(store.residency.rows.capacity) if store.residency.has(row, durable)]
    assert len(rows) == BLOCKS
    for row in rows:
        store.damage.found(durable, row, "a bit has flipped")


def test_damage_found_just_before_a_stop_costs_no_block() -> None:
    with tempfile.TemporaryDirectory(prefix="kvc-") as directory:
        daemon = ClockedDaemon(Path(directory), "host.warm_restart=off")
        daemon.start()
        try:
            with daemon.connect() as session:
                put_conversation(session, 1, BLOCKS, durability="always")

            async def damage_and_stop() -> None:
                damage_all(daemon.daemon.store)
                await daemon.daemon.stop()

            daemon._wait(damage_and_stop())
        finally:
            daemon.stop()
        again = ClockedDaemon(Path(directory), "host.warm_restart=off")
        again.start()
        try:
            assert again.ask(lambda store: len(store.residency)) == BLOCKS
        finally:
            again.stop()
