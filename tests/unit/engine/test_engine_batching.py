"""The engine's loop over a model that notices every wrong block: each answer equals the answer of the request alone."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvstore_engine.batching.events import Finished
from kvstore_engine.batching.intake import Overloaded
from kvstore_engine.errors import UsageError
from tests.reference.batch_runs import Outcome, request, run, twin_engine
from tests.reference.block_invariants import check_blocks
from tests.reference.twin_compute import TwinCompute, answer_alone, text_of


def _prompt(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 64, count).tolist()


def test_sequences_join_and_leave_and_each_answers_as_alone() -> None:
    engine = twin_engine()
    prompts = {str(n): _prompt(n, 3 + 37 * n % 301) for n in range(40)}
    outcome = Outcome()
    for name, prompt in prompts.items():
        engine.add(request(name, prompt, 1 + int(name) % 19))
        outcome.take(engine.step())
    run(engine, outcome)
    for name, prompt in prompts.items():
        assert outcome.tokens[name, 0] == answer_alone(prompt, 1 + int(name) % 19)
        assert outcome.text[name, 0] == text_of(outcome.tokens[name, 0])
        assert outcome.finished[name, 0].reason == "length"


def test_a_long_prompt_does_not_stall_running_answers() -> None:
    engine = twin_engine(1024, step_floor_s=0.0)
    compute = engine.compute
    assert isinstance(compute, TwinCompute)
    outcome = Outcome()
    for n in range(8):
        engine.add(request(f"short{n}", _prompt(n, 10), 600))
    for _ in range(200):
        outcome.take(engine.step())
    engine.add(request("long", _prompt(99, 2000), 2))
    compute.longest_step_tokens = 0
    before = {key: len(tokens) for key, tokens in outcome.tokens.items()}
    longest = []
    while ("long", 0) not in outcome.tokens:
        outcome.take(engine.step())
        longest.append(compute.longest_step_tokens)
    steps = len(longest)
    for key, tokens in outcome.tokens.items():
        if key[0] != "long":
            assert len(tokens) - before[key] == steps, "a running answer missed a step"
    # 12 ms of decodes alone; the blocks of 16 prompt tokens that fit into 1.8 times that: one. Only when most of the
    # last 64 steps were as long may they grow, and never beyond four times a step of decodes: two blocks.
    assert max(longest[:32]) <= 8 + 16
    assert compute.longest_step_tokens <= 8 + 32
    run(engine, outcome)
    assert outcome.tokens["long", 0] == answer_alone(_prompt(99, 2000), 2)


@pytest.mark.parametrize("shared", [0.5, 0.9])
def test_a_shared_prefix_is_computed_once_although_all_arrive_at_once(shared: float) -> None:
    engine = twin_engine(1024)
    common = _prompt(0, int(512 * shared) // 16 * 16)
    prompts = [common + _prompt(n, 512 - len(common)) for n in range(1, 25)]
    for n, prompt in enumerate(prompts):
        engine.add(request(str(n), prompt, 4))
    outcome = run(engine)
    for n, prompt in enumerate(prompts):
        assert outcome.tokens[str(n), 0] == answer_alone(prompt, 4)
    ideal = len(common) + sum(len(prompt) - len(common) for prompt in prompts)
    usages = [finished.usage for finished in outcome.finished.values()]
    computed = sum(usage.computed_tokens for usage in usages)
    assert computed == ideal
    assert all(usage.local_tokens + usage.computed_tokens == 512 for usage in usages)
    assert isinstance(engine.compute, TwinCompute)
    assert engine.compute.computed_tokens == ideal + sum(len(tokens) - 1 for tokens in outcome.tokens.values())


def test_equal_prompts_cost_a_few_rows_each_and_never_write_a_shared_block() -> None:
    engine = twin_engine()
    for count in (64, 61, 16, 1):
        prompt = _prompt(count, count)
        for n in range(6):
            engine.add(request(f"{count}.{n}", prompt, 20))
        outcome = run(engine)
        for n in range(6):
            assert outcome.tokens[f"{count}.{n}", 0] == answer_alone(prompt, 20)
        computed = [outcome.finished[f"{count}.{n}", 0].usage.computed_tokens for n in range(6)]
        assert sorted(computed)[:5] == [min(count, (count - 1) % 16 + 1 if count % 16 else 4)] * 5


def test_a_known_prompt_waits_for_a_step_that_has_room_for_its_last_rows() -> None:
    """A prompt that ends two rows short of a full step leaves no room for the four of one that is there already."""
    engine = twin_engine()
    known, other = _prompt(1, 64), _prompt(2, 254)
    engine.add(request("known", known, 2))
    run(engine)
    engine.add(request("other", other, 4))
    engine.add(request("again", known, 4))
    outcome = run(engine)
    assert outcome.tokens["other", 0] == answer_alone(other, 4)
    assert outcome.tokens["again", 0] == answer_alone(known, 4)


def test_what_was_generated_is_shared_with_the_next_turn() -> None:
    engine = twin_engine()
    first = _prompt(1, 50)
    engine.add(request("first", first, 60))
    answer = run(engine).tokens["first", 0]
    second = first + answer + _prompt(2, 30)
    engine.add(request("second", second, 10))
    outcome = run(engine)
    assert outcome.tokens["second", 0] == answer_alone(second, 10)
    assert outcome.finished["second", 0].usage.local_tokens == (50 + 60 - 1) // 16 * 16


def test_tenants_share_nothing() -> None:
    engine = twin_engine()
    prompt = _prompt(1, 100)
    engine.add(request("a", prompt, 4, tenant="a"))
    run(engine)
    engine.add(request("b", prompt, 4, tenant="b"))
    outcome = run(engine)
    assert outcome.finished["b", 0].usage.local_tokens == 0
    engine.add(request("again", prompt, 4, tenant="a"))
    assert run(engine).finished["again", 0].usage.local_tokens == 96


def test_n_answers_share_the_prompt_and_differ_by_their_random_numbers() -> None:
    from kvstore_engine.sampler import SamplingSettings

    engine = twin_engine(max_sequences=3)
    prompt = _prompt(5, 70)
    engine.add(request("greedy", prompt, 20, n=5))
    outcome = run(engine)
    for index in range(5):
        assert outcome.tokens["greedy", index] == answer_alone(prompt, 20)
    assert isinstance(engine.compute, TwinCompute)
    sampling = SamplingSettings(temperature=4.0, seed=3)
    engine.add(request("drawn", prompt, 20, n=4, sampling=sampling))
    engine.add(request("single", prompt, 20, sampling=sampling))
    outcome = run(engine)
    answers = [tuple(outcome.tokens["drawn", index]) for index in range(4)]
    assert len(set(answers)) == 4
    assert list(answers[0]) == outcome.tokens["single", 0]
    assert sum(outcome.finished["drawn", index].usage.computed_tokens for index in range(4)) <= 16


@pytest.mark.parametrize(
    ("policy", "swap_bytes", "count"),
    [
        pytest.param("fcfs", 1 << 20, 500, marks=pytest.mark.slow),
        pytest.param("fcfs", 1 << 20, 80, marks=pytest.mark.slow),
        pytest.param("fcfs", 0, 80, marks=pytest.mark.slow),
        pytest.param("shortest", 1 << 20, 80, marks=pytest.mark.slow),
        ("shortest", 0, 80),
        ("priority", 1 << 20, 80),
    ],
)
def test_a_preemption_storm_loses_no_token(policy: str, swap_bytes: int, count: int) -> None:
    """A pool of a quarter of what 16 sequences want."""
    randoms = random.Random(1)
    engine = twin_engine(24, policy=policy, swap_bytes=swap_bytes)
    prompts, limits = {}, {}
    outcome = Outcome()
    for n in range(count):
        head = _prompt(n % 7, 32) if n % 3 == 0 else []
        prompts[str(n)] = prompt = head + _prompt(1000 + n, randoms.randint(1, 60))
        limits[str(n)] = randoms.randint(1, 90)
        engine.add(request(str(n), prompt, limits[str(n)], priority=n % 3, tenant=str(n % 2)))
        if n % 4 == 0:
            outcome.take(engine.step())
    run(engine, outcome)
    for name, prompt in prompts.items():
        assert outcome.tokens[name, 0] == answer_alone(prompt, limits[name])
        assert outcome.finished[name, 0].reason == "length"
    usages = [finished.usage for finished in outcome.finished.values()]
    assert sum(usage.preemptions for usage in usages) > 10
    assert (sum(usage.swaps for usage in usages) > 0) == (swap_bytes > 0)
    assert engine.scheduler.host.used_blocks == 0
    assert engine.scheduler.host.resident_bytes == 0  # no request is left that could want it
    assert engine.scheduler.preemption.expected_transfers <= 1  # swapped blocks have other places afterwards


def test_a_failing_step_counts_for_nothing_and_is_taken_again() -> None:
    engine = twin_engine()
    compute = engine.compute
    assert isinstance(compute, TwinCompute)
    prompt, on_step = _prompt(1, 48), compute.on_step
    engine.add(request("first", prompt, 5))
    run(engine)
    failures = iter(range(1000))

    def fail(slices: object) -> None:
        if next(failures) % 2 == 0:
            raise RuntimeError("the worker has died")

    compute.on_step = fail
    engine.add(request("same", prompt, 5, n=2))
    engine.add(request("other", _prompt(2, 100), 5))
    outcome = Outcome()
    while engine.has_work:
        try:
            outcome.take(engine.step())
        except RuntimeError:
            continue
    compute.on_step = on_step
    assert outcome.tokens["same", 0] == outcome.tokens["same", 1] == answer_alone(prompt, 5)
    assert outcome.tokens["other", 0] == answer_alone(_prompt(2, 100), 5)
    check_blocks(engine.space, [])


def test_what_cannot_be_is_refused_and_leaves_nothing() -> None:
    engine = twin_engine(20, max_context=100)
    engine.add(request("twice", [1, 2, 3]))
    for wrong in (
        request("empty", []),
        request("long", _prompt(1, 100)),
        request("twice", [1]),
        request("foreign", [1, 64]),
        request("negative", [-1]),
    ):
        with pytest.raises(UsageError):
            engine.add(wrong)
    assert set(run(engine).finished) == {("twice", 0)}
    engine.add(request("twice", [1, 2, 3]))
    assert set(run(engine).finished) == {("twice", 0)}


def test_a_full_context_ends_an_answer() -> None:
    engine = twin_engine(20, max_context=100)
    prompt = _prompt(3, 90)
    engine.add(request("full", prompt, 50))
    outcome = run(engine)
    assert outcome.finished["full", 0].reason == "context"
    assert outcome.tokens["full", 0] == answer_alone(prompt, 11)


def test_overload_is_said_at_the_door_with_a_time_to_come_back() -> None:
    engine = twin_engine(max_sequences=2, max_queued=3)
    for n in range(5):
        engine.add(request(str(n), _prompt(n, 10), 50))
        engine.step()
    with pytest.raises(Overloaded) as refusal:
        engine.add(request("more", [1], 50))
    assert refusal.value.retry_after_s >= 1.0
    outcome = run(engine)
    assert len(outcome.finished) == 5
    engine.add(request("more", [1], 5))
    assert run(engine).finished["more", 0].reason == "length"


def test_a_tenant_with_a_long_queue_keeps_no_other_out() -> None:
    engine = twin_engine(max_sequences=1, max_queued=8)
    for n in range(9):
        engine.add(request(f"many{n}", _prompt(n, 10), 20, tenant="many"))
        engine.step()
    with pytest.raises(Overloaded):
        engine.add(request("one more", [1], tenant="many"))
    for n in range(4):
        engine.add(request(f"few{n}", _prompt(20 + n, 10), 20, tenant="few"))
    with pytest.raises(Overloaded):  # that was its half
        engine.add(request("one more", [1], tenant="few"))
    ends = [event.request_id for event in run(engine).events if isinstance(event, Finished)]
    assert [name[:-1] for name in ends[:5]].count("few") >= 2


def test_closing_ends_everything() -> None:
    engine = twin_engine(12)
    for n in range(6):
        engine.add(request(str(n), _prompt(n, 30), 50))
    for _ in range(5):
        engine.step()
    engine.close()
    assert not engine.has_work
    check_blocks(engine.space, [])
