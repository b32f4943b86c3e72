"""Mode timing: a node in virtual time, against figures by hand and against what must hold for any figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_simulator.hints import HintOptions
from kvstore_simulator.hit_value import ModelSize, served_hit_value
from kvstore_simulator.machine import ComputeSpec, Machine, MediumSpec
from kvstore_simulator.node import Node, overlapped_s, serve_trace
from kvstore_simulator.node_settings import (
    ABLATIONS,
    BASELINE,
    BASELINE_EAGER,
    BASELINES,
    ENGINE_ALONE,
    ORCHESTRATED,
    NodeSettings,
    ServingPlan,
)
from kvstore_simulator.node_store import NodeStore
from kvstore_simulator.simulated_request import SimulatedRequest
from kvstore_simulator.timing import TimingStudy
from kvstore_simulator.trace import Op, Trace, TraceBuilder
from kvstored.clock import NS_PER_S
from kvstored.config import load_config
from kvstored.store.blocks.check import check
from kvstored.store.policies import ChainHint
from tests.reference.examples import each_nth
from tests.reference.tiers import HOST, NVME
from tests.reference.traces import Requests, sessions, trace_of

BLOCK = 512
MODEL = ModelSize("toy", parameters=1e6, layers=4, heads=1, kv_heads=1, head_dim=64)
BLOCK_BYTES = MODEL.kv_bytes_per_token * BLOCK
SLOT = BLOCK_BYTES + 4096
PLANS = (ENGINE_ALONE, *BASELINES, ORCHESTRATED, *ABLATIONS.values())


def spec(name: str, bytes_per_s: float, *, latency_s: float = 0.0, duplex: bool = True) -> MediumSpec:
    return MediumSpec(name, 1 << 40, bytes_per_s, bytes_per_s, latency_s, 64, duplex)


def machine(*, block_s: float = 1.0, link_s: float = 0.01, below_s: float = 0.1, overhead_s: float = 0.0) -> Machine:
    """Return a machine where computing a block takes about `block_s`, copying its slot to the engine `link_s`, reading
    it from NVMe `below_s`.
    """
    media = {
        "sram": spec("sram", 1e30), "hbm": spec("hbm", 1e30), "dram": spec("dram", 1e15),
        "nvme": spec("nvme", SLOT / below_s),
    }  # fmt: skip
    compute = ComputeSpec(2 * MODEL.parameters * BLOCK / block_s, 1.0, overhead_s, 8192)
    return Machine("toy", compute, "hbm", 1 << 40, 0.1, spec("engine", SLOT / link_s), media)


def serve(
    trace: Trace,
    plan: ServingPlan,
    made: Machine | None = None,
    *,
    pool: int = 1000,
    dram: int = 1000,
    nvme: int = 1000,
    policy: str = "lru",
) -> Node:
    tiers = (("dram", dram * SLOT), ("nvme", nvme * SLOT))[: 2 if nvme else 1]
    wanted = NodeSettings(made or machine(), MODEL, tiers, pool * BLOCK_BYTES, policy)
    return serve_trace(trace, wanted, plan, lambda done, total: None)


def serve_made(wanted: NodeSettings) -> NodeStore:
    node = serve_trace(TRACE.part(0, 3), wanted, ORCHESTRATED, lambda done, total: None)
    assert node.store is not None
    return node.store


def asked(*requests: tuple[float, Sequence[int], Op], more_tokens: int = 0) -> Trace:
    """Requests of (second, blocks, op), each `more_tokens` longer than its blocks."""
    builder = TraceBuilder("made", "made", BLOCK)
    for at_s, blocks, op in requests:
        builder.add(round(at_s * NS_PER_S), blocks, input_tokens=len(blocks) * BLOCK + more_tokens, op=op)
    return builder.build()


def seconds(node: Node, first: int, last: int) -> float:
    return node.settings.machine.prefill_s(MODEL, first, last)


def ttft_s(node: Node) -> list[float]:
    return [visit.ttft_ns / NS_PER_S for visit in node.served.requests]


def near(value: float) -> object:
    """Within the rounding of virtual time."""
    return pytest.approx(value, abs=2e-6)


# By hand


def test_requests_that_come_faster_than_they_are_computed_queue() -> None:
    # Each takes C seconds to compute and one comes every C / 2: the n-th waits n * C / 2, and has its token after C.
    made = machine()
    cost = made.prefill_s(MODEL, 0, BLOCK)
    trace = asked(*[(n * cost / 2, [n], Op.REQUEST) for n in range(6)])
    node = serve(trace, ENGINE_ALONE, made)
    assert [visit.queued_ns / NS_PER_S for visit in node.served.requests] == [near(n * cost / 2) for n in range(6)]
    assert ttft_s(node) == [near(n * cost / 2 + cost) for n in range(6)]
    assert node.served.lasted_s == near(6 * cost) and node.served.compute_busy_s == near(6 * cost)
    assert node.served.largest_queue == 3, "the sixth comes at 2.5 C, when two have been served and one is under way"


def test_the_engine_keeps_its_own_blocks_and_computes_the_last_token_at_least() -> None:
    node = serve(asked((0, [0, 1], Op.REQUEST), (100, [0, 1], Op.REQUEST)), ENGINE_ALONE)
    assert ttft_s(node) == [near(seconds(node, 0, 1024)), near(seconds(node, 1023, 1024))]
    assert node.served.requests[1].in_pool == 2


LATER = asked((0, [0, 1, 2, 3], Op.REQUEST), (100, [9, 8, 7, 6], Op.REQUEST), (200, [0, 1, 2, 3], Op.REQUEST))
LONGER = replace(LATER, input_tokens=LATER.input_tokens + 500)


@pytest.mark.parametrize("plan", [BASELINE, ORCHESTRATED])
def test_blocks_in_dram_come_over_the_link(plan: ServingPlan) -> None:
    # The engine has room for one request: the third one finds its four blocks in DRAM, and computes 500 tokens.
    node = serve(LONGER, plan, machine(link_s=0.2), pool=4)
    last, copying, computing = node.served.requests[2], 4 * 0.2, seconds(node, 2048, 2548)
    assert (last.in_pool, *last.found, last.recomputed) == (0, 4, 0, 0)
    expected = copying + computing
    if plan.overlaps:  # four layers: the first one waits for its quarter, and computing is longer than copying
        expected = copying / 4 + computing
        assert overlapped_s(copying, computing, 4) == near(expected)
    assert ttft_s(node)[2] == near(expected)
    assert last.exposed_ns / NS_PER_S == near(expected - computing)


def test_overlapping_by_hand() -> None:
    # Copying bound: the last layer computes when the last blocks have come. Compute bound: the first one waits.
    assert overlapped_s(8.0, 4.0, 4) == 9.0
    assert overlapped_s(4.0, 8.0, 4) == 9.0
    assert overlapped_s(0.0, 8.0, 4) == 8.0


def test_a_baseline_waits_for_nvme_and_orchestration_has_begun_before() -> None:
    # DRAM has room for one request as well, so the third one's blocks are on NVMe: 0.1 s each to read, one at a time.
    waiting = serve(LONGER, BASELINE_EAGER, pool=4, dram=4)
    last = waiting.served.requests[2]
    assert last.found == [0, 4]
    assert last.exposed_ns / NS_PER_S == near(4 * 0.1 + 4 * 0.01)
    # While the second request computes (some four seconds) the third one waits in the queue, and its blocks move.
    queued = asked(
        (0, [0, 1, 2, 3], Op.REQUEST), (50, list(range(10, 18)), Op.REQUEST), (100, [9, 8, 7, 6], Op.REQUEST),
        (101, [0, 1, 2, 3], Op.REQUEST), more_tokens=500,
    )  # fmt: skip
    served = serve(queued, ORCHESTRATED, pool=8, dram=8)
    last = served.served.requests[3]
    assert (last.found[1], last.recomputed) == (4, 0)
    assert last.exposed_ns == 0, "everything was there when its turn came"


def test_an_engine_says_when_a_session_will_be_back_once_its_prompt_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine says it as its queue of puts and hints has it: a hint at a chain that is put afterwards would be for
    its beginning.
    """
    known: list[tuple[int, int | None]] = []

    def hint(store: NodeStore, visit: SimulatedRequest, hint: ChainHint, due_in_ms: int | None) -> None:
        known.append((visit.blocks - len(store.store.residency.find_keys(0, visit.keys)), due_in_ms))

    monkeypatch.setattr(NodeStore, "hint", hint)
    trace = asked((0, range(4), Op.REQUEST), (100, range(6), Op.REQUEST), (200, range(8), Op.REQUEST))
    tiers = (("dram", 100 * SLOT), ("nvme", 100 * SLOT))
    wanted = NodeSettings(machine(), MODEL, tiers, 100 * BLOCK_BYTES, "lru", hints=HintOptions(pause_noise=0.0))
    node = serve_trace(trace, wanted, ORCHESTRATED, lambda done, total: None)
    (ours, first_ms), (theirs, second_ms) = known
    assert ours == theirs == 0 and first_ms is not None and second_ms is not None
    assert first_ms / 1000 == pytest.approx(100 - ttft_s(node)[0], abs=0.1)


