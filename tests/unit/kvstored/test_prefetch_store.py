"""Prefetch by prediction in the store, over real tiers: what reaches the predictor, and what is moved for it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore_predictor.base import Array, Guess, Hint, Piece, Predictor, PredictorRequest
from kvstore_tiers.testing.faulty import Fault
from kvstored.clock import NS_PER_S, ManualClock
from kvstored.completions import CompletionQueue
from kvstored.config import ConfigError, load_config
from kvstored.config.tiers import Start
from kvstored.predictor_names import PREDICTORS
from kvstored.store.assembly import Store
from kvstored.store.operations.durability import DurabilityMode
from kvstored.store.operations.records import GetRequest
from kvstored.store.policies import ChainHint
from kvstored.store.prefetch.guarded_predictor import GuardedPredictor
from kvstored.store.prefetch.on_hint import OnHint
from kvstored.store.residency import make_residency
from kvstored.store.transfer.lane import Refused
from kvstored.store.transfer.mover import Mover
from tests.reference.driven_store import DrivenStore, keys_of
from tests.reference.small_store import SETTINGS, SmallStore
from tests.reference.tiers import HOST, NVME

KEYS = keys_of(1, 5)
ON_BOTH = 1 << HOST | 1 << NVME


class Notes(Predictor):
    """Notes what it is given, and guesses `guessed`; `fails` at the next request."""

    name = "notes"

    def __init__(self) -> None:
        self.requests: list[tuple[int, list[bytes]]] = []
        self.hints: list[tuple[bytes, Hint]] = []
        self.forgotten: list[bytes] = []
        self.guessed: list[Guess] = []
        self.fails = False

    def requested(self, request: PredictorRequest, now_s: float) -> None:
        if self.fails:
            raise ZeroDivisionError("a mistake")
        self.requests.append((request.tenant, list(request.keys)))

    def hinted(self, tenant: int, key: bytes, hint: Hint, now_s: float) -> None:
        self.hints.append((key, hint))

    def guesses(self, now_s: float, horizon_s: float, limit: int) -> list[Guess]:
        return self.guessed

    def forget(self, tenant: int, keys: Iterable[bytes] | None) -> None:
        self.forgotten += keys or ()

    def export_state(self) -> Iterator[Piece]:
        return iter(())

    def import_state(self, state: dict[str, Array], later_s: float) -> None:
        raise ValueError("nothing is kept")


Scenario = Callable[[DrivenStore, ManualClock], Coroutine[None, None, None]]


def over_a_store(make: Callable[[], Predictor], tmp_path: Path, scenario: Scenario) -> None:
    async def main() -> None:
        clock = ManualClock()
        small = SmallStore(tmp_path, clock, "prefetch.enabled=true", predictor=make())
        try:
            await scenario(DrivenStore(small), clock)
            assert not small.residency.pins
        finally:
            await small.close()

    asyncio.run(main())


async def get(driven: DrivenStore, keys: list[bytes]) -> int:
    """The blocks of a get, once its events have been reported and the predictor has learned from them."""
    found = await driven.get(keys)
    for _ in range(2):
        await asyncio.sleep(0)
    return found.blocks


def test_a_request_is_reported_once_whatever_gets_and_puts_it_is_made_of(tmp_path: Path) -> None:
    notes = Notes()

    async def scenario(driven: DrivenStore, clock: ManualClock) -> None:
        await get(driven, KEYS[:3])
        driven.operations.get.acquire_mapped(driven.client, GetRequest(b"".join(KEYS[:3]), mapped_only=True))
        driven.operations.look_up.look_up(driven.client, b"".join(KEYS))
        await asyncio.sleep(0)
        await driven.put(KEYS[:2], DurabilityMode.BATCH)
        await driven.put(KEYS[:4], DurabilityMode.BATCH)
        assert notes.requests == [(driven.client.tenant_id, KEYS[:3])]
        clock.advance(ns=60 * NS_PER_S)
        await get(driven, KEYS)
        assert [keys for _, keys in notes.requests] == [KEYS[:3], KEYS]

    over_a_store(lambda: notes, tmp_path, scenario)


def test_a_put_that_no_get_came_before_is_a_request(tmp_path: Path) -> None:
    notes = Notes()

    async def scenario(driven: DrivenStore, clock: ManualClock) -> None:
        await driven.put(KEYS, DurabilityMode.BATCH)
        assert [keys for _, keys in notes.requests] == [KEYS]

    over_a_store(lambda: notes, tmp_path, scenario)


def test_a_hint_names_the_request_that_it_is_of_and_a_deletion_is_passed_on(tmp_path: Path) -> None:
    notes = Notes()

    async def scenario(driven: DrivenStore, clock: ManualClock) -> None:
        await get(driven, KEYS[:3])
        await driven.put(KEYS, DurabilityMode.BATCH)  # with its answer
        driven.operations.hints.hint(driven.client, KEYS, ChainHint(0.5), 2000)
        (hinted,) = notes.hints
        assert hinted == (KEYS[2], Hint(0.5, clock.monotonic_ns() / NS_PER_S + 2))
        await driven.operations.delete.delete(driven.client, KEYS)
        assert set(notes.forgotten) == set(KEYS)

    over_a_store(lambda: notes, tmp_path, scenario)


def test_a_predictor_learns_from_a_request_in_the_next_turn_or_before_it_is_asked() -> None:
    owed: list[Callable[[], None]] = []
    notes = Notes()
    guarded = GuardedPredictor(notes, owed.append)
    noted = []
    for at in range(2):
        guarded.requested(PredictorRequest(at, KEYS), float(at))
        noted.append(len(notes.requests))
    assert len(owed) == 1
    owed.pop()()
    noted.append(len(notes.requests))
    guarded.requested(PredictorRequest(2, KEYS), 2.0)
    guarded.guesses(2.0, 60.0, 8)
    noted.append(len(notes.requests))
    owed.pop()()
    assert noted == [0, 0, 2, 3] and [tenant for tenant, _ in notes.requests] == [0, 1, 2]


def test_a_predictor_that_fails_in_the_next_turn_is_not_asked_again() -> None:
    owed: list[Callable[[], None]] = []
    notes = Notes()
    guarded = GuardedPredictor(notes, owed.append)
    notes.fails = True
    for at in range(2):
        guarded.requested(PredictorRequest(at, KEYS), float(at))
    owed.pop()()
    assert guarded.failure == "ZeroDivisionError: a mistake"
    notes.fails = False
    guarded.requested(PredictorRequest(2, KEYS), 2.0)
    assert not owed and not notes.requests and guarded.guesses(2.0, 60.0, 8) == []


def test_a_predictor_that_fails_costs_no_request_and_is_not_asked_again(tmp_path: Path) -> None:
    notes = Notes()

    async def scenario(driven: DrivenStore, clock: ManualClock) -> None:
        await driven.put(KEYS, DurabilityMode.BATCH)
        notes.fails = True
        clock.advance(ns=60 * NS_PER_S)
        assert await get(driven, KEYS) == len(KEYS)
        notes.fails = False
        clock.advance(ns=60 * NS_PER_S)
        assert await get(driven, KEYS) == len(KEYS)
        driven.small.store.tick()
        assert len(notes.requests) == 1
        assert driven.small.store.prefetcher.statistics().failure == "ZeroDivisionError: a mistake"

    over_a_store(lambda: notes, tmp_path, scenario)


class Broken(Notes):
    def __init__(self) -> None:
        raise ValueError("a mistake")


def test_only_what_is_wrong_with_a_model_is_said_of_prefetch_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(*settings: str) -> None:
        config = load_config(None, [f"daemon.state_dir={tmp_path}", *SETTINGS, "prefetch.enabled=true", *settings])
        tiers = [config.host.open(Start())]
        completions = CompletionQueue(asyncio.get_running_loop())
        try:
            Store(config, ManualClock(), completions, make_residency(config, tiers), tiers)
        finally:
            tiers[0].close()

    with pytest.raises(ConfigError, match=r"prefetch\.model: .* does not exist"):
        asyncio.run(start("prefetch.predictor=learned", f"prefetch.model={tmp_path}/m.npz"))
    monkeypatch.setitem(PREDICTORS, "markov", f"{__name__}:Broken")
    with pytest.raises(ValueError, match=r"^a mistake$"):
        asyncio.run(start("prefetch.predictor=markov"))


@pytest.mark.parametrize(("probability", "due_s"), [(math.nan, 5.0), (0.9, math.inf)])
def test_a_guess_that_is_not_finite_turns_the_predictor_off(tmp_path: Path, probability: float, due_s: float) -> None:
    notes = Notes()

    async def scenario(driven: DrivenStore, clock: ManualClock) -> None:
        await driven.put_on_nvme_alone(KEYS)
        assert await get(driven, KEYS) == len(KEYS)
        driven.leave_host(KEYS)
        notes.guessed = [Guess(driven.client.tenant_id, KEYS[-1], len(KEYS), probability, 5.0, due_s, 1.0)]
        clock.advance(ns=NS_PER_S)
        driven.small.store.tick()
        await driven.small.settle()
        status = driven.small.store.prefetcher.statistics()
        assert "not finite" in status.failure and status.guesses == 0

    over_a_store(lambda: notes, tmp_path, scenario)


def hint_due(driven: DrivenStore, due_in_ms: int) -> None:
    driven.operations.hints.hint(driven.client, KEYS, ChainHint(), due_in_ms)


async def map_by_hint(driven: DrivenStore, clock: ManualClock, due_in_ms: int) -> None:
    """Hint at what is on NVMe alone and let time pass until it is in DRAM too."""
    await driven.put_on_nvme_alone(KEYS)
    hint_due(driven, due_in_ms)
    await until_mapped(driven, clock)


async def until_mapped(driven: DrivenStore, clock: ManualClock) -> None:
    for _ in range(400):
        clock.advance(ns=NS_PER_S // 20)
        driven.small.store.tick()
        await asyncio.sleep(0.005)
        if all(driven.tiers_of(key) == ON_BOTH for key in KEYS):
            return


@pytest.mark.parametrize(("out", "expected"), [(KEYS[1:3], KEYS), (KEYS[:4], KEYS[4:]), (KEYS[:1], KEYS[1:])])
def test_what_made_room_for_the_end_of_its_chain_is_fetched_and_what_an_engine_holds_is_not(
    tmp_path: Path, out: list[bytes], expected: list[bytes]
) -> None:
    """A put whose chain is worth least takes the room of that chain's own blocks."""

    async def scenario(driven: DrivenStore, clock: ManualClock) -> None:
        await driven.put(KEYS, DurabilityMode.ALWAYS)
        driven.leave_host(out)
        hint_due(driven, 2000)
        await pass_time(driven, clock, 80)
        assert [key for key in KEYS if driven.tiers_of(key) == ON_BOTH] == expected

    over_a_store(OnHint, tmp_path, scenario)


