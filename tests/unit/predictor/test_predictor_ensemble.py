"""The ensemble: who is believed, and what a probability is worth once it was held against what came."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

import pytest

from kvstore_predictor.base import Array, Guess, Piece, Predictor, PredictorRequest
from kvstore_predictor.ensemble import Ensemble


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Says(Predictor):
    """A predictor that says for each of 100 chains the probability `chance`, or more for the even ones."""

    name = "says"

    def __init__(self, odd: float, even: float) -> None:
        self._chances = (even, odd)

    def requested(self, request: PredictorRequest, now_s: float) -> None:
        pass

    def guesses(self, now_s: float, horizon_s: float, limit: int) -> list[Guess]:
        found = [Guess(0, key(at), 1, self._chances[at % 2], now_s, now_s, 0.5) for at in range(1, 101)]
        return sorted(found, key=lambda each: -each.probability)[:limit]

    def forget(self, tenant: int, keys: Iterable[bytes] | None) -> None:
        pass

    def export_state(self) -> Iterator[Piece]:
        return iter(())

    def import_state(self, state: dict[str, Array], later_s: float) -> None:
        pass


def drive(ensemble: Ensemble, requests: int = 4000) -> float:
    """One request each 0.5 s: in 60 s an even chain comes with about 0.7, an odd one with 0.1."""
    chance, now_s = random.Random(1), 0.0
    for _ in range(requests):
        now_s += 0.5
        draw = chance.random()
        even, odd = 2 * chance.randint(1, 50), 2 * chance.randint(0, 49) + 1
        asked = even if draw < 0.5 else odd if draw < 0.54 else 10_000 + chance.randrange(1 << 30)
        ensemble.requested(PredictorRequest(0, [key(asked)]), now_s)
    return now_s


def test_what_is_foretold_too_often_is_calibrated() -> None:
    ensemble = Ensemble([lambda: Says(odd=0.5, even=0.95)])
    now_s = drive(ensemble)
    guesses = ensemble.guesses(now_s, 60.0, 200)
    even, odd = chances(guesses)
    assert even == pytest.approx(0.7, abs=0.1)  # 60 of 120 requests go to 50 chains: 1 - exp(-1.2)
    assert odd == pytest.approx(0.1, abs=0.1)


def test_the_member_that_foretells_better_is_believed() -> None:
    ensemble = Ensemble([lambda: Says(odd=0.4, even=0.4), lambda: Says(odd=0.1, even=0.7)])
    now_s = drive(ensemble)
    dull, sharp = ensemble.weights(1)
    assert sharp > dull
    even, odd = chances(ensemble.guesses(now_s, 60.0, 200))
    assert even > 0.5
    assert odd < 0.3


def test_a_better_guess_of_one_member_alone_is_kept() -> None:
    ensemble = Ensemble([lambda: Says(odd=0.1, even=0.7)])
    now_s = drive(ensemble)
    even, odd = chances(ensemble.guesses(now_s, 60.0, 200))
    assert even == pytest.approx(0.7, abs=0.1)
    assert odd == pytest.approx(0.1, abs=0.05)


def test_what_was_learned_of_members_is_kept_over_a_restart() -> None:
    ensemble, later = (Ensemble([lambda: Says(odd=0.5, even=0.95)]) for _ in range(2))
    now_s = drive(ensemble)
    later.import_state(dict(ensemble.export_state()), 0.0)
    assert later.guesses(now_s, 60.0, 200) == ensemble.guesses(now_s, 60.0, 200)


def chances(guesses: list[Guess]) -> tuple[float, float]:
    """Return the chances of an even chain and of an odd one."""
    even, odd = (
        next(each.probability for each in guesses if int.from_bytes(each.key, "big") % 2 == rest) for rest in (0, 1)
    )
    return even, odd
