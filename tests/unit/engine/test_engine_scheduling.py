"""Policies choose who goes first, who waits and who yields, on a clock that only steps move."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvstore_engine.batching.policies import SchedulingCandidate, choose_policy
from kvstore_engine.batching.scheduling_statistics import LengthPredictor, VirtualTokens
from kvstore_engine.batching.step_budget import StepBudget
from kvstore_restore.learned import LearnedCosts
from tests.reference.assumed_costs import assume
from tests.reference.batch_runs import Outcome, request, run, twin_engine
from tests.reference.open_loop import Arrival, mixed_load, run_load
from tests.reference.twin_compute import TwinCompute, answer_alone


def _mean(latencies: dict[str, float], kind: str = "") -> float:
    return float(np.mean([latency for name, latency in latencies.items() if name.startswith(kind)]))


def _p99(latencies: dict[str, float], kind: str) -> float:
    return float(np.percentile([latency for name, latency in latencies.items() if name.startswith(kind)], 99))


def _first_come_and_shortest(count: int) -> tuple[dict[str, float], dict[str, float]]:
    """Latencies at 85 % of what the engine can do, with lengths that it has to learn."""
    load = mixed_load(count)
    patient = {"max_running": 4, "max_queue_s": 1e9}
    rate = 0.85 * len(load) / max(run_load(load, 1e6, **patient).values())
    return run_load(load, rate, policy="fcfs", **patient), run_load(load, rate, policy="shortest", **patient)


@pytest.mark.slow
def test_shortest_remaining_halves_the_mean_latency() -> None:
    first_come, shortest = _first_come_and_shortest(150)
    assert _mean(shortest) <= 0.6 * _mean(first_come)


@pytest.mark.slow
def test_ageing_spares_the_long() -> None:
    first_come, shortest = _first_come_and_shortest(500)
    assert _mean(shortest) <= 0.6 * _mean(first_come)
    assert _p99(shortest, "long") <= 1.2 * _p99(first_come, "long")


def test_a_long_request_is_not_passed_over_for_ever() -> None:
    """Short ones arrive faster than they can be answered: without ageing the long one would be the last."""
    load = [Arrival(0.0, "short-1", "", 40, 20, 32), Arrival(0.0, "long", "", 400, 300, 512)]
    load += [Arrival(n / 10, f"short{n}", "", 40, 20, 32) for n in range(100)]
    aged = run_load(load, 1.0, policy="shortest", max_running=1, ageing=0.7)
    never = run_load(load, 1.0, policy="shortest", max_running=1, ageing=0.0)
    assert aged["long"] < 0.5 * max(aged.values())
    assert never["long"] == max(never.values())


def test_a_higher_priority_displaces_a_running_answer_and_no_token_is_lost() -> None:
    engine = twin_engine(policy="priority", max_running=2)
    outcome = Outcome()
    for n in range(3):
        engine.add(request(f"low{n}", range(20 + n), 60))
    for _ in range(10):
        outcome.take(engine.step())
    engine.add(request("high", range(30), 5, priority=1))
    while ("high", 0) not in outcome.finished:
        outcome.take(engine.step())
    assert not any(name.startswith("low") for name, _ in outcome.finished)
    assert len(outcome.tokens["high", 0]) == 5
    run(engine, outcome)
    for n in range(3):
        assert outcome.tokens[f"low{n}", 0] == answer_alone(range(20 + n), 60)
    assert sum(finished.usage.preemptions for finished in outcome.finished.values()) == 1


def test_a_low_priority_waits_but_not_for_ever() -> None:
    load = [Arrival(n / 10, f"high{n}", "", 40, 20, 32, priority=1) for n in range(100)]
    load.insert(5, Arrival(0.5, "low", "", 40, 20, 32))
    soon = run_load(load, 1.0, policy="priority", max_running=1, level_s=1.5)
    late = run_load(load, 1.0, policy="priority", max_running=1, level_s=1e9)
    assert soon["low"] < 0.5 * max(soon.values())
    assert late["low"] > 0.9 * max(late.values())


@pytest.mark.parametrize("policy", ["fcfs", "shortest", "priority"])
def test_a_tenant_with_many_requests_does_not_starve_one_with_few(policy: str) -> None:
    engine = twin_engine(policy=policy, max_running=2)
    for n in range(40):
        engine.add(request(f"many{n}", range(n, n + 20), 20, tenant="many"))
    outcome = Outcome()
    for _ in range(30):
        outcome.take(engine.step())
    for n in range(4):
        engine.add(request(f"few{n}", range(n, n + 20), 20, tenant="few"))
    run(engine, outcome)
    order = [name for name, _ in outcome.finished]
    position = max(order.index(f"few{n}") for n in range(4))
    served_before = order.index("few0")
    assert position - served_before <= 2 * 4 + 2, "the tenants did not take turns"
    assert position < 20


def test_an_idle_tenant_saves_up_no_turns() -> None:
    tenants = VirtualTokens()
    tenants.enter("busy")
    tenants.charge("busy", prompt_tokens=1000, output_tokens=100)
    tenants.enter("new")
    assert tenants.served("new") == tenants.served("busy") == 1200
    tenants.charge("new", prompt_tokens=10)
    tenants.leave("busy")
    tenants.leave("new")
    tenants.enter("late")
    assert tenants.served("late") == 1210


def test_a_lengths_forecast_is_learnt_per_kind_and_never_shrinks_to_nothing() -> None:
    lengths = LengthPredictor()
    assert 1 <= lengths.remaining("a", 100, 0, 50) <= 50
    for _ in range(50):
        lengths.observe("a", 40, 10)
        lengths.observe("a", 4000, 400)
        lengths.observe("b", 40, 100)
    assert lengths.remaining("a", 50, 0, 1000) == pytest.approx(10, rel=0.3)
    assert lengths.remaining("a", 3000, 0, 1000) == pytest.approx(400, rel=0.3)
    assert lengths.remaining("b", 50, 0, 1000) == pytest.approx(100, rel=0.3)
    assert lengths.remaining("unknown", 50, 0, 1000) == pytest.approx(170, rel=0.3)
    assert lengths.remaining("a", 50, 0, 5) == 5
    for generated in (11, 100, 399, 999):
        assert lengths.remaining("a", 50, generated, 1000) >= 1
    assert lengths.remaining("a", 50, 20, 1000) > 100, "it has outlived its kind: it is of another"


@pytest.mark.parametrize("name", ["fcfs", "shortest", "priority"])
def test_no_two_sequences_displace_each_other(name: str) -> None:
    policy = choose_policy(name, ageing=0.7, level_s=10.0)
    randoms = np.random.default_rng(1)
    for _ in range(2000):
        one, two = (
            SchedulingCandidate(
                order=n,
                arrived_s=(arrived := float(randoms.uniform(0, 50))),
                since_s=arrived,
                priority=(priority := int(randoms.integers(0, 3))),
                level=priority + float(randoms.integers(0, 3)),
                remaining_s=float(randoms.exponential(10)),
                served=float(randoms.integers(0, 100)),
            )
            for n in range(2)
        )
        now = 50.0
        if policy.displaces(one, two, now):
            one_runs = replace(one, level=policy.level(one, now))
            assert not policy.displaces(replace(two, since_s=now), one_runs, now)


def budget_of(costs: LearnedCosts, floor_s: float = 0.0) -> StepBudget:
    return StepBudget(costs, stretch=1.8, most_stretch=3.0, floor_s=floor_s, most_tokens=256, block_tokens=16)


def exact_costs() -> LearnedCosts:
    """4 ms and 1 ms a row."""
    costs = LearnedCosts()
    assume(costs, [0.004, 0.512, 0.0])
    return costs


PROMPT = [(1, 0)]


def test_a_step_beside_decodes_is_as_long_as_it_may_be_and_no_longer() -> None:
    budget = budget_of(exact_costs())
    assert budget.tokens([], PROMPT) == 256
    decodes = [(1, 100)] * 76  # 80 ms
    for _ in range(64):
        budget.observe(decodes, 0, 0.08)
    assert budget.tokens(decodes, PROMPT) == 64  # 64 ms more
    assert budget.tokens(decodes[:1], PROMPT) == 16  # never less than a block
    assert budget_of(exact_costs(), floor_s=0.07).tokens(decodes[:1], PROMPT) == 64
    for _ in range(20):
        budget.tokens(decodes, PROMPT)
        budget.observe(decodes, 64, 0.5)
    for _ in range(64):  # what was unusually long is no measure any more
        budget.observe(decodes, 0, 0.08)
    assert budget.tokens(decodes, PROMPT) == 16
    for _ in range(200):
        budget.observe(decodes, 64, 0.08)
    assert budget.tokens(decodes, PROMPT) == 64


def test_steps_grow_together_while_prompts_keep_coming_and_shrink_after() -> None:
    budget = budget_of(exact_costs())
    decodes = [(1, 100)] * 16  # 20 ms
    for _ in range(64):
        budget.observe(decodes, 0, 0.02)
    sizes = []
    for _ in range(200):
        sizes.append(budget.tokens(decodes, PROMPT))
        budget.observe(decodes, sizes[-1], 0.02 + 0.001 * sizes[-1])
    assert sizes == sorted(sizes)  # each little longer than those before it
    assert (sizes[0], sizes[-1]) == (16, 32)  # at most three times 21 ms, of which 20 are the decodes', in whole blocks
    for _ in range(64):
        budget.observe(decodes, 0, 0.02)
    assert budget.tokens(decodes, PROMPT) == 16


def test_before_any_decoding_steps_begin_as_long_as_they_may_become() -> None:
    budget = budget_of(exact_costs())
    budget.observe([(1, 100)] * 16, 0, 0.02)
    assert budget.tokens([], PROMPT) == 256
    # 16 run: a step of 20 ms if all decoded, of 60 at most; the one that decodes takes 5.
    assert budget.tokens([(1, 100)], [(1, 0)] * 15) == 48


def test_a_budget_that_a_busy_minute_cut_to_a_block_grows_again() -> None:
    budget = budget_of(LearnedCosts(), floor_s=0.1)
    decodes = [(1, 100)] * 4
    before = budget.tokens(decodes, PROMPT)
    for _ in range(100):
        budget.observe(decodes, budget.tokens(decodes, PROMPT), 10.0)
    for _ in range(64):
        budget.observe(decodes, 0, 0.01)
    assert budget.tokens(decodes, PROMPT) == 16 < before
    for _ in range(2000):
        budget.observe(decodes, budget.tokens(decodes, PROMPT), 0.01)
    assert budget.tokens(decodes, PROMPT) == before


@pytest.mark.slow
def test_steps_at_sixteen_sequences_are_of_one_length() -> None:
    """Requests come and go, so that prompts are computed beside decodes all the time."""
    lengths: list[float] = []
    engine = twin_engine(2048, max_context=2048)
    clock = engine.compute.on_step.__self__  # type: ignore[attr-defined]
    randoms = np.random.default_rng(3)
    names = iter(range(10000))
    outcome = Outcome()
    while len(lengths) < 700:
        while engine.running + engine.waiting < 16:
            prompt = randoms.integers(0, 64, int(randoms.integers(100, 600))).tolist()
            engine.add(request(str(next(names)), prompt, int(randoms.integers(40, 160)), store=False))
        before = clock.now
        outcome.take(engine.step())
        if engine.running == 16 and len(outcome.finished) > 16:
            lengths.append(clock.now - before)
    assert isinstance(engine.compute, TwinCompute)
    assert np.percentile(lengths, 99) <= 2.0 * np.percentile(lengths, 50)
