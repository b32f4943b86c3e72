"""The plan is never predicted worse than a single path, and as good as the best there is."""

import itertools
import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_restore.costs import ComputeCost, Contention, LinkCost, RestoreCosts
from kvstore_restore.plan import StoredPrefix, plan, plans_by_axis

CHUNK_TOKENS, CHUNK_BYTES = 512, 1 << 20
ALONE = Contention()


def _costs(
    *, fixed: float = 0.0, token: float = 1e-4, attended: float = 1e-8, lead: float = 0.0, load_s: float = 0.05,
    contention: Contention = ALONE,
) -> RestoreCosts:  # fmt: skip
    byte_s = load_s / CHUNK_BYTES
    links = {"host": LinkCost(lead, byte_s), "nvme": LinkCost(2 * lead, 3 * byte_s)}
    return RestoreCosts(ComputeCost(fixed, token, attended), links, contention)


def _prefix(chunks: int, *, slow: int = 0, input_bytes: int = 0) -> StoredPrefix:
    tiers = ("nvme",) * slow + ("host",) * (chunks - slow)
    return StoredPrefix(tiers, CHUNK_TOKENS, CHUNK_BYTES, input_bytes=input_bytes, input_tier="nvme")


bytes_of_any_input = st.sampled_from([0, CHUNK_BYTES // 8, CHUNK_BYTES])


costs_of_any_machine = st.builds(
    _costs,
    fixed=st.floats(0, 0.05), token=st.floats(1e-6, 1e-3), attended=st.floats(0, 1e-6), lead=st.floats(0, 0.05),
    load_s=st.floats(0.001, 1.0), contention=st.builds(Contention, st.floats(1, 3), st.floats(1, 3)),
)  # fmt: skip


def test_computing_and_loading_share_the_prefix() -> None:
    chosen = plan(_prefix(20), _costs(attended=0.0, load_s=0.0512))
    assert chosen.axis == "tokens"
    assert chosen.whole == 10
    assert chosen.finish_s == pytest.approx(10 * 0.0512)


def test_a_fast_link_is_used_alone_and_a_slow_one_not_at_all() -> None:
    assert plan(_prefix(16), _costs(load_s=0.0005)).axis == "load"
    assert plan(_prefix(16), _costs(load_s=5.0)).axis == "compute"


def test_contention_ends_sharing_where_it_costs_more_than_it_saves() -> None:
    slow = Contention(3.0, 3.0)
    assert plan(_prefix(16), _costs(load_s=0.04, contention=slow)).axis == "load"


def test_two_tiers_are_loaded_at_once() -> None:
    costs = _costs(load_s=0.05, token=1.0)  # computing is hopeless
    both = plan(_prefix(16, slow=4), costs)
    assert both.axis == "load"
    assert both.finish_s == pytest.approx(12 * 0.05)  # the slow tier's four take as long


def test_nothing_stored_takes_no_time() -> None:
    assert plan(_prefix(0), _costs()).finish_s == 0.0
    with pytest.raises(ValueError, match="at least one"):
        StoredPrefix((), 0, 1)


def test_hidden_states_that_come_over_the_link_are_part_of_the_plan() -> None:
    """A chunk takes 51 ms either way, its states a quarter of that: a chunk that is computed still costs the link some
    time, so it takes more of them until both are done."""
    costs = _costs(attended=0.0, load_s=0.0512 / 3)  # nvme takes three times as long
    assert plan(_prefix(20, slow=20), costs, error=0.0).whole == 10
    chosen = plan(_prefix(20, slow=20, input_bytes=CHUNK_BYTES // 4), costs, error=0.0)
    assert (chosen.axis, chosen.whole) == ("tokens", 11)
    assert chosen.finish_s == pytest.approx((9 + 11 / 4) * 0.0512)
    whole = plans_by_axis(_prefix(4, slow=4, input_bytes=4 * CHUNK_BYTES), costs)["compute"]
    assert whole.finish_s == pytest.approx(16 * 0.0512)  # the link is the slower of the two


@given(costs_of_any_machine, st.integers(1, 12), st.integers(0, 12), bytes_of_any_input)
def test_no_plan_is_predicted_worse_than_a_single_path(
    costs: RestoreCosts, chunks: int, slow: int, input_bytes: int
) -> None:
    prefix = _prefix(chunks, slow=min(slow, chunks), input_bytes=input_bytes)
    plans = plans_by_axis(prefix, costs)
    chosen = plan(prefix, costs)
    assert chosen.finish_s <= min(plans["load"].finish_s, plans["compute"].finish_s)


@given(costs_of_any_machine, st.integers(1, 6), st.integers(0, 6), bytes_of_any_input)
def test_a_plan_is_the_best_of_all_that_load_any_chunks(
    costs: RestoreCosts, chunks: int, slow: int, input_bytes: int
) -> None:
    prefix = _prefix(chunks, slow=min(slow, chunks), input_bytes=input_bytes)
    best = float("inf")
    for is_computed in itertools.product((True, False), repeat=chunks):
        if any(later > earlier for earlier, later in itertools.pairwise(is_computed)):
            continue  # it would be computed behind a chunk that is loaded
        links = dict.fromkeys((*prefix.tiers, "nvme"), 0.0)
        links["nvme"] += costs.links["nvme"].load_s(input_bytes) * sum(is_computed)
        for chunk in itertools.compress(range(chunks), map(operator.not_, is_computed)):
            links[prefix.tiers[chunk]] += prefix.load_s(chunk, costs)
        computing = sum(prefix.compute_s(chunk, costs) for chunk in range(sum(is_computed)))
        best = min(best, costs.contention.finish_s(computing, max(links.values())))
    assert plan(prefix, costs, error=0.0).finish_s == pytest.approx(best)


def test_sharing_that_saves_little_is_left_where_wrong_costs_would_make_it_a_loss() -> None:
    costs = _costs(attended=0.0, load_s=0.0512 * 0.2, contention=Contention(1.2, 1.2))
    assert plan(_prefix(40), costs, error=0.0).axis == "tokens"
    assert plan(_prefix(40), costs).axis == "load"
    for ratio in (0.5, 1.0, 2.0):
        costs = _costs(attended=0.0, load_s=0.0512 * ratio, contention=Contention(1.2, 1.2))
        assert plan(_prefix(40), costs).axis == "tokens"