def test_computing_again_wins_over_a_slow_medium() -> None:
    # A block takes 10 s to read and about 1 s to compute: all four have been computed before the first arrives.
    made = machine(below_s=10.0)
    node = serve(LONGER, ORCHESTRATED, made, pool=4, dram=4)
    last = node.served.requests[2]
    assert (last.found[1], last.recomputed) == (4, 4) and last.hits == 0
    whole = made.prefill_s(MODEL, 0, 2048, least_passes=0.0)
    assert last.exposed_ns / NS_PER_S == near(whole)
    again = sum(made.streamed_bytes(MODEL, at * BLOCK, (at + 1) * BLOCK, least_passes=0.0) for at in range(4))
    others = 2 * made.streamed_bytes(MODEL, 0, 2548) + made.streamed_bytes(MODEL, 2048, 2548)
    assert node.served.streamed_bytes == pytest.approx(again + others, rel=1e-9)


def test_loading_from_the_tail_and_computing_from_the_head_meet() -> None:
    # 1.6 s to read a block, about 1 to compute one. Blocks 3, 2 and 1 arrive at 1.6, 3.2, 4.8 s; computing 0 and 1 is
    # done soon after 2 s, and 2 would be done after 3 s and a little: it is, because attention makes later ones longer.
    made = machine(below_s=1.6)
    node = serve(LONGER, ORCHESTRATED, made, pool=4, dram=4)
    last = node.served.requests[2]
    ends = [made.prefill_s(MODEL, 0, blocks * BLOCK, least_passes=0.0) for blocks in (1, 2, 3)]
    assert ends[1] < 3.2
    computed = 3 if ends[2] < 3.2 else 2
    assert (last.found[1], last.recomputed) == (4, computed)
    assert last.exposed_ns / NS_PER_S == pytest.approx(ends[2] if computed == 3 else 3.2, abs=0.02)


