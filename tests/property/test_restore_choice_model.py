"""The choice against a plain model: of all numbers of blocks, none is predicted to be sooner."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvstore_restore.choice import Hit, LoadChoice
from kvstore_restore.learned import LearnedCosts

BLOCK_TOKENS, BLOCK_BYTES = 16, 1 << 16

runs = st.lists(
    st.tuples(st.sampled_from(["host", "memory", "nvme", "remote"]), st.integers(1, 12), st.floats(1e-4, 0.2)),
    min_size=1,
    max_size=4,
).filter(lambda each: all(one[0] != other[0] for one, other in pairwise(each)))


def _hit(of_runs: list[tuple[str, int, float]], first_blocks: int, tail: int) -> Hit:
    """Blocks of one run cost the same, and the first of it no less: what a lane's estimate says."""
    tiers, load_s = [], []
    for tier, blocks, seconds in of_runs:
        tiers += [tier] * blocks
        load_s += [0.0 if tier == "host" else seconds] * blocks
    first = first_blocks * BLOCK_TOKENS
    return Hit(tiers, load_s, BLOCK_TOKENS, BLOCK_BYTES, first + len(tiers) * BLOCK_TOKENS + tail, first)


@given(
    runs, st.integers(0, 20), st.integers(1, 40),
    st.floats(0, 0.05), st.floats(1e-6, 1e-2), st.floats(0, 1e-6), st.sampled_from([0, 64]),
)  # fmt: skip
def test_no_other_number_of_blocks_is_predicted_to_be_sooner(
    of_runs: list[tuple[str, int, float]],
    first_blocks: int,
    tail: int,
    fixed: float,
    token: float,
    attended: float,
    step: int,
) -> None:
    hit = _hit(of_runs, first_blocks, tail)
    choice = LoadChoice(LearnedCosts(lambda: 0.0))
    for tokens in (16, 64, 256, 1024) * 4:
        choice.observe_compute(0, tokens, fixed + token * tokens + attended * tokens * tokens / 2)
    chosen = choice.choose(hit)
    assert not chosen.is_trial

    def total_s(blocks: int) -> float:
        own_s = 0.001 + 0.004 * blocks * BLOCK_BYTES / (16 << 20) if blocks else 0.0
        held = hit.held(blocks)
        return own_s + sum(hit.load_s[:blocks]) + choice.compute_s(held, hit.tokens - held)

    least_s = min(total_s(blocks) for blocks in range(len(hit.tiers) + 1))
    assert chosen.load_s + chosen.compute_s <= least_s * (1 + 1e-6) + 1e-9
    assert abs(chosen.load_s + chosen.compute_s - total_s(chosen.blocks)) <= 1e-6 * least_s + 1e-9


@given(st.lists(st.tuples(st.integers(0, 30), st.floats(0, 100), st.booleans()), max_size=30), st.floats(0, 1e6))
def test_whatever_was_observed_a_choice_is_sane(loads: list[tuple[int, float, bool]], computed_s: float) -> None:
    choice = LoadChoice(LearnedCosts(lambda: 0.0))
    hit = _hit([("nvme", 20, 0.01), ("host", 10, 0.0)], 0, 5)
    choice.observe_compute(0, 100, computed_s)
    for blocks, seconds, computes in loads:
        chosen = choice.choose(hit)
        assert 0 <= chosen.blocks <= 30
        assert chosen.load_s >= 0 and chosen.compute_s >= 0 and chosen.deadline_s >= 0
        choice.observe_load(hit, chosen, min(blocks, chosen.blocks), seconds)
        if computes:
            choice.observe_compute(hit.held(blocks), hit.tokens - hit.held(blocks), seconds)