def test_what_a_hint_says_is_due_is_mapped_before_the_request(tmp_path: Path) -> None:
    async def scenario(driven: DrivenStore, clock: ManualClock) -> None:
        await map_by_hint(driven, clock, 5000)
        assert [driven.tiers_of(key) for key in KEYS] == [ON_BOTH] * len(KEYS)
        assert driven.small.store.prefetcher.statistics().all.waiting_blocks == len(KEYS)
        clock.advance(ns=2 * NS_PER_S)
        assert await get(driven, KEYS) == len(KEYS)
        figures = driven.small.store.prefetcher.statistics().all
        assert (figures.used_blocks, figures.demanded_blocks, figures.wasted_share) == (len(KEYS), 0, 0.0)
        assert driven.small.store.counters["predicted_used_blocks"] == len(KEYS)

    over_a_store(OnHint, tmp_path, scenario)


def test_what_no_request_comes_for_is_waste(tmp_path: Path) -> None:
    async def scenario(driven: DrivenStore, clock: ManualClock) -> None:
        await map_by_hint(driven, clock, 5000)
        clock.advance(ns=300 * NS_PER_S)
        driven.small.store.tick()
        figures = driven.small.store.prefetcher.statistics().all
        assert (figures.wasted_blocks, figures.evicted_blocks, figures.waiting_blocks) == (len(KEYS), 0, 0)

    over_a_store(OnHint, tmp_path, scenario)