def test_a_get_that_is_recorded_stores_nothing_and_a_put_computes_nothing() -> None:
    trace = asked((0, [0, 1], Op.GET), (10, [0, 1], Op.PUT), (20, [0, 1], Op.GET))
    node = serve(trace, ORCHESTRATED, pool=2)
    assert node.store is not None and node.store.store.counters["stored_blocks"] == 2
    assert len(node.served.requests) == 2
    node = serve(asked((0, [5], Op.PUT), (10, [5], Op.GET), (20, [6], Op.GET)), ORCHESTRATED)
    assert [sum(visit.found[:1]) for visit in node.served.requests] == [1, 0]


def test_a_recorded_put_waits_for_the_requests_before_it() -> None:
    # Computing the first takes four seconds. What the second stores, it has to compute before, in the fifth.
    trace = asked((0, [0, 1, 2, 3], Op.GET), (0.1, [9], Op.GET), (0.2, [9], Op.PUT), (0.3, [8], Op.REQUEST))
    node = serve(trace, ORCHESTRATED)
    assert [visit.hits for visit in node.served.requests] == [0, 0, 0]
    assert node.store is not None and node.store.store.counters["stored_blocks"] == 2
    assert node.served.largest_queue == 2, "puts are no requests"


def test_a_request_longer_than_the_engines_memory_is_refused() -> None:
    node = serve(asked((0, [0], Op.REQUEST), (1, [1, 2, 3], Op.REQUEST), (9, [0], Op.REQUEST)), ORCHESTRATED, pool=2)
    assert node.served.refused == 1
    assert [visit.is_served for visit in node.served.requests] == [True, False, True]


