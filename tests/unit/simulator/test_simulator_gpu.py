"""Mode timing with a tier in the device's memory, against figures by hand and against what must hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import pytest

from kvstore_simulator import node_store
from kvstore_simulator.machine import GPU, HBM, Machine
from kvstore_simulator.node import Node, serve_trace
from kvstore_simulator.node_settings import ABLATIONS, BASELINE, ORCHESTRATED, NodeSettings, ServingPlan
from kvstore_simulator.timing import TimingStudy
from kvstore_simulator.trace import Op, Trace
from kvstored.clock import NS_PER_S
from kvstored.store.blocks.check import check
from tests.reference.examples import quick_are
from tests.reference.traces import sessions, trace_of
from tests.unit.simulator.test_simulator_timing import BLOCK_BYTES, LONGER, MODEL, SLOT, asked, machine, near, spec

ALWAYS = {"admission": "always", "rate": "0", "policy": "lru"}
HBM_S = 0.05  # to read a block of device memory, or to write one
LINK_S = 0.2


def made(**times: float) -> Machine:
    plain = machine(link_s=LINK_S, **times)
    return replace(plain, media={**plain.media, HBM: spec(HBM, SLOT / HBM_S, duplex=False)})


def serve(
    trace: Trace,
    tiers: tuple[tuple[str, int], ...],
    plan: ServingPlan = ORCHESTRATED,
    *,
    pool: int = 4,
    block_s: float = 1.0,
    gpu: Mapping[str, str] = ALWAYS,
) -> Node:
    """`tiers` in blocks."""
    in_bytes = tuple((name, blocks * SLOT) for name, blocks in tiers)
    wanted = NodeSettings(
        made(block_s=block_s), MODEL, in_bytes, pool * BLOCK_BYTES, "lru", policy_below="lru", gpu=gpu
    )
    node = serve_trace(trace, wanted, plan, lambda done, total: None)
    must_balance(node)
    return node


def lanes(node: Node) -> dict[str, int]:
    """Blocks that each lane moved."""
    assert node.store is not None
    assert all(lane.nbytes % SLOT == 0 for lane in node.store.lanes)
    return {lane.name: lane.nbytes // SLOT for lane in node.store.lanes}


def must_balance(node: Node) -> None:
    """No pin or lease is left, and each tier has what the residency says, within its capacity."""
    assert node.store is not None
    store = node.store.store
    assert not store.residency.pins and len(store.leases) == 0 and check(store.residency) == []
    for position, tier in enumerate(node.store.tiers):
        assert tier.used_bytes == store.residency.tier_blocks(position) * SLOT
        assert tier.used_bytes <= tier.statistics().capacity_bytes


# By hand. The engine has room for one request, and the third one is for the blocks of the first.


@pytest.mark.parametrize("plan", [ORCHESTRATED, ABLATIONS["overlap"]], ids=lambda plan: plan.name)
def test_what_is_on_the_device_is_not_copied_from_the_host(plan: ServingPlan) -> None:
    node = serve(LONGER, ((GPU, 100), ("dram", 100), ("nvme", 100)), plan)
    last, copying_s = node.served.requests[2], 4 * 2 * HBM_S  # each byte is read and written
    assert (last.in_pool, last.found, last.recomputed) == (0, [4, 0, 0], 0)
    assert last.exposed_ns / NS_PER_S == near(copying_s / MODEL.layers if plan.overlaps else copying_s)
    moved = lanes(node)
    assert (moved["gpu→engine"], moved["dram→engine"], moved["gpu→dram"]) == (4, 0, 0)
    assert moved["dram→gpu"] == 8, "each block once"


def test_what_the_device_alone_has_does_not_come_back_to_dram() -> None:
    node = serve(LONGER, ((GPU, 100), ("dram", 4)))
    assert node.served.requests[2].found == [4, 0]
    assert (lanes(node)["gpu→engine"], lanes(node)["gpu→dram"]) == (4, 0)


@pytest.mark.parametrize("plan", [ORCHESTRATED, ABLATIONS["overlap"]], ids=lambda plan: plan.name)
def test_what_is_in_dram_costs_the_engines_own_copy(plan: ServingPlan) -> None:
    """The blocks are in DRAM because admission has not let them onto the device: the second use is this one."""
    node = serve(LONGER, ((GPU, 100), ("dram", 100)), plan, gpu=ALWAYS | {"admission": "second-touch"})
    last, copying_s = node.served.requests[2], 4 * LINK_S
    assert (last.in_pool, last.found, last.recomputed) == (0, [0, 4], 0)
    assert last.exposed_ns / NS_PER_S == near(copying_s / MODEL.layers if plan.overlaps else copying_s)
    moved = lanes(node)
    assert (moved["gpu→engine"], moved["dram→engine"], moved["dram→gpu"]) == (0, 4, 4)


def test_copies_to_the_device_take_the_link_one_after_the_other() -> None:
    node = serve(asked((0, [0, 1, 2, 3], Op.REQUEST)), ((GPU, 100), ("dram", 100)))
    assert node.store is not None
    stored, copied = (lane for lane in node.store.lanes if lane.name in ("engine→dram", "dram→gpu"))
    ends_s = [end_ns / NS_PER_S for end_ns, _ in copied.moved]
    assert ends_s[0] == near(stored.moved[-1][0] / NS_PER_S + 0.05 + LINK_S), "soon after the put"
    assert [after - before for before, after in pairwise(ends_s)] == [near(LINK_S)] * 3


def test_copies_to_the_device_keep_to_a_byte_rate() -> None:
    """The limit is a block a second, and as much at once: two begin while something is left, then each waits for the
    last.
    """
    node = serve(asked((0, [0, 1, 2, 3], Op.REQUEST)), ((GPU, 100), ("dram", 100)), gpu=ALWAYS | {"rate": str(SLOT)})
    assert node.store is not None
    ends_s = [end_ns / NS_PER_S for lane in node.store.lanes if lane.name == "dram→gpu" for end_ns, _ in lane.moved]
    assert [after - before for before, after in pairwise(ends_s)] == [
        pytest.approx(each, abs=1e-3) for each in (0.2, 0.8, 1.0)
    ]


def test_the_engines_copies_wait_for_those_to_the_device_that_began_before() -> None:
    """The second use of four blocks has them copied to the device; then a request comes whose blocks are in DRAM."""
    before = ((0, [0, 1, 2, 3], Op.REQUEST), (50, [9, 8, 7, 6], Op.REQUEST), (100, [9, 8, 7, 6], Op.REQUEST))
    tiers, once = ((GPU, 100), ("dram", 100)), ALWAYS | {"admission": "second-touch"}
    alone = serve(asked(*before), tiers, ABLATIONS["overlap"], gpu=once)
    assert alone.store is not None
    copied = next(lane for lane in alone.store.lanes if lane.name == "dram→gpu")
    at_s = copied.moved[0][0] / NS_PER_S - LINK_S / 2  # half of the first copy is done, three have begun to wait
    node = serve(asked(*before, (at_s, [0, 1, 2, 3], Op.REQUEST)), tiers, ABLATIONS["overlap"], gpu=once)
    assert (node.served.requests[3].in_pool, node.served.requests[3].found) == (0, [0, 4])
    assert node.store is not None
    assert node.store.to_engine.moved[-1][0] / NS_PER_S == near(at_s + 3.5 * LINK_S + 4 * LINK_S)


def test_a_tier_behind_dram_has_what_dram_has_no_room_for() -> None:
    """DRAM has room for one request: what returns to it pushes the other one's blocks out."""
    node = serve(LONGER, (("dram", 4), (GPU, 100), ("nvme", 100)))
    last = node.served.requests[2]
    assert (last.in_pool, last.found) == (0, [0, 4, 0])
    moved = lanes(node)
    assert moved["gpu→engine"] == 0, "from there blocks come by way of DRAM"
    assert moved["dram→engine"] == 4 - last.recomputed > 0
    assert (moved["gpu→dram"], moved["dram→gpu"], moved["nvme→dram"]) == (4, 8, 0)


