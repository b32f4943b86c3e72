"""Every predictor keeps its contract. See kvstore_predictor.base for the obligations."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable

import numpy as np
import pytest

from kvstore_predictor.base import Array, Guess, Hint, Predictor, PredictorRequest
from kvstore_predictor.ensemble import Ensemble
from kvstore_predictor.learned import LearnedPredictor
from kvstore_predictor.markov import Markov
from kvstore_predictor.return_trees import without_trees
from kvstore_predictor.session_return import SessionReturn
from tests.reference.examples import each_nth, quick_are
from tests.reference.return_model import small_trees

PREDICTORS: dict[str, Callable[[], Predictor]] = {
    SessionReturn.name: SessionReturn,
    Markov.name: Markov,
    Ensemble.name: Ensemble,
    "learned, without trees": lambda: LearnedPredictor(without_trees()),
    LearnedPredictor.name: lambda: LearnedPredictor(small_trees()),
}


@pytest.fixture(params=quick_are(sorted(PREDICTORS), ["without" not in name for name in sorted(PREDICTORS)]))
def make(request: pytest.FixtureRequest) -> Callable[[], Predictor]:
    return PREDICTORS[request.param]


@functools.cache
def key(tenant: int, session: int, block: int) -> bytes:
    return b"tnt" + tenant.to_bytes(1, "big") + session.to_bytes(4, "big") + block.to_bytes(8, "big")


def drive(predictor: Predictor, *, requests: int = 300, tenants: int = 3, seed: int = 1) -> float:
    """Sessions of 12 blocks and more, each of which goes on every few seconds; the time of the last request."""
    chance, now_s = random.Random(seed), 100.0
    lengths = {(tenant, session): 12 for tenant in range(tenants) for session in range(8)}
    for number in range(requests):
        now_s += chance.expovariate(4.0)
        tenant, session = chance.choice(sorted(lengths))
        lengths[tenant, session] += chance.randint(0, 2)
        keys = [key(tenant, session, block) for block in range(lengths[tenant, session])]
        predictor.requested(PredictorRequest(tenant, keys, number, 512 * len(keys)), now_s)
        if number % 3 == 0:
            predictor.answered(number, chance.randint(1, 600), now_s)
        if number % 7 == 0:
            predictor.hinted(tenant, keys[-1], Hint(will_continue=chance.random()), now_s)
    return now_s


def state_of(predictor: Predictor) -> dict[str, Array]:
    pieces: dict[str, list[Array]] = {}
    for name, piece in predictor.export_state():
        pieces.setdefault(name, []).append(piece.copy())
    return {name: np.concatenate(each) for name, each in pieces.items()}


def ask(predictor: Predictor, now_s: float, limit: int = 1000) -> list[Guess]:
    return predictor.guesses(now_s, 60.0, limit)


def test_it_guesses_what_is_requested_again_and_again(make: Callable[[], Predictor]) -> None:
    predictor = make()
    now_s = drive(predictor)
    guesses = ask(predictor, now_s)
    assert guesses
    assert [each.probability for each in guesses] == sorted((each.probability for each in guesses), reverse=True)
    for each in guesses:
        assert 0.0 < each.probability <= 1.0
        assert 0.0 <= each.confidence <= 1.0
        assert now_s <= each.first_s <= each.due_s <= now_s + 60.0 + 1e-6
        assert each.blocks >= 1
    assert len({(each.tenant, each.key) for each in guesses}) == len(guesses)


def test_the_limit_takes_the_most_probable(make: Callable[[], Predictor]) -> None:
    predictor = make()
    now_s = drive(predictor)
    assert ask(predictor, now_s, 5) == ask(predictor, now_s)[:5]
    assert ask(predictor, now_s, 0) == []


def test_the_same_events_give_the_same_guesses(make: Callable[[], Predictor]) -> None:
    first, second = make(), make()
    now_s = drive(first)
    assert drive(second) == now_s
    assert ask(first, now_s) == ask(second, now_s)


def test_asking_changes_nothing(make: Callable[[], Predictor]) -> None:
    predictor = make()
    now_s = drive(predictor)
    before = ask(predictor, now_s)
    predictor.guesses(now_s, 3.0, 2)
    assert ask(predictor, now_s) == before


def test_a_tenant_is_guessed_its_own_chains_alone(make: Callable[[], Predictor]) -> None:
    predictor = make()
    for each in ask(predictor, drive(predictor)):
        assert each.key[3] == each.tenant


def test_equal_keys_of_two_tenants_are_two_chains(make: Callable[[], Predictor]) -> None:
    predictor = make()
    for turn in range(6):
        keys = [key(0, 0, block) for block in range(4 + turn)]
        predictor.requested(PredictorRequest(1, keys), 10.0 + 4 * turn)
    predictor.requested(PredictorRequest(2, [key(0, 0, block) for block in range(10)]), 31.0)
    predictor.forget(1, None)
    assert {each.tenant for each in ask(predictor, 32.0)} <= {2}


def test_what_is_forgotten_is_not_guessed(make: Callable[[], Predictor]) -> None:
    predictor = make()
    now_s = drive(predictor)
    gone = ask(predictor, now_s)[0]
    predictor.forget(gone.tenant, [gone.key])
    assert (gone.tenant, gone.key) not in {(each.tenant, each.key) for each in ask(predictor, now_s)}
    predictor.forget(0, None)
    left = ask(predictor, now_s)
    assert left
    assert 0 not in {each.tenant for each in left}
    predictor.forget(77, None)
    predictor.forget(77, [b"0123456789abcdef"])
    assert ask(predictor, now_s) == left


def test_what_is_forgotten_is_not_in_the_state(make: Callable[[], Predictor]) -> None:
    predictor = make()
    drive(predictor, tenants=2)
    predictor.forget(1, None)
    packed = b"".join(each.tobytes() for each in state_of(predictor).values())
    assert key(0, 0, 0)[:4] in packed
    assert key(1, 0, 0)[:4] not in packed


def test_it_goes_on_from_a_state(make: Callable[[], Predictor]) -> None:
    before, first, second = make(), make(), make()
    now_s = drive(before)
    state = state_of(before)
    first.import_state(state, 50.0)
    second.import_state(state, 50.0)
    known, found = ask(before, now_s), ask(first, now_s + 50.0)
    assert found == ask(second, now_s + 50.0)
    chances = {(each.tenant, each.key): each.probability for each in known}
    assert {(each.tenant, each.key) for each in found} == set(chances)
    assert np.mean([abs(chances[each.tenant, each.key] - each.probability) for each in found]) < 0.1
    keys = [key(0, 0, block) for block in range(5)]
    first.requested(PredictorRequest(0, keys), now_s + 51.0)
    second.requested(PredictorRequest(0, keys), now_s + 51.0)
    assert ask(first, now_s + 52.0) == ask(second, now_s + 52.0)


@pytest.mark.parametrize("seed", each_nth(range(3), 3))
def test_an_imported_state_is_exported_unchanged(make: Callable[[], Predictor], seed: int) -> None:
    before, after = make(), make()
    drive(before, requests=500, seed=seed)
    state = state_of(before)
    after.import_state(state, 0.0)
    again = state_of(after)
    assert set(again) == set(state)
    for name, array in state.items():
        assert array.dtype == again[name].dtype, name
        assert sorted(row.tobytes() for row in array) == sorted(row.tobytes() for row in again[name]), name


def test_a_sample_has_guesses_and_turns_to_others(make: Callable[[], Predictor]) -> None:
    predictor = make()
    now_s = drive(predictor, requests=1500)
    known = {(each.tenant, each.key): each.probability for each in ask(predictor, now_s)}
    named = [{(each.tenant, each.key) for each in predictor.sample(now_s, 60.0, 4, turn)} for turn in range(64)]
    assert all(len(each) <= 4 for each in named)
    assert set().union(*named) <= set(known)
    assert set().union(*named)


def test_a_state_of_another_version_changes_nothing(make: Callable[[], Predictor]) -> None:
    predictor = make()
    now_s = drive(predictor)
    before, state = ask(predictor, now_s), state_of(predictor)
    for broken in ({}, {name: each[:1] for name, each in state.items()}, {"about": np.zeros(3, np.uint8)}):
        with pytest.raises(ValueError):
            predictor.import_state(broken, 0.0)
        assert ask(predictor, now_s) == before


def test_pieces_of_a_state_are_small(make: Callable[[], Predictor]) -> None:
    predictor = make()
    drive(predictor)
    assert all(piece.nbytes <= 1 << 20 for _, piece in predictor.export_state())


def test_the_clock_is_not_read(make: Callable[[], Predictor], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> float:
        raise AssertionError("a predictor reads no clock")

    predictor = make()
    for name in ("time", "monotonic", "perf_counter", "monotonic_ns", "time_ns", "perf_counter_ns"):
        monkeypatch.setattr(time, name, refuse)
    assert ask(predictor, drive(predictor))


def test_an_empty_request_is_none(make: Callable[[], Predictor]) -> None:
    predictor = make()
    predictor.requested(PredictorRequest(0, []), 1.0)
    predictor.answered(99, 10, 2.0)
    predictor.hinted(0, bytes(16), Hint(will_continue=1.0), 3.0)
    assert ask(predictor, 4.0) == []