# For any figures

REQUESTS = sessions(7, 110)
TRACE = trace_of(REQUESTS, every_s=0.7)


def crowded(plan: ServingPlan, made: Machine | None = None, trace: Trace = TRACE, policy: str = "lru") -> Node:
    """Return a node where nothing has room for everything."""
    return serve(trace, plan, made or machine(block_s=0.2), pool=30, dram=40, nvme=120, policy=policy)


MIXES = [*((plan, "lru") for plan in PLANS), (ORCHESTRATED, "lfu-ttl"), (ORCHESTRATED, "chain-hazard")]


@pytest.mark.parametrize(
    ("plan", "policy"), each_nth(MIXES, 3), ids=[f"{plan.name}, {policy}" for plan, policy in MIXES]
)
def test_nothing_is_lost_or_counted_twice(plan: ServingPlan, policy: str) -> None:
    node = crowded(plan, policy=policy)
    requests = node.served.requests
    assert all(visit.is_served for visit in requests) and len(requests) == len(REQUESTS)
    for visit, request in zip(requests, REQUESTS, strict=True):
        assert visit.blocks == len(request)
        assert visit.arrival_ns <= visit.begin_ns <= visit.end_ns
        assert 0 <= visit.hits <= visit.in_pool + sum(visit.found) <= visit.blocks
        assert visit.exposed_ns >= -2, "rounding apart, nothing is faster than computing what was not stored"
    assert not node.pool.residency.pins and check(node.pool.residency) == []
    assert node.pool.residency.tier_blocks(0) <= 30
    if node.store is None:
        return
    _balances(node)


def _balances(node: Node) -> None:
    assert node.store is not None
    store, residency = node.store.store, node.store.store.residency
    assert not residency.pins and len(store.leases) == 0 and check(residency) == []
    lanes = {lane.name: lane for lane in node.store.lanes}
    for position, tier in ((HOST, node.store.tiers[0]), (NVME, node.store.tiers[1])):
        assert tier.used_bytes == residency.tier_blocks(position) * SLOT <= tier.statistics().capacity_bytes
    assert lanes["engine→dram"].nbytes == node.store.store.counters["stored_blocks"] * SLOT
    assert lanes["nvme→dram"].nbytes == store.flows.tiers[NVME].promoted_blocks * SLOT
    assert lanes["dram→nvme"].nbytes == store.flows.tiers[HOST].demoted_blocks * SLOT
    assert lanes["nvme→dram"].nbytes == node.store.tiers[1].statistics().bytes_read
    for lane in lanes.values():
        assert sum(nbytes for _, nbytes in lane.moved) == lane.nbytes
    copied = sum(sum(visit.found) - visit.recomputed for visit in node.served.requests)
    assert lanes["dram→engine"].nbytes >= copied * SLOT, "what was used of the store was copied to the engine"
    found = sum(sum(visit.found) for visit in node.served.requests)
    assert lanes["dram→engine"].nbytes <= found * SLOT, "once, and nothing else goes that way"


@pytest.mark.parametrize("plan", each_nth([ORCHESTRATED, BASELINE], 2), ids=lambda plan: plan.name)
def test_it_is_the_same_each_time_and_knows_nothing_of_what_comes_later(plan: ServingPlan) -> None:
    def summary_of(requests: list[SimulatedRequest], before_ns: int) -> list[tuple[int, ...]]:
        return [
            (v.number, v.begin_ns, v.end_ns, v.in_pool, v.found, v.recomputed) for v in requests if v.end_ns < before_ns
        ]

    whole = crowded(plan)
    again = crowded(plan)
    assert summary_of(whole.served.requests, 1 << 62) == summary_of(again.served.requests, 1 << 62)
    cut = crowded(plan, trace=TRACE.part(0, 100))
    until_ns = int(TRACE.times_ns[100])
    before = summary_of(whole.served.requests, until_ns)
    assert len(before) > 70
    assert summary_of(cut.served.requests, until_ns) == before


