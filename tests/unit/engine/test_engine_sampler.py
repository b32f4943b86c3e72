"""The sampler: greedy where it must be, the right distribution elsewhere, the same tokens for the same seed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_engine.errors import UsageError
from kvstore_engine.sampler import SamplingSettings, TokenSampler

LOGITS = np.array([0.0, 3.0, 1.0, 3.0, -np.inf, 2.0], np.float32)


def _choices(settings: SamplingSettings, count: int, logits: np.ndarray = LOGITS) -> list[int]:
    sampler = TokenSampler(settings)
    return [sampler.choose(logits) for _ in range(count)]


@pytest.mark.parametrize(
    "settings",
    [
        SamplingSettings(),
        SamplingSettings(temperature=0.0, top_k=3, top_p=0.5),
        SamplingSettings(temperature=5.0, top_k=1, seed=1),
        SamplingSettings(temperature=5.0, top_p=0.0, seed=1),
        SamplingSettings(temperature=5.0, top_p=1e-12, seed=1),
        SamplingSettings(temperature=1e-6, top_k=1, seed=1),
    ],
)
def test_these_are_all_greedy_and_ties_go_to_the_lowest_id(settings: SamplingSettings) -> None:
    assert set(_choices(settings, 20)) == {1}


def test_the_same_seed_gives_the_same_tokens_and_another_others() -> None:
    logits = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    settings = SamplingSettings(temperature=1.0, top_k=100, top_p=0.9, seed=42)
    assert _choices(settings, 50, logits) == _choices(settings, 50, logits)
    assert _choices(settings, 50, logits) != _choices(SamplingSettings(1.0, 100, 0.9, 43), 50, logits)


def test_greedy_draws_no_random_numbers() -> None:
    sampler = TokenSampler(SamplingSettings(temperature=0.0, seed=5))
    sampler.choose(LOGITS)
    assert sampler._random.random() == np.random.Generator(np.random.PCG64(5)).random()


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        (SamplingSettings(temperature=1.0), [0, 1, 2, 3, 5]),
        (SamplingSettings(temperature=0.5, top_k=3), [1, 3, 5]),
        (SamplingSettings(temperature=2.0, top_p=0.5), [1, 3]),
        (SamplingSettings(temperature=1.0, top_k=2, top_p=0.99), [1, 3]),
    ],
)
def test_frequencies_match_the_softmax_over_what_is_allowed(settings: SamplingSettings, allowed: list[int]) -> None:
    count = 6_000
    seeded = SamplingSettings(settings.temperature, settings.top_k, settings.top_p, seed=9)
    seen = np.bincount(_choices(seeded, count), minlength=len(LOGITS)) / count
    weights = np.exp(LOGITS[allowed].astype(float) / settings.temperature)
    expected = np.zeros(len(LOGITS))
    expected[allowed] = weights / weights.sum()
    # Five standard deviations of a binomial proportion; the seed makes it repeatable anyway.
    assert np.abs(seen - expected).max() <= 5 * 0.5 / np.sqrt(count)
    assert not seen[expected == 0].any()


def test_top_p_keeps_the_token_that_reaches_it() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.2])).astype(np.float32)
    assert set(_choices(SamplingSettings(1.0, 0, 0.45, 1), 300, logits)) == {0}
    assert set(_choices(SamplingSettings(1.0, 0, 0.55, 1), 300, logits)) == {0, 1}
    assert set(_choices(SamplingSettings(1.0, 0, 0.85, 1), 300, logits)) == {0, 1, 2}


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_refused(poison: float, temperature: float) -> None:
    logits = LOGITS.copy()
    logits[3] = poison
    with pytest.raises(RuntimeError, match="cannot be sampled"):
        TokenSampler(SamplingSettings(temperature, seed=1)).choose(logits)
    with pytest.raises(RuntimeError, match="cannot be sampled"):
        TokenSampler(SamplingSettings(temperature, seed=1)).choose(np.full(4, -np.inf, np.float32))


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 1.1},
        {"top_p": -0.1},
        {"seed": -1},
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(settings))):
        SamplingSettings(**settings)


@given(
    st.lists(st.floats(-80, 80, width=32), min_size=1, max_size=40),
    st.floats(0.01, 10),
    st.integers(0, 50),
    st.floats(0, 1),
    st.integers(0, 100),
)
def test_the_choice_is_among_the_top_k_and_inside_the_nucleus(
    values: list[float], temperature: float, top_k: int, top_p: float, seed: int
) -> None:
    logits = np.array(values, np.float32)
    before = logits.copy()
    chosen = TokenSampler(SamplingSettings(temperature, top_k, top_p, seed)).choose(logits)
    assert np.array_equal(logits, before)
    order = np.lexsort((np.arange(logits.size), -logits.astype(float)))[: top_k or None]
    assert chosen in order
    weights = np.exp((logits[order].astype(float) - logits.max()) / temperature)
    mass_before = (weights / weights.sum())[: int(np.flatnonzero(order == chosen)[0])].sum()
    assert mass_before <= top_p + 1e-9


def _allowed(logits: np.ndarray, settings: SamplingSettings) -> tuple[np.ndarray, float]:
    """The probability of each token, by sorting, and how near top-p is to a set's."""
    order = np.lexsort((np.arange(logits.size), -logits.astype(float)))[: settings.top_k or None]
    weights = np.exp((logits[order].astype(float) - logits.max()) / settings.temperature)
    distance = 1.0
    if settings.top_p < 1:
        bounds = np.cumsum(weights / weights.sum())
        distance = float(np.abs(bounds - settings.top_p).min())
        weights[int(np.searchsorted(bounds, settings.top_p)) + 1 :] = 0
    allowed = np.zeros(logits.size)
    allowed[order] = weights / weights.sum()
    return allowed, distance


@given(
    st.integers(1, 3000),
    st.floats(0.1, 200),
    st.floats(0.1, 3),
    st.one_of(st.just(0), st.integers(2, 50)),
    st.one_of(st.just(1.0), st.floats(0.01, 1)),
    st.integers(0, 1000),
)
def test_a_draw_is_what_sorting_all_would_leave_in_the_order_of_ids(
    size: int, spread: float, temperature: float, top_k: int, top_p: float, seed: int
) -> None:
    """Flat and peaked distributions, with equal logits among them."""
    random = np.random.default_rng(seed)
    logits = np.round(random.standard_normal(size) * spread, 1).astype(np.float32)
    logits[random.random(size) < 0.1] = -np.inf
    logits[random.integers(size)] = spread
    settings = SamplingSettings(temperature, top_k, top_p, seed)
    allowed, distance = _allowed(logits, settings)
    bounds = np.cumsum(allowed)
    sampler, draws = TokenSampler(settings), np.random.Generator(np.random.PCG64(seed))
    for _ in range(20):
        chosen, draw = sampler.choose(logits), draws.random() * bounds[-1]
        if distance > 1e-9:
            assert allowed[chosen] > 0
            wanted = int(np.searchsorted(bounds, draw, side="right"))
            assert chosen == wanted or np.abs(bounds - draw).min() < 1e-9  # sums in another order