@pytest.mark.parametrize("way", ["bounce", "off"])
def test_what_nvme_alone_has_comes_past_dram(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is copied from DRAM to the device: its byte rate does not allow it, in no time that anybody waits."""
    monkeypatch.setattr(node_store, "_SETTLE_S", 10.0)
    gpu = ALWAYS | {"rate": "1", "from_nvme": way}
    plan = replace(ABLATIONS["weigh"], prefetches=False)
    node = serve(LONGER, ((GPU, 100), ("dram", 4), ("nvme", 100)), plan, gpu=gpu)
    on_device, in_dram, on_nvme = node.served.requests[2].found
    assert on_nvme > 0 and on_device + in_dram + on_nvme == 4
    moved, skips_dram = lanes(node), way != "off"
    assert moved.get("nvme→gpu", 0) == (on_nvme if skips_dram else 0)
    assert moved["nvme→dram"] == (0 if skips_dram else on_nvme)
    assert moved["gpu→engine"] == on_device + (on_nvme if skips_dram else 0)
    assert node.store is not None
    assert node.store.store.counters["straight_blocks"] == moved.get("nvme→gpu", 0)


def test_what_the_device_evicts_is_in_dram_again() -> None:
    """DRAM has lost the first request's blocks by the time that the device evicts some of them, for what is used more
    often; there is no NVMe."""
    trace = asked(
        (0, [0, 1, 2, 3], Op.REQUEST), (100, [9, 8, 7, 6], Op.REQUEST), (200, [19, 18, 17, 16], Op.REQUEST),
        (250, [19, 18, 17, 16], Op.REQUEST), (300, [0, 1, 2, 3], Op.REQUEST),
    )  # fmt: skip
    node = serve(trace, ((GPU, 8), ("dram", 5)))
    on_device, in_dram = node.served.requests[4].found
    assert (on_device + in_dram, lanes(node)["gpu→dram"] > 0) == (4, True)
    assert 0 < in_dram < 4


# Whatever the figures

REQUESTS = sessions(7, 110)
TRACE = trace_of(REQUESTS, every_s=0.7)
CROWDED = ((GPU, 20), ("dram", 40), ("nvme", 120))


@pytest.mark.parametrize("tiers", [CROWDED, (CROWDED[1], CROWDED[0], CROWDED[2])], ids=["first", "second"])
@pytest.mark.parametrize("admission", quick_are(["always", "second-touch", "worth"], [False, False, True]))
def test_nothing_is_lost_and_nothing_is_copied_twice_for_one_use(
    admission: str, tiers: tuple[tuple[str, int], ...]
) -> None:
    node = serve(TRACE, tiers, pool=30, gpu={"admission": admission, "rate": "0"})
    requests, moved = node.served.requests, lanes(node)
    assert len(requests) == len(REQUESTS) and all(visit.is_served for visit in requests)
    at, host = ([name for name, _ in tiers].index(name) for name in (GPU, "dram"))
    assert node.store is not None
    flows = node.store.store.flows.tiers
    assert moved["gpu→dram"] == flows[at].promoted_blocks + (flows[at].demoted_blocks if at < host else 0)
    assert moved["dram→gpu"] > 0 and (at > host or moved["dram→gpu"] == node.store.store.counters["device_blocks"])
    on_device = sum(visit.found[at] for visit in requests)
    assert on_device > 0 and moved["gpu→engine"] == (on_device if at < host else 0)


def test_it_is_the_same_each_time_and_knows_nothing_of_what_comes_later() -> None:
    def ends(trace: Trace) -> list[tuple[int, list[int]]]:
        return [(visit.end_ns, visit.found) for visit in serve(trace, CROWDED, pool=30, block_s=0.2).served.requests]

    whole = ends(TRACE)
    assert whole == ends(TRACE)
    until_ns = int(TRACE.times_ns[100])
    before = [end for end in whole if end[0] < until_ns]
    assert len(before) > 70 and [end for end in ends(TRACE.part(0, 100)) if end[0] < until_ns] == before


def test_plans_without_the_tier_have_its_memory_for_the_engine() -> None:
    tiers = tuple((name, blocks * SLOT) for name, blocks in CROWDED)
    study = TimingStudy(TRACE.part(0, 60), made(), 1, MODEL, tiers, 30 * BLOCK_BYTES, ("best",), without=(GPU,))
    rows = {row["plan"]: row for row in (result.row for result in study.run(lambda label, done, total: None))}
    assert list(rows) == ["engine-alone", "baseline", "baseline-eager", "orchestrated", "without gpu"]
    assert rows.pop("orchestrated")["engine_blocks"] == 30
    own = (30 * BLOCK_BYTES + 20 * SLOT) // BLOCK_BYTES
    assert {(row["engine_blocks"], row["hits_by_tier"][GPU]) for row in rows.values()} == {(own, 0)}
    assert {row["capacity_blocks"] for row in rows.values()} == {0, 160}
    assert BASELINE.name in rows and "gpu→engine" not in rows["without gpu"]["bytes_by_lane"]