rates = st.floats(-3.5, 1.0).map(lambda power: 10.0**power)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(block_s=rates, link_s=rates, below_s=rates, seed=st.integers(0, 50))
def test_bringing_blocks_back_never_takes_longer_than_computing_them(
    block_s: float, link_s: float, below_s: float, seed: int
) -> None:
    requests: Requests = sessions(seed, 40)
    made = machine(block_s=block_s, link_s=link_s, below_s=below_s)
    node = crowded(ORCHESTRATED, made, trace_of(requests))
    for visit in node.served.requests:
        had = visit.in_pool + sum(visit.found)
        computing_s = made.prefill_s(MODEL, visit.in_pool * BLOCK, min(had * BLOCK, visit.tokens), least_passes=0.0)
        assert visit.exposed_ns <= computing_s * NS_PER_S + 1000


def test_without_a_second_tier_nothing_moves_below() -> None:
    node = serve(TRACE, ORCHESTRATED, machine(block_s=0.2), pool=30, dram=60, nvme=0)
    assert node.store is not None
    assert [lane.name for lane in node.store.lanes] == ["dram→engine", "engine→dram"]
    assert node.store.store.writeback is None
    assert sum(sum(visit.found[:1]) for visit in node.served.requests) > 0


def test_a_time_to_live_ends_blocks_in_virtual_time() -> None:
    wanted = NodeSettings(machine(), MODEL, (("dram", 99 * SLOT),), 1 * BLOCK_BYTES, "lfu-ttl", ttl_s=30.0)
    trace = asked((0, [0], Op.REQUEST), (20, [1], Op.REQUEST), (100, [0], Op.REQUEST))
    node = serve_trace(trace, wanted, ORCHESTRATED, lambda done, total: None)
    assert [sum(visit.found[:1]) for visit in node.served.requests] == [0, 0, 0]
    longer = serve_trace(trace, replace(wanted, ttl_s=300.0), ORCHESTRATED, lambda done, total: None)
    assert [sum(visit.found[:1]) for visit in longer.served.requests] == [0, 0, 1]


def test_samples_say_what_tiers_held_over_time() -> None:
    node = crowded(ORCHESTRATED)
    assert {sample.tier for sample in node.served.samples} == {"engine", "dram", "nvme"}
    times = [sample.at_s for sample in node.served.samples if sample.tier == "nvme"]
    assert times == sorted(times) and len(times) >= 100
    assert all(sample.hot + sample.warm + sample.cold <= 120 for sample in node.served.samples)
    last = [sample for sample in node.served.samples if sample.tier == "dram"][-1]
    assert node.store is not None
    assert last.hot + last.warm + last.cold == node.store.store.residency.tier_blocks(HOST)


# A study


@pytest.mark.slow
def test_a_study_compares_with_the_better_baseline() -> None:
    study = TimingStudy(
        TRACE, machine(block_s=0.2), 1, MODEL, (("dram", 40 * SLOT), ("nvme", 120 * SLOT)), 30 * BLOCK_BYTES,
        ("best", "lru"), without=("overlap",),
    )  # fmt: skip
    results = list(study.run(lambda label, done, total: None))
    rows = [result.row for result in results]
    assert [(row["plan"], row["policy"]) for row in rows] == [
        ("engine-alone", "lru"), ("baseline", "lru"), ("baseline-eager", "lru"), ("orchestrated", "best"),
        ("orchestrated", "lru"), ("without overlap", "best"),
    ]  # fmt: skip
    better = min(rows[1]["ttft_s"]["p90"], rows[2]["ttft_s"]["p90"])
    assert rows[3]["speedup"]["p90"] == pytest.approx(better / rows[3]["ttft_s"]["p90"], abs=1e-3)
    assert "speedup" not in rows[1]
    for result in results:
        row = result.row
        assert row["mode"] == "timing" and row["requests"] == len(REQUESTS)
        assert sum(row["hits_by_tier"].values()) - row["recomputed_blocks"] == row["hits"]
        assert result.ttft_s == sorted(result.ttft_s) and len(result.ttft_s) == 201
        assert result.ttft_s[100] == pytest.approx(row["ttft_s"]["p50"], abs=1e-5)
        read = sum(each["read"] for each in row["bytes_by_tier"].values())
        assert read == sum(each["written"] for each in row["bytes_by_tier"].values())
        assert read == sum(row["bytes_by_lane"].values())
        for lane, slices in result.traffic.items():
            assert sum(slices) == row["bytes_by_lane"][lane]
        assert all(0 <= share <= 1 for share in row["utilisation"].values())


