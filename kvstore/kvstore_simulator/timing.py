"""A timing study: one trace served under several plans on one machine, a row each.

The module makes the rows of mode `timing`. It prints nothing and models nothing: `node` does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from kvstore_simulator.hit_value import ModelSize, served_hit_value
from kvstore_simulator.machine import ENGINE, Machine
from kvstore_simulator.node import Node, serve_trace
from kvstore_simulator.node_settings import (
    ABLATIONS,
    BASELINES,
    ENGINE_ALONE,
    ON_ARRIVAL,
    ORCHESTRATED,
    MakePredictor,
    NodeSettings,
    ServingPlan,
)
from kvstore_simulator.simulated_request import Sample, SimulatedRequest
from kvstore_simulator.trace import Trace
from kvstored.clock import NS_PER_S
from kvstored.policy_names import ALWAYS, LRU
from kvstored.store.blocks.index import DEFAULT_GHOST_KEYS
from kvstored.store.policies import BEST, resolve

PERCENTILES = (50, 90, 99)
_SLICES = 100  # of time, for traffic
_QUANTILES = 200
_COUNTED = ("stored_blocks", "declined_blocks", "no_room_blocks")
Row = dict[str, Any]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Timed:
    """The result of serving a trace under one plan: a row of figures, and the data of its plots. `ttft_s` has evenly
    spaced quantiles of the time to first token, in seconds. `traffic` has the bytes moved in each slice of `slice_s`
    seconds.
    """

    row: Row
    ttft_s: list[float]
    residency: list[Sample]
    slice_s: float
    traffic: dict[str, list[int]]

    def timeline(self) -> dict[str, Any]:
        return {
            "plan": self.row["plan"], "policy": self.row["policy"], "admission": self.row["admission"],
            "ttft_quantiles_s": self.ttft_s, "residency": [asdict(sample) for sample in self.residency],
            "traffic_slice_s": self.slice_s, "traffic_bytes": self.traffic,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class TimingStudy:
    """A study of latencies: one trace is served under several plans (ways of serving) on one simulated machine. `tiers`
    are the media of the store with their bytes, fastest first. `pool_bytes` is the engine's own memory for blocks.
    Requests before number `count_from` are served but not counted. Each of `without` names a feature of the full plan;
    one more run leaves it out. Each of `predictors` gives one more run, in which the predictor triggers prefetch
    instead of arrivals. `gpu` has the settings of the GPU tier; plans without that tier give its memory to the engine's
    own blocks.
    """

    trace: Trace
    machine: Machine
    devices: int
    model: ModelSize
    tiers: tuple[tuple[str, int], ...]
    pool_bytes: int
    policies: tuple[str, ...]
    admissions: tuple[str, ...] = (ALWAYS,)
    ttl_s: float | None = None
    ghost_keys: int = DEFAULT_GHOST_KEYS
    speed: float = 1.0
    count_from: int = 0
    without: tuple[str, ...] = ()
    keep_worth: float = 0.0
    predictors: Mapping[str, MakePredictor] = field(default_factory=dict)
    gpu: Mapping[str, str] = field(default_factory=dict)
    results: list[Timed] = field(default_factory=list)

    def run(self, progress: Progress) -> Iterator[Timed]:
        """Yield the result of each plan when the trace has been served under it. The order is: the engine without a
        store, the baseline plans, the full plan with each policy and admission, the runs that leave out a feature, and
        the runs with predictors.
        """
        baselines = BASELINES[: len(self.settings(BEST, ALWAYS).without_gpu.tiers)]
        runs = [(plan, LRU, ALWAYS) for plan in (ENGINE_ALONE, *baselines)]
        runs += [(ORCHESTRATED, policy, admission) for policy in self.policies for admission in self.admissions]
        without = dict.fromkeys((*self.without, *([ON_ARRIVAL] if self.predictors else [])))
        runs += [(ABLATIONS[part], self.policies[0], self.admissions[0]) for part in without]
        for plan, policy, admission in runs:
            yield self._timed(plan, policy, admission, progress)
        for name in self.predictors:
            plan = replace(ABLATIONS[ON_ARRIVAL], name=f"predicted: {name}")
            yield self._timed(plan, self.policies[0], self.admissions[0], progress, name)

    def settings(self, policy: str, admission: str) -> NodeSettings:
        """Return the settings of a simulated node. `policy` "best" stands for the daemon's default policy of each kind
        of tier; any other name is the policy of all tiers. `admission` is the rule for writes to NVMe.
        """
        return NodeSettings(
            self.machine, self.model, self.tiers, self.pool_bytes, resolve(policy), admission, self.ttl_s,
            self.ghost_keys, self.speed, self.keep_worth, None if policy == BEST else resolve(policy), gpu=self.gpu,
        )  # fmt: skip

    def _timed(self, plan: ServingPlan, policy: str, admission: str, progress: Progress, predictor: str = "") -> Timed:
        label = f"{plan.name}, {policy}" if plan.has_store else plan.name
        settings = replace(self.settings(policy, admission), predictor=self.predictors.get(predictor))
        settings = settings if plan.uses_gpu else settings.without_gpu
        began = time.perf_counter()
        node = serve_trace(self.trace, settings, plan, lambda done, total: progress(label, done, total))
        seconds = time.perf_counter() - began
        requests = [
            request for request in node.served.requests if request.is_served and request.number >= self.count_from
        ]
        if not requests and not node.served.refused:
            raise ValueError("nothing in this trace looks anything up: it has puts alone")
        if not requests:
            raise ValueError(
                f"no request fits the engine's memory of {node.pool.capacity_blocks:,} blocks: more devices, or "
                "--tiers engine=SIZE"
            )
        row = self._row(plan, policy, admission, node, requests) | {"seconds": round(seconds, 3)}
        quantiles = np.quantile([request.ttft_ns / NS_PER_S for request in requests], np.linspace(0, 1, _QUANTILES + 1))
        slice_s, traffic = self._traffic(node)
        timed = Timed(
            row, [round(value, 6) for value in quantiles.tolist()], node.served.samples, slice_s, traffic
        )  # fmt: skip
        self.results.append(timed)
        if predictor:
            row["prefetch"] = self._prefetch(predictor, node, row)
        if plan is not ENGINE_ALONE and plan not in BASELINES:
            row["speedup"] = self._speedup(row)
        return timed

    def _row(
        self, plan: ServingPlan, policy: str, admission: str, node: Node, requests: Sequence[SimulatedRequest]
    ) -> Row:
        trace, served = self.trace, node.served
        value = served_hit_value(requests, trace.block_tokens, self.model)
        slots = sum(nbytes for _, nbytes in node.settings.tiers) // self._slot_bytes(node) if plan.has_store else 0
        return {
            "mode": "timing",
            "plan": plan.name,
            "policy": policy,
            "resolved_policy": resolve(policy),
            "admission": admission,
            "profile": self.machine.name,
            "devices": self.devices,
            "capacity_blocks": slots,
            "capacity_fraction": round(slots / trace.distinct_blocks, 6),
            "engine_blocks": node.pool.capacity_blocks,
            "distinct_blocks": trace.distinct_blocks,
            "requests": len(requests),
            "refused": served.refused,
            "block_accesses": value.block_accesses,
            "hits": value.hits,
            "hit_ratio": round(value.hit_ratio, 6),
            "hits_by_tier": self._hits_by_tier(node, requests),
            "recomputed_blocks": sum(request.recomputed for request in requests),
            "compute_saved_ratio": round(value.compute_saved_ratio, 6),
            "ttft_s": _spread([request.ttft_ns for request in requests]),
            "queue_s": _spread([request.queued_ns for request in requests]),
            "exposed_s": _spread([request.exposed_ns for request in requests]),
            "largest_queue": served.largest_queue,
            "bytes_by_lane": self._lanes(node),
            "bytes_by_tier": self._tiers(node),
            "wait_by_lane_s": {
                lane.name: round(lane.waited_ns / NS_PER_S / max(1, lane.transfers), 6) for lane in _lanes_of(node)
            },
            "utilisation": self._utilisation(node),
            **{name: node.store.store.counters[name] if node.store is not None else 0 for name in _COUNTED},
            "lasted_s": round(served.lasted_s, 3),
        }

    def _prefetch(self, predictor: str, node: Node, row: Row) -> dict[str, Any]:
        """Return the figures of prefetch by prediction, and mean times relative to the plan without any prefetch."""
        assert node.store is not None
        status = node.store.store.prefetcher.statistics()
        figures, plain = status.all, ABLATIONS[ON_ARRIVAL].name
        without = next(result.row for result in self.results if result.row["plan"] == plain)
        return {
            "predictor": predictor, "failure": status.failure, "prefetched_bytes": figures.prefetched_bytes,
            "used_bytes": figures.used_bytes, "wasted_bytes": figures.wasted_bytes,
            "late_blocks": figures.late_blocks, "spared_s": round(figures.spared_s, 3),
            "ttft_against_without": round(row["ttft_s"]["mean"] / max(without["ttft_s"]["mean"], 1e-9), 4),
            "exposed_against_without": round(row["exposed_s"]["mean"] / max(without["exposed_s"]["mean"], 1e-9), 4),
        }  # fmt: skip

    def _hits_by_tier(self, node: Node, requests: Sequence[SimulatedRequest]) -> dict[str, int]:
        """Return where stored blocks were found, even if they were computed again in the end."""
        found = {ENGINE: sum(request.in_pool for request in requests)} | {name: 0 for name, _ in self.tiers}
        for position, (name, _) in enumerate(node.settings.tiers):
            found[name] = sum(request.found[position] for request in requests if request.found)
        return found

    def _lanes(self, node: Node) -> dict[str, int]:
        """Return the bytes of each lane, and the bytes that computing moves from the engine's own memory."""
        lanes = {lane.name: lane.nbytes for lane in _lanes_of(node)}
        return {f"{self.machine.engine_tier}→sram": round(node.served.streamed_bytes)} | lanes

    def _tiers(self, node: Node) -> dict[str, dict[str, int]]:
        """Return the bytes read from and written to each tier; computing also uses the engine's own memory and SRAM."""
        streamed = round(node.served.streamed_bytes)
        found = {"sram": {"read": 0, "written": streamed}, self.machine.engine_tier: {"read": streamed, "written": 0}}
        for lane in _lanes_of(node):
            for end, what in zip(lane.name.split("→"), ("read", "written"), strict=True):
                tier = self.machine.engine_tier if end == ENGINE else end
                found.setdefault(tier, {"read": 0, "written": 0})[what] += lane.nbytes
        return found

    def _utilisation(self, node: Node) -> dict[str, float]:
        """Return the busy share of each medium over the time until the last first token; writing behind may go on a
        little longer.
        """
        lasted_ns = max(1.0, node.served.lasted_s * NS_PER_S)
        busy = {"compute": node.served.compute_busy_s * NS_PER_S}
        if node.store is not None:
            busy |= {"link" if medium is node.link else medium.spec.name: medium.busy_ns for medium in node.media}
        return {name: round(min(1.0, each / lasted_ns), 4) for name, each in busy.items()}

    def _traffic(self, node: Node) -> tuple[float, dict[str, list[int]]]:
        last_ns = max([node.clock.monotonic_ns(), *(end for lane in _lanes_of(node) for end, _ in lane.moved[-1:])])
        step_ns = last_ns // _SLICES + 1
        traffic = {}
        for lane in _lanes_of(node):
            ends, sizes = np.array([end for end, _ in lane.moved]), np.array([nbytes for _, nbytes in lane.moved])
            counts = np.bincount((ends // step_ns).astype(np.int64), sizes, _SLICES) if len(ends) else np.zeros(_SLICES)
            traffic[lane.name] = counts.astype(np.int64).tolist()
        return step_ns / NS_PER_S, traffic

    def _speedup(self, row: Row) -> dict[str, float]:
        """Return the factors by which the time to first token is shorter than in the better baseline."""
        names = [plan.name for plan in BASELINES]
        bases = [result.row["ttft_s"] for result in self.results if result.row["plan"] in names]
        return {
            what: round(min(base[what] for base in bases) / max(own, 1e-9), 3) for what, own in row["ttft_s"].items()
        }

    def _slot_bytes(self, node: Node) -> int:
        return node.store.slot_bytes if node.store is not None else 1


def _lanes_of(node: Node) -> list[Any]:
    return node.store.lanes if node.store is not None else []


def _spread(times_ns: Sequence[int]) -> dict[str, float]:
    seconds = np.array(times_ns, dtype=np.float64) / NS_PER_S
    found = {"mean": float(seconds.mean())}
    found |= {f"p{share}": float(np.percentile(seconds, share)) for share in PERCENTILES}
    return {name: round(value, 6) for name, value in found.items()}
