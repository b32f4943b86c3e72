"""The simulator against plain models, and what must hold of every policy on any trace."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvstore_simulator.policies import POLICIES
from kvstore_simulator.replay import Replay, ReplaySettings
from kvstore_simulator.reuse import NEVER, curves, reuse_distances
from kvstore_simulator.trace import Op, Trace, TraceBuilder
from kvstored.store.blocks.check import check
from kvstored.store.policies import ADMISSIONS
from tests.reference.examples import each_nth, examples
from tests.reference.traces import Requests, plain_hits, sessions, trace_of

seeds = st.integers(0, 10**6)
capacities = st.integers(1, 120)
shared = settings(max_examples=min(examples(60), 20))  # for each admission of a policy, which share 60


def hits(trace: Trace, policy: str, capacity: int, admission: str = "always") -> list[int]:
    replay = Replay(trace, ReplaySettings(policy, capacity, admission))
    result = replay.run()
    assert check(replay.residency) == []
    assert replay.residency.tier_blocks(0) <= capacity
    found: list[int] = result.hits.tolist()
    return found


@pytest.mark.parametrize("policy", ["lru", "fifo", "clairvoyant"])
@given(seed=seeds, capacity=capacities)
def test_hits_are_those_of_the_definition(policy: str, seed: int, capacity: int) -> None:
    requests = sessions(seed, 50)
    assert hits(trace_of(requests), policy, capacity) == plain_hits(policy, requests, capacity)


@pytest.mark.parametrize("policy", each_nth(sorted(POLICIES), 3))
@given(seed=seeds, capacity=capacities)
def test_no_policy_beats_the_bounds(policy: str, seed: int, capacity: int) -> None:
    trace = trace_of(sessions(seed, 50))
    most = sum(hits(trace, "lru", trace.distinct_blocks))
    best = sum(hits(trace, "clairvoyant", capacity))
    assert sum(hits(trace, policy, capacity)) <= best <= most


@pytest.mark.parametrize(("policy", "admission"), each_nth(list(product(sorted(POLICIES), sorted(ADMISSIONS))), 9))
@shared
@given(seed=seeds, capacity=st.integers(1, 60), cut=st.integers(1, 49))
@example(seed=217, capacity=19, cut=29)  # a row that was the last victim, used again, goes by other means
@example(seed=1960, capacity=18, cut=14)  # its second tenant comes after the cut
def test_what_comes_later_changes_nothing_before(
    policy: str, admission: str, seed: int, capacity: int, cut: int
) -> None:
    trace = trace_of(sessions(seed, 50), tenants=2)
    whole = hits(trace, policy, capacity, admission)
    assert hits(trace.part(0, cut), policy, capacity, admission) == whole[:cut]


@pytest.mark.parametrize(
    ("policy", "admission"), each_nth(list(product([*sorted(POLICIES), "clairvoyant"], sorted(ADMISSIONS))), 5)
)
@shared
@given(seed=seeds, capacity=st.integers(1, 60))
def test_what_is_missed_is_stored_or_kept_out_and_what_is_stored_is_here_or_evicted(
    policy: str, admission: str, seed: int, capacity: int
) -> None:
    trace = trace_of(sessions(seed, 50))
    replay = Replay(trace, ReplaySettings(policy, capacity, admission, ttl_s=None if seed % 2 else 20.0))
    result = replay.run()
    evicted = result.evicted
    assert result.stored_blocks + evicted["refused"] + evicted["bypassed"] == trace.accesses - result.hits.sum()
    assert result.stored_blocks == replay.residency.tier_blocks(0) + evicted["evicted"] + evicted["expired"]
    assert min(evicted.values()) >= 0


def test_a_block_that_comes_and_goes_with_its_request_was_never_stored() -> None:
    result = Replay(trace_of([[0, 1], [2, 3, 4], [0, 1]]), ReplaySettings("clairvoyant", 2)).run()
    assert (result.hits.tolist(), result.stored_blocks) == ([0, 0, 2], 2)
    assert result.evicted == {"evicted": 0, "expired": 0, "refused": 0, "bypassed": 3}


def test_the_clairvoyant_is_not_causal() -> None:
    """The test above can fail: here what is kept depends on what comes."""
    requests: Requests = [[0], [1], [2], [0]]
    trace = trace_of(requests)
    assert hits(trace, "clairvoyant", 1) == [0, 0, 0, 1]
    assert hits(trace_of([[0], [1], [2], [1]]), "clairvoyant", 1) == [0, 0, 0, 1]
    assert hits(trace, "lru", 1) == [0, 0, 0, 0]


@given(seed=seeds, capacity=capacities)
def test_reuse_distances_say_what_lru_hits(seed: int, capacity: int) -> None:
    trace = trace_of(sessions(seed, 60))
    distances = reuse_distances(trace)
    expected = sum(hits(trace, "lru", capacity))
    assert int(((distances != NEVER) & (distances < capacity)).sum()) == expected


@given(seed=seeds, capacity=st.integers(60, 120))
def test_a_put_after_its_request_changes_no_distance(seed: int, capacity: int) -> None:
    """The put comes as in a recording, with room for the longest chain: LRU hits the same, and nothing but requests is
    counted.
    """
    requests = sessions(seed, 60)
    builder = TraceBuilder("made", "made", 64)
    for at, blocks in enumerate(requests):
        for op, kind in ((Op.REQUEST, "request"), (Op.PUT, "put")):
            builder.add(at * 10**9, blocks, tenant=blocks[0] % 2, kind=kind, op=op, space=blocks[0] % 2)
    trace = builder.build()
    plain = trace_of(requests, tenants=2)
    expected = [curve for curve in curves(plain, reuse_distances(plain)) if curve.kind is None]
    assert curves(trace, reuse_distances(trace)) == expected
    counted = np.repeat(trace.ops == Op.REQUEST, np.diff(trace.starts))
    distances = reuse_distances(trace)[counted]
    assert int(((distances != NEVER) & (distances < capacity)).sum()) == sum(hits(trace, "lru", capacity))


def test_reads_alone_have_no_distances() -> None:
    builder = TraceBuilder("made", "made", 64)
    builder.add(0, [1, 2], op=Op.GET)
    with pytest.raises(ValueError, match="leave out --as-recorded"):
        reuse_distances(builder.build())


@given(seed=seeds)
def test_a_miss_ratio_curve_falls_and_its_groups_add_up(seed: int) -> None:
    trace = trace_of(sessions(seed, 60), tenants=2)
    made = curves(trace, reuse_distances(trace))
    for curve in made:
        assert curve.miss_ratio == sorted(curve.miss_ratio, reverse=True)
    whole, *parts = made
    tenants = [part for part in parts if part.tenant is not None]
    assert sum(part.accesses for part in tenants) in (0, whole.accesses)
    again = np.count_nonzero(reuse_distances(trace) != NEVER)
    assert whole.accesses - whole.first_uses == again