async def pass_time(
    driven: DrivenStore, clock: ManualClock, ticks: int, until: Callable[[], bool] = lambda: False
) -> None:
    for _ in range(ticks):
        clock.advance(ns=NS_PER_S // 20)
        driven.small.store.tick()
        await asyncio.sleep(0.002)
        if until():
            return


def test_a_request_gets_what_is_under_way_for_it_though_its_hint_is_spent(tmp_path: Path) -> None:
    """An engine asks for what is mapped first. That ends the hint, and the plans that follow want nothing."""

    async def scenario(driven: DrivenStore, clock: ManualClock) -> None:
        await driven.put_on_nvme_alone(KEYS)
        driven.small.disk.plan(Fault("read", "delay", 1, 1, delay_s=0.3))
        hint_due(driven, 1000)
        prefetcher = driven.small.store.prefetcher
        await pass_time(driven, clock, 40, lambda: prefetcher.statistics().under_way_blocks == len(KEYS))
        assert prefetcher.statistics().under_way_blocks == len(KEYS)
        driven.operations.get.acquire_mapped(driven.client, GetRequest(b"".join(KEYS), mapped_only=True))
        getting = asyncio.ensure_future(driven.get(KEYS))
        await pass_time(driven, clock, 20)
        assert (await getting).blocks == len(KEYS)

    over_a_store(OnHint, tmp_path, scenario)


def test_a_lane_that_refuses_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(driven: DrivenStore, clock: ManualClock) -> None:
        await driven.put_on_nvme_alone(KEYS)
        submit, refusals = Mover.submit, iter([Refused.QUEUE_FULL] * 2)

        def submit_later(mover: Mover, *arguments: Any) -> Any:
            return next(refusals, None) or submit(mover, *arguments)

        monkeypatch.setattr(Mover, "submit", submit_later)
        hint_due(driven, 1000)
        await until_mapped(driven, clock)
        assert [driven.tiers_of(key) for key in KEYS] == [ON_BOTH] * len(KEYS)
        assert driven.small.store.prefetcher.statistics().under_way_blocks == 0

    over_a_store(OnHint, tmp_path, scenario)


def test_a_put_that_names_a_block_twice_harms_nothing(tmp_path: Path) -> None:
    async def scenario(driven: DrivenStore, clock: ManualClock) -> None:
        await map_by_hint(driven, clock, 1000)
        clock.advance(ns=20 * NS_PER_S)
        await driven.put([KEYS[0], KEYS[0]], DurabilityMode.BATCH)
        status = driven.small.store.prefetcher.statistics()
        assert status.failure == "" and status.all.used_blocks == 1

    over_a_store(OnHint, tmp_path, scenario)
