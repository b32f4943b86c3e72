"""How good is restoring by computing and loading at once, and in which order, where costs are known or wrong?

No time is measured: requests run in simulated time on the client's own planner, pointers and rules
(`support/restore_machine.py`). Tokens axis, chunks of 512 tokens, one link unless said otherwise. Random machines:
fixed costs up to 10 % of a chunk, contention up to 1.2x on both sides, 12 to 64 chunks, attention up to doubling a
chunk's cost over the prefix. `ratio` is loading all over computing all. The optimum is the dynamic programme over all
regions, layers included, so the pointers, which take whole chunks, cannot reach it on short prefixes.

The devices' table uses peak bf16 rates at half utilisation and links at their nominal speed: an 8B model of 32 layers,
hidden size 4096, 128 KiB of K/V a token (`support/devices.py`). Gains there are over recomputing alone and over loading
alone; `mean` is over all cells and both of them. Several devices: `restore_stages.py`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence

from support.devices import CHUNK_TOKENS, TIER, cells
from support.report import AT_LEAST, Row, main, within
from support.restore_machine import Machine, Restored
from support.timing import percentile

from kvstore_restore.batch import DEFAULT, FCFS, LONGEST_LOADS, SHORTEST, Rule
from kvstore_restore.costs import ComputeCost, Contention, LinkCost, RestoreCosts
from kvstore_restore.optimum import optimum_s
from kvstore_restore.plan import Prefix, plan, plans_by_axis

CHUNK_BYTES = 64 << 20


def measure(quick: bool) -> list[Row]:
    machines = 40 if quick else 200
    return [
        *_against_optimum(machines // 4),
        *_gains(machines),
        *_orders(2 if quick else 5),
        *_devices(),
    ]


def random_machine(rng: random.Random, ratio: float) -> tuple[Prefix, RestoreCosts]:
    """A prefix and a machine on which loading all of it takes `ratio` times as long as computing all of it."""
    chunks = rng.randint(12, 64)
    prefix = Prefix((TIER,) * chunks, CHUNK_TOKENS, CHUNK_BYTES, layers=8)
    chunk_s = 0.05
    last = CHUNK_TOKENS * chunks
    attended = rng.uniform(0, 1) * chunk_s / (CHUNK_TOKENS * last)
    compute = ComputeCost(rng.uniform(0, 0.1) * chunk_s, chunk_s / CHUNK_TOKENS, attended)
    contention = Contention(rng.uniform(1, 1.2), rng.uniform(1, 1.2))
    whole_s = sum(compute.chunk_s(at * CHUNK_TOKENS, CHUNK_TOKENS) for at in range(chunks))
    load_s = ratio * whole_s / chunks
    lead = rng.uniform(0, 0.1) * load_s
    return prefix, RestoreCosts(compute, {TIER: LinkCost(lead, (load_s - lead) / CHUNK_BYTES)}, contention)


def wrong(costs: RestoreCosts, rng: random.Random, error: float) -> RestoreCosts:
    """The costs with each of computing and loading wrong by the factor 1 + `error` or its inverse."""

    def factor() -> float:
        return (1 + error) ** rng.choice((-1, 1))

    slow, fast = factor(), factor()
    compute, link = costs.compute, costs.links[TIER]
    return RestoreCosts(
        ComputeCost(compute.fixed_s * slow, compute.token_s * slow, compute.attended_s * slow),
        {TIER: LinkCost(link.fixed_s * fast, link.byte_s * fast)},
        costs.contention,
    )


def restored_s(
    prefix: Prefix, true: RestoreCosts, believed: RestoreCosts | None = None, *, cake: bool = False
) -> float:
    """Seconds of one request alone."""
    return Machine(true, believed, always_both=cake).run([Restored(0, 0.0, prefix)])[0]


def single_s(prefix: Prefix, costs: RestoreCosts) -> float:
    plans = plans_by_axis(prefix, costs)
    return min(plans["load"].finish_s, plans["compute"].finish_s)


def _spread(rng: random.Random, low: float, high: float, count: int) -> Iterator[float]:
    """Ratios, evenly on a logarithmic scale."""
    for at in range(count):
        yield low * (high / low) ** ((at + rng.random()) / count)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _against_optimum(machines: int) -> list[Row]:
    rng = random.Random(1)
    planned, online, wrongly = [], [], []
    for ratio in _spread(rng, 0.1, 10, machines):
        prefix, costs = random_machine(rng, ratio)
        best = optimum_s(prefix, costs)
        planned.append(plan(prefix, costs, error=0.0).finish_s / best)
        online.append(restored_s(prefix, costs) / best)
        wrongly.append(restored_s(prefix, costs, wrong(costs, rng, 0.2)) / best)
    return [
        within("plan_over_optimum_worst", max(planned), "x", 1.065),
        within("pointers_over_optimum_mean", _mean(online), "x", 1.065),
        Row("pointers_over_optimum_p95", percentile(online, 95), "x", 1.0, "optimum"),
        Row("pointers_over_optimum_worst", max(online), "x", 1.0, "optimum"),
        within("pointers_costs_wrong_20_percent_mean", _mean(wrongly), "x", 1.065),
    ]


def _gains(machines: int) -> list[Row]:
    def gains(low: float, high: float, error: float, cake: bool = False) -> list[float]:
        rng = random.Random(2)
        found = []
        for ratio in _spread(rng, low, high, machines):
            prefix, costs = random_machine(rng, ratio)
            believed = wrong(costs, rng, error) if error else None
            found.append(single_s(prefix, costs) / restored_s(prefix, costs, believed, cake=cake))
        return found

    near, wide, all_of_them = gains(0.5, 2, 0), gains(0.25, 4, 0), gains(0.1, 10, 0)
    return [
        _at_least("gain_ratio_0.5_to_2_mean", _mean(near), 1.5),
        Row("gain_ratio_0.5_to_2_least", min(near), "x", 1.0, "better single path", AT_LEAST),
        _at_least("gain_ratio_0.25_to_4_mean", _mean(wide), 1.3),
        _at_least("gain_ratio_0.1_to_10_least", min(all_of_them), 0.97),
        _at_least("gain_ratio_0.1_to_10_least_wrong_20_percent", min(gains(0.1, 10, 0.2)), 0.97),
        Row("cake_ratio_0.1_to_10_least", min(gains(0.1, 10, 0, True)), "x", 1.0, "better single path", AT_LEAST),
    ]


def _at_least(name: str, value: float, target: float) -> Row:
    return Row(name, value, "x", 1.0, "better single path", AT_LEAST, target)


def _orders(rounds: int) -> list[Row]:
    rows = []
    others = (DEFAULT, SHORTEST, FCFS)
    for load in (0.0, 0.7, 0.85):
        name = f"open_loop_{load * 100:.0f}_percent" if load else "batch_of_4_to_8"
        times = rounds if load else 20 * rounds
        paper = _waits(LONGEST_LOADS, load, times)
        for rule in others:
            found = _waits(rule, load, times)
            target = 0.6 if rule is DEFAULT else None
            label = f"{name}: {rule.name}"
            rows.append(_over_paper(f"{label}, mean", _mean(found), _mean(paper), target))
            target = 1.0 if rule is DEFAULT and load else None
            rows.append(_over_paper(f"{label}, p99", percentile(found, 99), percentile(paper, 99), target))
    return rows


def _over_paper(name: str, value: float, paper: float, target: float | None) -> Row:
    return Row(name, value, "s", paper, "longest remaining loads", target=target)


def _waits(rule: Rule, load: float, rounds: int) -> list[float]:
    """Times to restored: batches that arrive at once, or arrivals at `load` of what the machine can do."""
    found: list[float] = []
    for number in range(rounds):
        rng = random.Random(100 + number)
        _, costs = random_machine(rng, rng.uniform(0.5, 2.0))
        count = 150 if load else rng.randint(4, 8)
        service_s = _service_s(costs) if load else 0.0
        arrived, requests = 0.0, []
        for at in range(count):
            # Many short prefixes and few long ones, as conversations are.
            chunks = min(128, max(2, round(rng.lognormvariate(2.5, 1.0))))
            prefix = Prefix((TIER,) * chunks, CHUNK_TOKENS, CHUNK_BYTES)
            requests.append(Restored(at, arrived, prefix))
            if load:
                arrived += rng.expovariate(load / service_s)
        found += Machine(costs, rule=rule).run(requests)
    return found


def _service_s(costs: RestoreCosts) -> float:
    """Mean time of one request alone."""
    rng = random.Random(7)
    sizes = [min(128, max(2, round(rng.lognormvariate(2.5, 1.0)))) for _ in range(200)]
    return _mean([plan(Prefix((TIER,) * size, CHUNK_TOKENS, CHUNK_BYTES), costs, error=0.0).finish_s for size in sizes])


def _devices() -> list[Row]:
    rows, gains, better, over_cake = [], [], [], []
    for cell in cells():
        prefix, costs = cell.prefix, cell.costs
        plans = plans_by_axis(prefix, costs)
        ours, cake = restored_s(prefix, costs), restored_s(prefix, costs, cake=True)
        computing_s, loading_s = plans["compute"].finish_s, plans["load"].finish_s
        gains += [computing_s / ours, loading_s / ours]
        better.append(min(computing_s, loading_s) / ours)
        over_cake.append(cake / ours)
        alone = f"s; computing {computing_s:.3g}, loading {loading_s:.3g}, Cake's rule {cake:.3g}; the better alone"
        rows.append(Row(cell.name, ours, "s", min(computing_s, loading_s), alone))
    return [
        *rows,
        Row("8B_gain_over_either_mean", _mean(gains), "x", 1.0, "recomputing or loading", AT_LEAST, 2.2),
        Row("8B_gain_over_the_better_mean", _mean(better), "x", 1.0, "better single path", AT_LEAST),
        Row("8B_over_cake_least", min(over_cake), "x", 1.0, "Cake's rule", AT_LEAST, 1.0),
        Row("8B_over_cake_mean", _mean(over_cake), "x", 1.0, "Cake's rule", AT_LEAST),
    ]


if __name__ == "__main__":
    sys.exit(main(measure, __doc__))
