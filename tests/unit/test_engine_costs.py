"""Costs are learned, decisions follow them, and the profile survives a restart but not damage."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_client.restore.regression import RecursiveLeastSquares
from kvstore_engine.restore.costs import CostModel
from kvstore_engine.restore.plan import plan_restore
from kvstore_engine.restore.profile import CostProfile

BLOCK_TOKENS, BLOCK_BYTES, STEP_TOKENS = 64, 1_474_560, 512


def _true_step_s(tokens: int, position: int) -> float:
    return 0.004 + 0.0009 * tokens + 2e-7 * tokens * (position + tokens / 2)


def _trained(load_bytes_s: float = 5e9) -> CostModel:
    costs = CostModel()
    random = np.random.default_rng(1)
    for _ in range(60):
        tokens, position = int(random.integers(1, 513)), int(random.integers(0, 8000))
        noise = float(random.uniform(0.9, 1.1))
        costs.observe_step(tokens, position, _true_step_s(tokens, position) * noise)
        nbytes = int(random.integers(1, 100)) * BLOCK_BYTES
        costs.observe_load(nbytes, 0.001, (0.0015 + nbytes / load_bytes_s) * noise)
    return costs


def test_costs_are_learned_from_noisy_steps() -> None:
    costs = _trained()
    for tokens, position in ((512, 0), (512, 7000), (64, 3000), (300, 1000)):
        assert costs.step_s(tokens, position) == pytest.approx(_true_step_s(tokens, position), rel=0.1)
    assert costs.load_s(50 * BLOCK_BYTES, 0.001) == pytest.approx(0.0015 + 50 * BLOCK_BYTES / 5e9, rel=0.15)


def test_costs_follow_a_machine_that_becomes_slower() -> None:
    costs = _trained()
    for step in range(150):
        tokens, position = 64 + step % 8 * 64, step % 5 * 1000
        costs.observe_step(tokens, position, 3 * _true_step_s(tokens, position))
    assert costs.step_s(512, 2000) == pytest.approx(3 * _true_step_s(512, 2000), rel=0.2)


def test_one_descheduled_step_does_not_wreck_the_fit() -> None:
    costs = _trained()
    costs.observe_step(512, 0, 100 * _true_step_s(512, 0))
    assert costs.step_s(512, 0) == pytest.approx(_true_step_s(512, 0), rel=0.6)


def test_prefill_is_the_sum_of_its_steps() -> None:
    costs = _trained()
    parts = costs.step_s(512, 0) + costs.step_s(512, 512) + costs.step_s(76, 1024)
    assert costs.prefill_s(0, 1100, STEP_TOKENS) == pytest.approx(parts)
    assert costs.prefill_s(640, 640, STEP_TOKENS) == 0


@given(
    st.lists(
        st.tuples(st.integers(0, 10**5), st.integers(0, 10**6), st.floats(allow_nan=True, allow_infinity=True)),
        max_size=40,
    )
)
def test_predictions_are_never_negative_or_nan(samples: list[tuple[int, int, float]]) -> None:
    costs = CostModel()
    for tokens, position, seconds in samples:
        costs.observe_step(tokens, position, seconds)
        costs.observe_load(tokens * 1000, abs(seconds), seconds)
    assert 0 <= costs.step_s(512, 1000) < np.inf
    assert 0 <= costs.load_s(10**8, 0.01) < np.inf


def test_loading_wins_when_it_is_faster() -> None:
    plan = _plan(_trained(), prompt_tokens=2000, resident_blocks=20)
    assert plan.blocks == 20
    assert plan.load_s < plan.compute_s


def test_computing_wins_when_the_store_is_slow() -> None:
    plan = _plan(_trained(), prompt_tokens=2000, resident_blocks=20, estimated_load_s=60.0)
    assert plan.blocks == 0
    assert "computing is estimated to be faster" in plan.reason


@pytest.mark.parametrize(("prompt_tokens", "blocks"), [(63, 0), (64, 0), (65, 1), (128, 1), (129, 2), (640, 9)])
def test_at_least_one_token_is_left_to_compute(prompt_tokens: int, blocks: int) -> None:
    assert _plan(_trained(), prompt_tokens=prompt_tokens, resident_blocks=10).blocks == blocks


def test_nothing_resident_is_nothing_restored() -> None:
    assert _plan(_trained(), prompt_tokens=1000, resident_blocks=0).blocks == 0


def test_the_plan_is_the_best_of_all_split_points() -> None:
    """All or nothing is optimal: no partial load beats the better of the two ends."""
    costs = _trained()
    for estimated_load_s in (0.001, 0.1, 0.5, 1.0, 3.0):
        total = {
            blocks: costs.load_s(blocks * BLOCK_BYTES, estimated_load_s * blocks / 30)
            + costs.prefill_s(blocks * BLOCK_TOKENS, 2000, STEP_TOKENS)
            for blocks in range(31)
        }
        plan = _plan(costs, prompt_tokens=2000, resident_blocks=30, estimated_load_s=estimated_load_s)
        # A step more or less in the sum is what rounding to whole steps leaves.
        assert total[plan.blocks] <= min(total.values()) + 0.02


def _plan(costs: CostModel, *, prompt_tokens: int, resident_blocks: int, estimated_load_s: float = 0.002):
    return plan_restore(
        prompt_tokens=prompt_tokens,
        resident_blocks=resident_blocks,
        block_tokens=BLOCK_TOKENS,
        block_bytes=BLOCK_BYTES,
        estimated_load_s=estimated_load_s,
        step_tokens=STEP_TOKENS,
        costs=costs,
    )


def test_a_profile_comes_back(tmp_path: Path) -> None:
    costs = _trained()
    CostProfile(tmp_path, "ab" * 16, 2).save(costs)
    again = CostProfile(tmp_path, "ab" * 16, 2).load()
    assert again.step_s(512, 0) == costs.step_s(512, 0)
    assert again.load.samples == costs.load.samples
    fresh = CostProfile(tmp_path, "ab" * 16, 3).load()
    assert fresh.compute.samples == 0


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{",
        '{"version": 1}',
        '{"version": 1, "compute": {"samples": 1, "coefficients": [1, 2]}, "load": {}}',
        '{"version": 1, "compute": {"samples": 1, "coefficients": [NaN, 1, 2]}, "load": {}}',
        '{"version": 99, "compute": 1}',
    ],
)
def test_a_damaged_profile_is_a_fresh_start(tmp_path: Path, content: str) -> None:
    profile = CostProfile(tmp_path, "cd" * 16, 2)
    profile.path.parent.mkdir(parents=True)
    profile.path.write_text(content)
    assert profile.load().compute.samples == 0


def test_a_profile_that_cannot_be_kept_is_not_missed(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    CostProfile(blocked, "ef" * 16, 2).save(_trained())


def test_restoring_a_fit_of_another_shape_is_refused() -> None:
    fit = RecursiveLeastSquares([1.0, 2.0])
    with pytest.raises(ValueError, match="2 finite coefficients"):
        fit.restore(1, [1.0, 2.0, 3.0])
