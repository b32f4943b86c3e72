"""Media as queues, machines and virtual time, against figures worked out by hand."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from importlib import resources
from itertools import pairwise
from pathlib import Path

import pytest

from kvstore_simulator.hit_value import ModelSize
from kvstore_simulator.machine import PROFILES, MediumSpec, load_machine
from kvstore_simulator.simulated_tiers import SimulatedLane, SimulatedMedium
from kvstore_simulator.virtual_time import Stuck, VirtualLoop, run_virtual
from kvstored.clock import NS_PER_S, ManualClock

S = NS_PER_S
FAST = SimulatedMedium(MediumSpec("fast", 1, 1e15, 1e15, 0.0, 64, True))


def shipped(profile: str) -> str:
    return resources.files("kvstore_simulator.profiles").joinpath(f"{profile}.toml").read_text()


def medium(**changes: object) -> SimulatedMedium:
    spec = MediumSpec("slow", 10**9, 100.0, 50.0, 0.5, 2, True)
    return SimulatedMedium(replace(spec, **changes))  # type: ignore[arg-type]


def times(lane: SimulatedLane, *transfers: tuple[int, float]) -> list[tuple[float, float]]:
    """Return when the bytes of each (bytes, asked at) began and ended to move, in seconds."""
    passages = [lane.send(nbytes, round(at * S)) for nbytes, at in transfers]
    return [(passage.begin_ns / S, passage.end_ns / S) for passage in passages]


def test_transfers_queue_for_the_bandwidth_and_wait_out_latencies_together() -> None:
    # 100 bytes take a second. The second one waits out its latency while the first one moves; the third one gets a
    # place when the first has ended, at 1.5 s.
    lane = SimulatedLane("up", medium(), FAST)
    assert times(lane, (100, 0), (100, 0), (100, 0)) == [(0.5, 1.5), (1.5, 2.5), (2.5, 3.5)]
    assert lane.waited_ns == (0 + 1 + 2) * S and lane.nbytes == 300


def test_small_transfers_are_bound_by_latency_and_places() -> None:
    lane = SimulatedLane("up", medium(parallel=2), FAST)
    assert times(lane, *[(1, 0)] * 4) == [(0.5, 0.51), (0.51, 0.52), (1.01, 1.02), (1.02, 1.03)]


def test_an_idle_medium_starts_anew() -> None:
    assert times(SimulatedLane("up", medium(), FAST), (100, 0), (100, 10)) == [(0.5, 1.5), (10.5, 11.5)]


@pytest.mark.parametrize(("duplex", "begins"), [(True, 0.5), (False, 1.5)])
def test_directions_share_a_medium_that_is_not_duplex(duplex: bool, begins: float) -> None:
    slow = medium(duplex=duplex)
    up, down = SimulatedLane("up", slow, FAST), SimulatedLane("down", FAST, slow)
    up.send(100, 0)
    passage = down.send(100, 0)
    assert (passage.begin_ns / S, passage.end_ns / S) == (begins, begins + 2), "writing is half as fast"
    assert slow.busy_ns == (2 * S if duplex else 3 * S)


def test_a_transfer_queues_at_the_slower_end_and_counts_at_both() -> None:
    slow = medium()
    lane = SimulatedLane("up", slow, FAST)
    lane.send(100, 0)
    assert FAST.writing.nbytes >= 100 and slow.reading.busy_ns == S
    other = SimulatedLane("other", FAST, SimulatedMedium(FAST.spec))
    assert other.send(100, 0).begin_ns == 0, "the fast end has time for others"


@pytest.mark.parametrize(("duplex", "ends"), [(False, 0.5 + 1 + 2), (True, 0.5 + 2)])
def test_a_copy_within_a_medium_reads_and_writes_each_byte(duplex: bool, ends: float) -> None:
    one = medium(duplex=duplex)
    assert SimulatedLane("within", one, one).send(100, 0).end_ns / S == ends


@pytest.mark.parametrize("name", PROFILES)
def test_profiles_that_ship_have_every_tier_and_say_where_figures_come_from(name: str) -> None:
    machine = load_machine(name)
    assert {"sram", "dram", "cxl", "nvme", "remote"} <= set(machine.media)
    assert ("hbm" in machine.media) == (name != "cpu-only")
    order = [machine.media[each].read_bytes_per_s for each in ("sram", "dram", "cxl", "nvme")]
    assert order == sorted(order, reverse=True)
    text = shipped(name)
    figures = [line for line in text.splitlines() if line.startswith(("capacity", "read_", "flops", "efficiency"))]
    assert all("#" in line for line in figures)


TOY = ModelSize("toy", parameters=1e9, layers=10, heads=8, kv_heads=2, head_dim=64)


def test_prefill_takes_what_its_operations_take() -> None:
    machine = load_machine("h100")
    rate = 989e12 * 0.5
    for first, last in ((0, 8192), (4096, 8192)):
        flops = 2e9 * (last - first) + 2 * 10 * 8 * 64 * (last**2 - first**2)
        assert machine.prefill_s(TOY, first, last) == pytest.approx(flops / rate)
        assert machine.times(4).prefill_s(TOY, first, last) == pytest.approx(flops / rate / 4)
    assert machine.prefill_s(TOY, 5, 5) == 0


def test_one_token_takes_reading_the_weights() -> None:
    machine = load_machine("h100")
    assert machine.prefill_s(TOY, 0, 1) == pytest.approx(2e9 / 3.35e12, rel=1e-3)
    assert machine.streamed_bytes(TOY, 0, 16384) > 2 * 2e9, "two passes over the weights, and the context"


def test_pieces_of_a_prompt_take_no_longer_than_the_whole() -> None:
    machine = load_machine("cpu-only")
    cuts = [0, 512, 1024, 3000, 8192]
    pieces = sum(machine.prefill_s(TOY, a, b, least_passes=0.0) for a, b in pairwise(cuts))
    assert pieces == pytest.approx(machine.prefill_s(TOY, 0, 8192), rel=1e-9)


def test_the_error_for_a_model_that_does_not_fit_names_the_devices_it_needs() -> None:
    large = replace(TOY, name="large", parameters=70e9)
    with pytest.raises(ValueError, match="--devices 2 or more"):
        load_machine("h100").pool_bytes(large)
    assert load_machine("h100").times(2).pool_bytes(large) == int(2 * 80e9 * 0.9 - 140e9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("efficiency = 0.5", "efficiency = 2"), "compute.efficiency must be a number, between 1e-06 and 1, got 2"),
        (("efficiency = 0.5", ""), r"\[compute\] lacks efficiency"),
        (("efficiency = 0.5", "efficiency = 0.5\nclock = 1"), r"\[compute\] has no key clock"),
        (("[tiers.cxl]", "[tiers.tape]"), "tiers are sram, hbm, dram, cxl, nvme, remote"),
        (('tier = "hbm"', 'tier = "sram"'), "engine.tier must name the tier"),
        (('capacity = "256GiB"', 'capacity = "much"'), "tiers.dram.capacity: 'much' is not a size"),
        (("duplex = true", 'duplex = "yes"'), "engine.duplex must be true or false"),
        (("[compute]", "[compute"), "is not TOML"),
        (("[compute]", "x = " + "[" * 5000 + "\n[compute]"), "is not TOML"),
        (("parallel = 4", "parallel = 0"), "engine.parallel must be a number"),
    ],
)
def test_a_profile_that_is_wrong_says_where(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    text = shipped("h100")
    assert change[0] in text
    (tmp_path / "mine.toml").write_text(text.replace(*change, 1))
    with pytest.raises(ValueError, match=message) as caught:
        load_machine(str(tmp_path / "mine.toml"))
    assert "mine.toml" in str(caught.value) and "\n" not in str(caught.value).strip()


def test_a_profile_of_ones_own_and_one_that_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(shipped("h100"))
    assert replace(load_machine(str(tmp_path / "mine.toml")), name="h100") == load_machine("h100")
    with pytest.raises(ValueError, match=r"'h10' is unknown.*did you mean h100"):
        load_machine("h10")


# Virtual time


def test_waiting_takes_no_time_and_goes_in_order() -> None:
    clock, woken = ManualClock(), []

    async def nap(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        woken.append((name, clock.monotonic_ns()))

    async def main(loop: VirtualLoop) -> str:
        async with asyncio.timeout(10_000):
            await asyncio.gather(nap("hour", 3600), nap("blink", 1e-6), nap("second", 1))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout_at(loop.time() + 5):
                await asyncio.Event().wait()
        return "done"

    assert run_virtual(clock, main) == "done"
    assert [name for name, _ in woken] == ["blink", "second", "hour"]
    assert [at for _, at in woken] == pytest.approx([1000, S, 3600 * S], abs=2)
    assert clock.monotonic_ns() == pytest.approx(3605 * S, abs=4)


def test_nothing_left_to_happen_is_said_and_so_is_a_callback_that_fails() -> None:
    async def hang(loop: VirtualLoop) -> None:
        await asyncio.Event().wait()

    with pytest.raises(Stuck):
        run_virtual(ManualClock(), hang)

    async def fail(loop: VirtualLoop) -> None:
        loop.at_ns(5, lambda: 1 // 0)
        await asyncio.sleep(1)

    with pytest.raises(ZeroDivisionError):
        run_virtual(ManualClock(), fail)
