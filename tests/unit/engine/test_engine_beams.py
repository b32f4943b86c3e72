"""Beam search in the batch engine: the hypotheses of a plain search, on blocks that beams share."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest

from kvstore_engine.batching import BatchEngine, Token
from kvstore_engine.errors import UsageError
from tests.reference.assumed_costs import assume
from tests.reference.batch_runs import Outcome, check, request, run, twin_engine
from tests.reference.beam_requests import ENDS, assert_plain, beams, prompt_of
from tests.reference.block_invariants import check_blocks
from tests.reference.examples import each_nth
from tests.reference.memory_session import MemorySession
from tests.reference.twin_compute import TwinCompute, answer_alone, twin_pool


@pytest.mark.parametrize("width", [1, 2, 4, 7])
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", each_nth([1.0, 0.0, -0.5, 2.0], 2))
def test_the_hypotheses_are_those_of_a_plain_search(
    width: int, early_stopping: bool | Literal["never"], length_penalty: float
) -> None:
    engine = twin_engine(end_ids=ENDS)
    wanted = [
        beams(str(n), prompt_of(n, 30 + n), 40, width, length_penalty=length_penalty, early_stopping=early_stopping)
        for n in range(3)
    ]
    for each in wanted:
        engine.add(each)
    outcome = run(engine, each_step=check)
    for each in wanted:
        assert_plain(outcome, each)
    engine.close()
    check_blocks(engine.space, [])
    assert engine.space.statistics().used == 0


def test_one_beam_is_the_greedy_answer() -> None:
    engine = twin_engine()
    engine.add(beams("one", prompt_of(1, 50), 30, 1, ignore_end=True))
    assert run(engine).tokens["one", 0] == answer_alone(prompt_of(1, 50), 30)


def test_the_settings_of_a_search_matter() -> None:
    """Else the comparison with the plain search would prove little."""
    answers = []
    for settings in ({}, {"length_penalty": -0.5}, {"early_stopping": True}, {"early_stopping": "never"}):
        engine = twin_engine(end_ids=ENDS)
        engine.add(beams("b", prompt_of(0, 20), 60, 4, **settings))  # type: ignore[arg-type]
        answers.append(run(engine).tokens["b", 0])
    lengths = [len(answer) for answer in answers]
    assert len(set(lengths)) > 1, lengths


def test_fewer_answers_than_beams_may_be_requested_with_log_probabilities() -> None:
    engine = twin_engine(end_ids=ENDS)
    engine.add(beams("two", prompt_of(3, 20), 12, 5, n=2, logprobs=3))
    outcome = run(engine)
    assert sorted(outcome.finished) == [("two", 0), ("two", 1)]
    for index in range(2):
        emitted = [event for event in outcome.events if isinstance(event, Token) and event.index == index]
        end = outcome.finished["two", index]
        assert end.score is not None
        length = len(emitted) + (end.reason == "end")
        total = end.score * length
        assert sum(event.logprob or 0.0 for event in emitted) >= total - 1e-9  # the end token has one of its own
        assert all(len(event.top) == 3 and event.top[0][1] >= (event.logprob or 0.0) for event in emitted)
    first, second = (outcome.finished["two", index].usage for index in range(2))
    assert (first.computed_tokens, first.local_tokens) == (20, 0)
    assert (second.computed_tokens, second.local_tokens) == (0, 20)


def test_beams_share_what_they_have_in_common() -> None:
    """At every step: the blocks in use are the distinct ones of the beams' common beginnings, and far fewer than
    copies would be.
    """
    engine = twin_engine(512)
    width, prompt = 6, prompt_of(2, 16 * 12 + 5)
    engine.add(beams("b", prompt, 64, width, ignore_end=True))
    outcome, most = Outcome(), 0
    while engine.has_work:
        outcome.take(engine.step())
        check(engine)
        running = engine.scheduler.run_queue.running
        if len(running) < width:
            continue
        texts = [sequence.tokens[: sequence.computed].tolist() for sequence in running]
        distinct = {tuple(text[: 16 * end]) for text in texts for end in range(1, len(text) // 16 + 1)}
        partial = {sequence.held.blocks[-1] for sequence in running if sequence.computed % 16}
        used = engine.space.statistics().used
        assert used == len(distinct) + len(partial), "blocks that no beam needs"
        assert used == len({block for sequence in running for block in sequence.held.blocks})
        most = max(most, used)
    assert_plain(outcome, beams("b", prompt, 64, width, ignore_end=True))
    copies = width * -(-(len(prompt) + 63) // 16)
    assert 12 < most < copies / 2, f"{most} blocks where copies would need {copies}"


@pytest.mark.parametrize("swap_blocks", [0, 400])
def test_a_preempted_group_comes_back_as_it_was(swap_blocks: int) -> None:
    engine = twin_engine(20, swap_bytes=0, prefill_tokens=64, end_ids=ENDS) if not swap_blocks else _swapping(20)
    searches = [beams(str(n), prompt_of(n, 60 + n), 30, 4, ignore_end=True) for n in range(5)]
    outcome = Outcome()
    for each in searches:
        engine.add(each)
    steps = 0
    while engine.has_work:
        outcome.take(engine.step())
        check(engine)
        steps += 1
        running = {id(sequence) for sequence in engine.scheduler.run_queue.running}
        for sequence in engine.scheduler.run_queue.running:
            assert all(id(beam) in running for beam in sequence.unit), "a group is torn apart"
        assert steps < 3000
    for each in searches:
        assert_plain(outcome, each)
    usages = [outcome.finished[each.id, 0].usage for each in searches]
    assert sum(usage.preemptions for usage in usages) > 0
    assert (sum(usage.swaps for usage in usages) > 0) == bool(swap_blocks)
    engine.close()
    check_blocks(engine.space, [])
    assert engine.scheduler.host.used_blocks == 0


def _swapping(blocks: int, **settings: Any) -> BatchEngine:
    """Computing looks slow: the engine swaps all it can."""
    engine = twin_engine(blocks, prefill_tokens=64, end_ids=ENDS, **settings)
    assume(engine.costs)
    return engine


def test_a_swapped_group_is_copied_once_and_shares_its_blocks_again() -> None:
    engine = _swapping(64)
    wanted = beams("b", prompt_of(1, 100), 40, 5, ignore_end=True)
    engine.add(wanted)
    outcome, run_queue, space = Outcome(), engine.scheduler.run_queue, engine.space
    while len(run_queue.running) < 5 or run_queue.running[0].generated < 20:
        outcome.take(engine.step())
    held = [sequence.held.blocks[: -(-sequence.computed // 16)] for sequence in run_queue.running]
    distinct = {block for blocks in held for block in blocks}
    run_queue._preempt(run_queue.running[0])
    assert not run_queue.running
    assert engine.scheduler.host.used_blocks == len(distinct) < sum(map(len, held))
    space.release(space.claim("", np.zeros(64 * 16, np.int32)))  # all that the trie had kept is given up
    engine.pool.planes[:, engine.pool.free_flags] = 0xFF
    outcome.take(engine.step())
    assert len({block for sequence in run_queue.running for block in sequence.held.blocks}) <= len(distinct) + 5
    run(engine, outcome, each_step=check)
    assert_plain(outcome, wanted)
    assert outcome.finished["b", 0].usage.swaps == 1
    assert engine.scheduler.host.used_blocks == 0


def test_beams_of_which_one_finds_no_block_wait_for_it_together() -> None:
    """A put may hold blocks. No other request can yield to the group, and no beam may go ahead of the others."""
    engine = twin_engine(64, end_ids=ENDS)
    wanted = beams("b", prompt_of(1, 100), 30, 5, ignore_end=True)
    engine.add(wanted)
    outcome, run_queue, space = Outcome(), engine.scheduler.run_queue, engine.space
    waits = 0
    while engine.has_work:
        if len(run_queue.running) == 5:
            lengths = {sequence.length for sequence in run_queue.running}
            assert len(lengths) == 1
            taken = space.allocate(space.available_blocks - 1)
            outcome.take(engine.step())
            waits += {sequence.length for sequence in run_queue.running} == lengths
            space.references.release(taken)
        outcome.take(engine.step())
        check(engine)
    assert waits > 3
    assert_plain(outcome, wanted)


@pytest.mark.parametrize("generated", [0, 3, 15])
def test_cancelling_ends_allbeams(generated: int) -> None:
    engine = twin_engine(end_ids=ENDS)
    engine.add(beams("b", prompt_of(1, 30), 40, 4, n=3, ignore_end=True))
    engine.add(request("other", prompt_of(2, 30), 30))
    outcome = Outcome()
    for _ in range(generated):
        outcome.take(engine.step())
    engine.cancel("b")
    run(engine, outcome)
    assert [outcome.finished["b", index].reason for index in range(3)] == ["cancelled"] * 3
    assert outcome.tokens["other", 0] == answer_alone(prompt_of(2, 30), 30)
    assert engine.space.statistics().used == 0
    engine.add(beams("b", prompt_of(1, 30), 4, 4))  # the name is free again
    run(engine)


def test_a_storm_with_beams_in_it_changes_no_answer() -> None:
    """Groups and single answers displace each other; the host pool is too small for all that are swapped."""
    engine = _swapping(44, policy="priority", level_s=1.0, swap_bytes=14 * twin_pool(1).payload_bytes(1))
    outcome, searches, greedy = Outcome(), [], {}
    for n in range(60):
        head = prompt_of(n % 3, 32) if n % 2 else []
        prompt = head + prompt_of(50 + n, 5 + n * 37 % 50)
        changes = {"tenant": str(n % 4), "priority": 0 if n % 3 == 0 else n % 4}
        if n % 3 == 0:
            searches.append(beams(str(n), prompt, 50 + n % 20, 2 + n % 3, n=2, ignore_end=n % 4 > 0, **changes))
            engine.add(searches[-1])
        else:
            greedy[str(n)] = prompt
            engine.add(request(str(n), prompt, 20 + n % 30, n=1 + n % 2, **changes))
        for _ in range(1 + n % 3):
            outcome.take(engine.step())
            check(engine)
    for cancelled in ("30", "45", "55", "57"):
        engine.cancel(cancelled)
    run(engine, outcome, each_step=check)
    for each in searches:
        if outcome.finished[each.id, 0].reason != "cancelled":
            assert_plain(outcome, each)
    for name, prompt in greedy.items():
        if outcome.finished[name, 0].reason != "cancelled":
            assert outcome.tokens[name, 0] == answer_alone(prompt, 20 + int(name) % 30)
    usages = [outcome.finished[each.id, 0].usage for each in searches]
    assert 0 < sum(usage.swaps for usage in usages) < sum(usage.preemptions for usage in usages), "both ways are taken"
    engine.close()
    check_blocks(engine.space, [])
    assert engine.scheduler.host.used_blocks == 0


def test_the_prompts_blocks_are_stored_and_no_others() -> None:
    from kvstore_engine.batching import EngineSettings
    from tests.reference.twin_compute import StepClock, TwinTokenizer

    session = MemorySession(twin_pool(4).payload_bytes(4))
    compute = TwinCompute(twin_pool(256), on_step=StepClock().step)
    engine = BatchEngine(
        compute, compute.pool, TwinTokenizer(), settings=EngineSettings(), sessions=lambda tenant: session
    )
    prompt = prompt_of(1, 150)
    engine.add(beams("b", prompt, 90, 3))
    run(engine)
    engine.close()
    assert [len(key) // 4 for key in session.blocks] == [64, 128]
    assert all(np.frombuffer(key, np.int32).tolist() == prompt[: len(key) // 4] for key in session.blocks)


def test_a_search_is_as_wide_as_the_pool_at_worst_allows() -> None:
    """The largest search that is taken in runs to its end by itself; one token more is refused."""
    width, prompt = 4, prompt_of(1, 40)
    blocks = 2 + width * 4  # the prompt's whole blocks, and each beam's up to position 96
    engine = twin_engine(blocks)
    with pytest.raises(UsageError, match="larger pool"):
        engine.add(beams("b", prompt, 58, width, ignore_end=True))
    wanted = beams("b", prompt, 57, width, ignore_end=True)
    engine.add(wanted)
    outcome = run(engine, each_step=check)
    assert_plain(outcome, wanted)
