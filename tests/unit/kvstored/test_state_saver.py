"""The saver of small state, over an index and a real process: what a stop, a crash and a missing tier leave saved."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstored import listening
from kvstored.lifecycle import Cause
from kvstored.state.databases import SLOT
from kvstored.state.removed import LIMIT
from kvstored.state.saver import INTERVAL_S, StateSaver
from kvstored.store.blocks import Residency
from kvstored.store.blocks.ghost import Ghost
from kvstored.store.blocks.usage import GROUP_SLOTS
from kvstored.telemetry import Counters
from tests.reference.state_at_scale import CHAIN, index_of, saver_of, status_kib, use

BLOCKS = 1 << 12


async def saved(directory: Path) -> StateSaver:
    """Save the uses of all blocks, and return a saver that has read nothing yet, over an index without uses."""
    residency = index_of(BLOCKS)
    saver = saver_of(residency, directory, Counters())
    assert await saver.restore()
    use(residency, "all", np.random.default_rng(1))
    await saver.save(is_last=True)
    await saver.process.close()
    return saver_of(index_of(BLOCKS), directory, Counters())


def test_a_stop_while_uses_are_entered_saves_nothing_empty(tmp_path: Path) -> None:
    async def run() -> None:
        saver = await saved(tmp_path)
        before = dict(await saver.process.read("usage"))
        entering = asyncio.Event()
        through = saver._runner.run_all

        async def stopped(steps):  # type: ignore[no-untyped-def]
            entering.set()
            await asyncio.sleep(60)
            return await through(steps)

        saver._runner.run_all = stopped  # type: ignore[method-assign]
        running = asyncio.create_task(saver.run())
        await entering.wait()
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        saver._runner.run_all = through  # type: ignore[method-assign]
        await saver.save(is_last=True)
        assert dict(await saver.process.read("usage")).keys() == before.keys()
        assert (np.frombuffer(saver._store.residency.rows.accesses, np.uint16)[:BLOCKS] == 1).all()
        await saver.process.close()

    asyncio.run(run())


@pytest.mark.parametrize("is_killed", [True, False])
def test_what_a_killed_daemon_was_to_remove_is_removed_after_the_next_start(tmp_path: Path, is_killed: bool) -> None:
    """Deleted entries stay in pages of the file until it is written anew, which a killed daemon does not do."""
    gone = b"tenant:gone"

    async def run() -> None:
        saver = await saved(tmp_path)
        assert await saver.restore()
        async with saver.process.transaction() as change:
            await change.put("names", [(gone, b"")])
        async with saver.process.transaction() as change:
            await change.keep_only("names", [])
        assert gone in saver.process.path.read_bytes()
        if not is_killed:
            await saver.save(is_last=True)  # nothing was deleted by order: nothing is owed
        await saver.process.close()
        later = saver_of(index_of(BLOCKS), tmp_path, Counters())
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
        saver = await saved(tmp_path)
        async with saver.process.transaction() as change:
            for name, entries in kept.items():
                await change.put(name, entries)
        assert await saver.restore()
        await saver.save(is_last=True)
        assert {name: await saver.process.read(name) for name in kept} == kept
        await saver.process.close()

    asyncio.run(run())


def test_a_call_by_name_waits_for_saved_names_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        saver: Any = SimpleNamespace(was_tried=asyncio.Event())
        named = False

        async def call(_: object) -> bool:
            return named

        asked = asyncio.create_task(listening._once_named(saver, call, None))
        await asyncio.sleep(0)
        named = True
        saver.was_tried.set()
        assert await asked
        saver.was_tried.clear()
        monkeypatch.setattr(listening, "NAMES_S", 0.01)
        assert await listening._once_named(saver, call, None)

    asyncio.run(run())


async def a_turn_that_stands_still(saver: StateSaver) -> tuple[asyncio.Task[None], asyncio.Event]:
    """Begin to save, and stop in the middle of the transaction until the event is set."""
    stands, goes_on = asyncio.Event(), asyncio.Event()
    through = saver._runner.run_all

    async def slow(steps):  # type: ignore[no-untyped-def]
        stands.set()
        await goes_on.wait()
        return await through(steps)

    saver._runner.run_all = slow  # type: ignore[method-assign]
    turn = asyncio.create_task(saver.save())
    await stands.wait()
    saver._runner.run_all = through  # type: ignore[method-assign]
    return turn, goes_on


def test_an_endurance_budget_is_saved_while_a_turn_is_under_way(tmp_path: Path) -> None:
    async def run() -> None:
        saver = await saved(tmp_path)
        assert await saver.restore()
        turn, _ = await a_turn_that_stands_still(saver)
        budgets = [asyncio.create_task(saver._save_budget(raw)) for raw in (b"1", b"2")]
        ended, _ = await asyncio.wait(budgets, timeout=30)
        assert len(ended) == 2 and not any(task.exception() for task in ended), "it waits for the turn"
        await turn
        assert saver.pause_s == 0.0, "the turn is repeated at once"
        use(saver._store.residency, "all", np.random.default_rng(1))
        turn, goes_on = await a_turn_that_stands_still(saver)
        budget = asyncio.create_task(saver._save_budget(b"3"))
        await asyncio.sleep(0)
        goes_on.set()
        await asyncio.gather(turn, budget)
        assert saver.pause_s >= INTERVAL_S, "a turn does not give way twice"
        await saver.process.close()
        assert dict(await saver.process.read("endurance")) == {b"budget": b"3"}
        await saver.process.close()

    asyncio.run(run())


def leave(residency: Residency, row: int) -> bytes:
    """Evict a block; return its key, which the ghost remembers."""
    key = residency.key(row)
    residency.remove(row, Cause.EVICTED, residency.last_access_ns(row))
    return key


Forget = Callable[[Residency, bytes, bytes], None]


async def killed_after(directory: Path, forget: Forget) -> tuple[Residency, list[bytes]]:
    """Save what was learned of two blocks that had left, delete by `forget`, and kill the process without a turn.
    Return the index of the next one, and which of their keys are in its file.
    """
    residency = index_of(BLOCKS)
    saver = saver_of(residency, directory, Counters())
    running = asyncio.create_task(saver.run())
    async with asyncio.timeout(30):
        while not saver.is_read:
            await asyncio.sleep(0.01)
    keys = [leave(residency, CHAIN - 1), leave(residency, 2 * CHAIN - 1)]
    await saver.save()
    forget(residency, *keys)
    async with asyncio.timeout(30):
        while not await saver.process.read("removed") and await saver.process.read("learned"):
            await asyncio.sleep(0.01)
    os.kill(saver.process.pid, signal.SIGKILL)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    await saver.process.close()
    later = saver_of(index_of(BLOCKS), directory, Counters())
    for row in (CHAIN - 1, 2 * CHAIN - 1):
        leave(later._store.residency, row)
    later._store.residency.tenants[0].ghost = Ghost(BLOCKS)
    assert await later.restore()
    assert later._owes_rewrite(is_last=True)
    await later.save()
    assert not await later.process.read("removed")
    found = later.process.path.read_bytes()
    await later.process.close()
    return later._store.residency, [key for key in keys if key in found]


def test_what_was_learned_of_a_deleted_block_does_not_come_back_after_a_kill(tmp_path: Path) -> None:
    residency, found = asyncio.run(killed_after(tmp_path, lambda index, first, _: index.forget(0, [first])))
    assert len(found) == 1
    assert residency.why_missing(0, found[0]).cause is Cause.EVICTED


def test_nothing_is_written_anew_while_entries_of_deleted_blocks_cannot_be_removed(tmp_path: Path) -> None:
    """A rewrite copies saved terms: if they name a deleted block, it has not removed every trace."""

    async def run() -> None:
        residency = index_of(BLOCKS)
        saver = saver_of(residency, tmp_path, Counters())
        assert await saver.restore()
        await saver.save()
        key, goes_well, save = residency.key(CHAIN - 1), False, saver.terms.save
        async with saver.process.transaction() as change:
            await change.put("pins", [(b"aa" + key, b"terms")])

        async def terms_saved() -> bool:
            if goes_well:
                async with saver.process.transaction() as change:
                    await change.remove("pins", [b"aa" + key])
            return goes_well and await save()

        saver.terms.save = terms_saved  # type: ignore[method-assign]
        residency.remove(CHAIN - 1, Cause.DROPPED, 1)
        await saver.save(is_last=True)
        assert saver._owes_rewrite(is_last=True)
        goes_well = True
        await saver.save(is_last=True)
        assert not saver._owes_rewrite(is_last=True) and key not in saver.process.path.read_bytes()
        await saver.process.close()

    asyncio.run(run())


def test_what_was_learned_of_a_deleted_tenant_does_not_come_back_after_a_kill(tmp_path: Path) -> None:
    assert asyncio.run(killed_after(tmp_path, lambda index, *_: index.forget(0, None)))[1] == []


def test_more_deletions_than_are_noted_give_up_what_was_learned(tmp_path: Path) -> None:
    def forget(index: Residency, *_: bytes) -> None:
        for number in range(LIMIT + 1):
            index.forget(0, [number.to_bytes(16, "big")])

    assert asyncio.run(killed_after(tmp_path, forget))[1] == []


def test_deletions_before_saved_state_is_read_take_bounded_memory(tmp_path: Path) -> None:
    async def run() -> None:
        residency = index_of(BLOCKS)
        saver = saver_of(residency, tmp_path, Counters())
        assert await saver.restore()
        key = leave(residency, CHAIN - 1)
        await saver.save(is_last=True)
        await saver.process.close()
        residency = index_of(BLOCKS)
        saver = saver_of(residency, tmp_path, Counters())
        for _ in range(4 * LIMIT):
            residency.forget(0, [key])
        removed = saver._removed
        assert removed.is_too_much and max(len(removed._early or ()), len(removed._unsaved)) <= LIMIT
        leave(residency, CHAIN - 1)
        residency.tenants[0].ghost = Ghost(BLOCKS)
        assert await saver.restore()
        assert residency.why_missing(0, key).cause is not Cause.EVICTED
        await saver.process.close()

    asyncio.run(run())


@pytest.mark.slow
def test_memory_of_a_large_transaction_is_given_back(tmp_path: Path) -> None:
    blocks = 1 << 18

    async def run() -> None:
        residency = index_of(blocks)
        saver = saver_of(residency, tmp_path, Counters())
        assert await saver.restore()
        before = status_kib(saver.process.pid, "VmRSS")
        use(residency, "all", np.random.default_rng(1))
        await saver.save()
        await saver.process.open()
        assert len(await saver.process.read("usage")) >= blocks // GROUP_SLOTS
        await saver.process.contents()  # once it has answered, it has given back
        assert status_kib(saver.process.pid, "VmRSS") - before < 7 << 10  # 4 or 5 MiB stay; without it, 23
        await saver.process.close()

    asyncio.run(run())
