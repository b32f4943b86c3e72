"""Memory runs short: the host tier gives arenas back instead of being killed, and grows again when there is room."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest

from kvstore_tiers.base import TierState
from kvstored.store.degraded.memory import MemoryReading, MemoryWatch
from kvstored.store.degraded.modes import Mode
from kvstored.store.transfer.resize import CALM_S, HostSizer
from tests.reference.small_store import SmallStore, small_store
from tests.reference.tiers import HOST, NVME

MIB = 1 << 20
MIN_FREE = 64 * MIB


def sizer(small: SmallStore, free: list[int]) -> HostSizer:
    """A sizer that sees `free[0]` bytes of free memory."""
    return HostSizer(
        small.store.host,
        small.store.rooms[HOST],
        lambda: MemoryReading(free[0], "the test"),
        small.store.modes,
        small.clock,
        small.store.counters,
        min_free_bytes=MIN_FREE,
        arena_bytes=MIB,
    )


async def look(small: SmallStore, sizing: HostSizer, seconds: float) -> None:
    for _ in range(round(seconds * 2)):
        small.clock.advance(s=0.5)
        sizing.tick()
        if sizing._shrinking is not None:
            await sizing._shrinking


def test_arenas_go_back_until_enough_is_free_and_blocks_stay_on_nvme(tmp_path: Path) -> None:
    async def run() -> None:
        async with small_store(tmp_path) as small:
            host, free = small.store.host, [4 * MIN_FREE]
            sizing = sizer(small, free)
            await small.fill(range(1, 300))
            before = host.used_bytes
            await look(small, sizing, 2)
            assert host.used_bytes == before, "nothing is given back without need"
            free[0] = MIN_FREE - 2 * MIB
            await look(small, sizing, 0.5)
            assert host.used_bytes <= before - 2 * MIB
            assert small.store.modes.mode("host") is Mode.SHRUNK
            assert "host.min_free" in small.store.modes.sentences()[0]
            assert small.store.counters["host_shrunk_bytes"] == before - host.used_bytes
            assert all(small.residency.has(small.find(number), NVME) for number in range(1, 300)), "nothing is lost"
            evicted = [number for number in range(1, 300) if not small.residency.has(small.find(number), HOST)]
            assert evicted
            assert await small.fetch(evicted[0]), "it is promoted again, into less room"
            assert host.used_bytes <= host.ceiling_bytes
            await sizing.close()

    asyncio.run(run())


def test_it_grows_again_in_steps_after_a_calm_time(tmp_path: Path) -> None:
    async def run() -> None:
        async with small_store(tmp_path) as small:
            host, free = small.store.host, [MIN_FREE - 4 * MIB]
            sizing = sizer(small, free)
            for number in range(1, 400):
                await small.put(number, mode="batch")
            await look(small, sizing, 0.5)
            ceiling = host.ceiling_bytes
            assert ceiling < host.capacity_bytes
            free[0] = 2 * MIN_FREE
            await look(small, sizing, CALM_S - 1)
            assert host.ceiling_bytes == ceiling, "pressure may only have paused"
            await look(small, sizing, 10)
            assert host.ceiling_bytes == host.capacity_bytes
            assert small.store.modes.mode("host") is Mode.OK
            await sizing.close()

    asyncio.run(run())


def test_staging_and_one_arena_are_always_kept(tmp_path: Path) -> None:
    async def run() -> None:
        async with small_store(tmp_path) as small:
            small.store.host.charge(MIB, "staging")
            sizing = sizer(small, [0])
            await small.fill(range(1, 300))
            await look(small, sizing, 20)
            assert small.store.host.ceiling_bytes == 2 * MIB
            assert small.store.host.used_bytes <= 2 * MIB
            assert await small.is_durable(1000), "it still serves"
            await sizing.close()

    asyncio.run(run())


def test_blocks_in_use_are_not_taken_and_the_next_look_tries_again(tmp_path: Path) -> None:
    async def run() -> None:
        async with small_store(tmp_path) as small:
            free = [MIN_FREE - 8 * MIB]
            sizing = sizer(small, free)
            await small.fill(range(1, 300))
            for number in range(1, 300):
                small.residency.pin(small.find(number))
            used = small.store.host.used_bytes
            await look(small, sizing, 2)
            assert small.store.host.used_bytes == used
            for number in range(1, 300):
                small.residency.unpin(small.find(number))
            await look(small, sizing, 2)
            assert small.store.host.used_bytes < used
            await sizing.close()

    asyncio.run(run())


@pytest.mark.slow
def test_no_memory_for_an_arena_is_a_full_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with small_store(tmp_path) as small:
            for number in range(1, 60):
                assert await small.is_durable(number)

            def refuse(*_: object) -> int:
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

            with monkeypatch.context() as patched:
                patched.setattr(os, "memfd_create", refuse)
                for number in range(60, 400):
                    await small.put(number)
                assert small.store.host.statistics().state is TierState.FULL
                assert "gives no memory" in small.store.host.statistics().message
                assert small.find(399) >= 0, "it made room among what it has"
            for number in range(400, 900):
                await small.put(number)
            assert small.store.host.statistics().state in (TierState.OK, TierState.FULL)

    asyncio.run(run())


# What is read


def files(root: Path, **texts: str) -> None:
    for name, text in texts.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def watch(tmp_path: Path) -> MemoryWatch:
    return MemoryWatch(tmp_path / "proc", tmp_path / "cgroup")


def test_the_machine_alone(tmp_path: Path) -> None:
    files(tmp_path, proc__meminfo="MemTotal: 100 kB\nMemAvailable:  2048 kB\n")
    assert watch(tmp_path).read() == MemoryReading(2 * MIB, "the machine")


def test_the_nearest_limit_of_all_cgroups_above_us_counts(tmp_path: Path) -> None:
    files(tmp_path, proc__meminfo="MemAvailable: 99999999 kB\n", proc__self__cgroup="0::/slice/unit\n")
    unit, above = tmp_path / "cgroup/slice/unit", tmp_path / "cgroup/slice"
    unit.mkdir(parents=True)
    (unit / "memory.max").write_text("max\n")
    (unit / "memory.current").write_text(f"{10 * MIB}\n")
    (above / "memory.max").write_text(f"{100 * MIB}\n")
    (above / "memory.high").write_text(f"{80 * MIB}\n")
    (above / "memory.current").write_text(f"{70 * MIB}\n")
    (above / "memory.stat").write_text(f"anon 5\ninactive_file {3 * MIB}\n")
    assert watch(tmp_path).read() == MemoryReading(13 * MIB, f"cgroup {above}")


def test_cgroups_of_version_1(tmp_path: Path) -> None:
    files(tmp_path, proc__meminfo="MemAvailable: 99999999 kB\n", proc__self__cgroup="4:cpu:/x\n7:memory:/box\n")
    box = tmp_path / "cgroup/memory/box"
    box.mkdir(parents=True)
    (box / "memory.limit_in_bytes").write_text(f"{50 * MIB}\n")
    (box / "memory.usage_in_bytes").write_text(f"{45 * MIB}\n")
    (box.parent / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (box.parent / "memory.usage_in_bytes").write_text("5\n")
    assert watch(tmp_path).read() == MemoryReading(5 * MIB, f"cgroup {box}")


def test_stalls_are_read_and_files_that_are_missing_say_nothing(tmp_path: Path) -> None:
    assert watch(tmp_path).read().free_bytes > 1 << 60
    files(tmp_path, proc__pressure__memory="some avg10=50.0 avg60=1\nfull avg10=12.5 avg60=0.1 total=5\n")
    assert watch(tmp_path).read().stalled_percent == 12.5


def test_this_machine_says_something_sensible() -> None:
    assert 0 < MemoryWatch().read().free_bytes < 1 << 50
