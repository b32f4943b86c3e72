"""The keeper of small state, over an index and a real process: what a stop, a crash and a missing tier leave saved."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstored import listening
from kvstored.state.databases import SLOT
from kvstored.state.keeper import StateKeeper
from kvstored.store.blocks.usage import GROUP_SLOTS
from kvstored.telemetry import Counters
from tests.reference.state_at_scale import index_of, keeper_of, use

BLOCKS = 1 << 12


async def saved(directory: Path) -> StateKeeper:
    """Save the uses of all blocks, and return a keeper that has read nothing yet, over an index without uses."""
    residency = index_of(BLOCKS)
    keeper = keeper_of(residency, directory, Counters())
    assert await keeper.restore()
    use(residency, "all", np.random.default_rng(1))
    await keeper.save(is_last=True)
    await keeper.process.close()
    return keeper_of(index_of(BLOCKS), directory, Counters())


def test_a_stop_while_uses_are_entered_saves_nothing_empty(tmp_path: Path) -> None:
    async def run() -> None:
        keeper = await saved(tmp_path)
        before = dict(await keeper.process.read("usage"))
        entering = asyncio.Event()
        through = keeper._steps.through

        async def stopped(steps):  # type: ignore[no-untyped-def]
            entering.set()
            await asyncio.sleep(60)
            return await through(steps)

        keeper._steps.through = stopped  # type: ignore[method-assign]
        running = asyncio.create_task(keeper.run())
        await entering.wait()
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        keeper._steps.through = through  # type: ignore[method-assign]
        await keeper.save(is_last=True)
        assert dict(await keeper.process.read("usage")).keys() == before.keys()
        assert (np.frombuffer(keeper._store.residency.rows.accesses, np.uint16)[:BLOCKS] == 1).all()
        await keeper.process.close()

    asyncio.run(run())


@pytest.mark.parametrize("is_killed", [True, False])
def test_what_a_killed_daemon_was_to_remove_is_removed_after_the_next_start(tmp_path: Path, is_killed: bool) -> None:
    """Deleted entries stay in pages of the file until it is written anew, which a killed daemon does not do."""
    gone = b"tenant:gone"

    async def run() -> None:
        keeper = await saved(tmp_path)
        assert await keeper.restore()
        async with keeper.process.transaction() as change:
            await change.put("names", [(gone, b"")])
        async with keeper.process.transaction() as change:
            await change.keep_only("names", [])
        assert gone in keeper.process.path.read_bytes()
        if not is_killed:
            await keeper.save(is_last=True)  # nothing was deleted by order: nothing is owed
        await keeper.process.close()
        later = keeper_of(index_of(BLOCKS), tmp_path, Counters())
        assert await later.restore()
        await later.save()
        assert later.process.path.name == ("state-000002.mdb" if is_killed else "state-000001.mdb")
        assert not is_killed or not any(gone in path.read_bytes() for path in tmp_path.iterdir())
        assert len(await later.process.read("usage")) >= BLOCKS // GROUP_SLOTS
        await later.process.close()

    asyncio.run(run())


def test_a_run_without_nvme_keeps_what_is_known_of_it(tmp_path: Path) -> None:
    kept = {"names": [(b"tenant:uid-7", b"")], "quarantine": [(SLOT.pack(1, 2, 3, 4), b"why")]}

    async def run() -> None:
        keeper = await saved(tmp_path)
        async with keeper.process.transaction() as change:
            for name, entries in kept.items():
                await change.put(name, entries)
        assert await keeper.restore()
        await keeper.save(is_last=True)
        assert {name: await keeper.process.read(name) for name in kept} == kept
        await keeper.process.close()

    asyncio.run(run())


def test_a_call_by_name_waits_for_saved_names_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        keeper: Any = SimpleNamespace(was_tried=asyncio.Event())
        named = False

        async def call(_: object) -> bool:
            return named

        asked = asyncio.create_task(listening._once_named(keeper, call, None))
        await asyncio.sleep(0)
        named = True
        keeper.was_tried.set()
        assert await asked
        keeper.was_tried.clear()
        monkeypatch.setattr(listening, "NAMES_S", 0.01)
        assert await listening._once_named(keeper, call, None)

    asyncio.run(run())
