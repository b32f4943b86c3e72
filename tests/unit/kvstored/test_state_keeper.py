"""The keeper of small state, over an index and a real process: what a stop, a crash and a missing tier leave saved."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import numpy as np

from kvstored.state.keeper import StateKeeper
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