def test_what_was_computed_again_is_not_saved() -> None:
    def visit(blocks: int, tokens: int, **found: int) -> SimulatedRequest:
        return SimulatedRequest(0, 0, [b""] * blocks, tokens, Op.REQUEST, 0, **found)  # type: ignore[arg-type]

    def flops(*ends: int) -> list[float]:
        return [MODEL.flops_of(end) for end in ends]

    raced = visit(10, 10 * BLOCK, in_pool=2, found=[1, 5], recomputed=3)
    to_8, to_5, to_2, all_10 = flops(8 * BLOCK, 5 * BLOCK, 2 * BLOCK, 10 * BLOCK)
    value = served_hit_value([raced], BLOCK, MODEL)
    assert (value.hits, value.block_accesses) == (5, 10)
    assert (value.saved_flops, value.flops) == pytest.approx((to_8 - to_5 + to_2, all_10))
    given_up = visit(10, 10 * BLOCK, in_pool=2, found=[0, 6], recomputed=3, given_up=3)
    assert served_hit_value([given_up], BLOCK, MODEL).saved_flops == pytest.approx(to_5)
    partial = visit(2, 700, in_pool=2)
    assert served_hit_value([partial], BLOCK, MODEL).compute_saved_ratio == 1.0


def test_refused_requests_are_in_no_figure() -> None:
    trace = asked((0, [0], Op.REQUEST), (9, [1, 2, 3, 4], Op.REQUEST), (18, [0], Op.REQUEST))
    study = TimingStudy(trace, machine(), 1, MODEL, (("dram", 9 * SLOT),), 2 * BLOCK_BYTES, ("lru",))
    rows = [result.row for result in study.run(lambda label, done, total: None)]
    assert {(row["refused"], row["requests"], row["hit_ratio"], row["compute_saved_ratio"]) for row in rows} == {
        (1, 2, 0.5, 0.5)
    }


def test_puts_alone_look_nothing_up() -> None:
    study = TimingStudy(asked((0, [0], Op.PUT)), machine(), 1, MODEL, (("dram", 9 * SLOT),), 2 * BLOCK_BYTES, ("lru",))
    with pytest.raises(ValueError, match="puts alone"):
        list(study.run(lambda label, done, total: None))


def test_best_is_what_ships_for_either_tier() -> None:
    made: dict[str, list[str]] = {}
    for policy in ("best", "chain-hazard"):
        study = TimingStudy(
            TRACE, machine(), 1, MODEL, (("dram", 40 * SLOT), ("nvme", 120 * SLOT)), 30 * BLOCK_BYTES, (policy,)
        )
        wanted = study.settings(policy, "always")
        made[policy] = [each.name for each in serve_made(wanted).store.policies]
    shipped = load_config(None, [])
    assert made == {"best": [shipped.host.policy, shipped.nvme.policy], "chain-hazard": ["chain-hazard"] * 2}


def test_requests_before_the_part_warm_up_and_are_not_counted() -> None:
    study = TimingStudy(
        TRACE, machine(block_s=0.2), 1, MODEL, (("dram", 40 * SLOT),), 30 * BLOCK_BYTES, ("lru",), count_from=50
    )
    rows = [result.row for result in study.run(lambda label, done, total: None)]
    assert {row["requests"] for row in rows} == {60}
    assert {row["block_accesses"] for row in rows} == {sum(map(len, REQUESTS[50:]))}
