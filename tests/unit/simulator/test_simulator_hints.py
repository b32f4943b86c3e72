"""Hints, made up from a trace (of the quality they claim, and worth something) or recorded with it (replayed)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from kvstore_proto.v1.kvstore_pb2 import NextStep
from kvstore_simulator.hints import _STEPS, _TOOL_STEPS, NO_HINTS, HintOptions, _steps, made_up, parse_hints
from kvstore_simulator.replay import Replay, ReplaySettings
from kvstore_simulator.trace import Op, RecordedHint, Trace, TraceBuilder
from kvstored.store.policies import ChainHint
from tests.unit.kvstored.test_policies_chain_hazard import mixed_trace


def test_what_is_asked_for() -> None:
    assert parse_hints("will-continue:0.80,queue:10", 3) == HintOptions(0.8, 10.0, 3)
    assert parse_hints("queue:2.5", 0) == HintOptions(None, 2.5, 0)
    assert parse_hints("tool-call:0.9", 1) == HintOptions(seed=1, tool_call_auc=0.9)


@pytest.mark.parametrize("text", ["", "will-continue", "will-continue:0.4", "will-continue:1", "queue:0", "tea:1"])
def test_a_wrong_one_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"--hints .*takes will-continue:AUC"):
        parse_hints(text, 0)


def chances(trace: Trace, hints: HintOptions) -> npt.NDArray[np.float64]:
    return np.array([each.will_continue for each in made_up(trace, hints) if each is not None], dtype=np.float64)


def area(score: npt.NDArray[np.float64], truth: npt.NDArray[np.bool_]) -> float:
    yes, no = score[truth], score[~truth]
    return float((yes[:, None] > no[None, :]).mean() + 0.5 * (yes[:, None] == no[None, :]).mean())


@pytest.mark.parametrize("auc", [0.5, 0.8, 0.97])
def test_what_the_steps_leave_of_a_score_is_of_the_quality_that_was_asked_for(auc: float) -> None:
    truth = np.arange(20_000) % 3 == 0
    for steps in (_STEPS, _TOOL_STEPS):
        drawn = _steps(truth, auc, steps, np.random.default_rng(1))
        assert area(drawn[:6000].astype(np.float64), truth[:6000]) == pytest.approx(auc, abs=0.012)


def test_chances_are_as_good_as_they_say() -> None:
    trace = mixed_trace(4000)
    chance = chances(trace, HintOptions(0.8))
    assert sorted(set(chance.tolist())) == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9])
    request_of = np.repeat(np.arange(trace.requests), np.diff(trace.starts))
    last_use = dict(zip(trace.blocks.tolist(), request_of.tolist(), strict=True))
    goes_on = np.array([last_use[int(trace.blocks[end - 2])] > at for at, end in enumerate(trace.starts[1:].tolist())])
    assert area(chance, goes_on) == pytest.approx(0.8, abs=0.02)


def test_a_tool_call_hint_leaves_the_other_hint_unchanged() -> None:
    trace = mixed_trace(2000)
    both, alone = HintOptions(0.8, tool_call_auc=0.8), made_up(trace, HintOptions(tool_call_auc=0.999))
    assert (chances(trace, both) == chances(trace, HintOptions(0.8))).all(), (
        "the other hint is the same with and without"
    )
    assert len({each.next_step for each in made_up(trace, both) if each is not None}) == 3
    assert all(each is not None and each.will_continue is None for each in alone)
    ends_ns = np.full(trace.distinct_blocks, -1)
    is_soon = np.zeros(trace.requests, dtype=bool)
    for at in range(trace.requests - 1, -1, -1):
        blocks = trace.blocks[trace.starts[at] : trace.starts[at + 1]]
        its = blocks[max(len(blocks) - 2, 0)]
        is_soon[at] = 0 <= ends_ns[its] < trace.times_ns[at] + 60_000_000_000
        ends_ns[blocks] = trace.times_ns[at]
    is_call = np.array([each.next_step == NextStep.NEXT_STEP_TOOL_CALL for each in alone if each is not None])
    is_end = np.array([each.next_step == NextStep.NEXT_STEP_END_OF_TURN for each in alone if each is not None])
    assert is_call[is_soon].mean() > 0.9 and is_end[~is_soon].mean() > 0.9


def test_without_hints_there_are_none() -> None:
    assert not any(made_up(mixed_trace(50), NO_HINTS))


@pytest.mark.slow
def test_a_queue_brings_hits() -> None:
    trace = mixed_trace(1500)
    plain, hinted = (
        int(Replay(trace, ReplaySettings("chain-hazard", 150, hints=each)).run().hits.sum())
        for each in (NO_HINTS, HintOptions(None, 10.0))
    )
    assert hinted > 1.05 * plain


def recorded() -> Trace:
    """Two tenants' chains at seconds 1, 2 and 4; the hint that claims second 9 comes before the last request."""
    builder = TraceBuilder("t", "kvstored", 64)
    builder.add(1_000_000_000, ["a", "b"], op=Op.GET)
    builder.add(1_000_000_000, ["a", "b"], op=Op.PUT)
    builder.add_hint(RecordedHint(2, 1_500_000_000, 0, -1, answer_tokens=70), ["a", "b"])
    builder.add_hint(RecordedHint(2, 1_500_000_000, 0, -1, will_continue=0.1), ["a"])
    builder.add_hint(RecordedHint(2, 1_500_000_000, 0, -1, due_in_ns=250), ["a", "b", "new"])
    builder.add(2_000_000_000, ["c"], tenant=1, op=Op.GET)
    builder.add_hint(RecordedHint(3, 9_000_000_000, 1, -1, next_step=2), ["c"])
    builder.add(4_000_000_000, ["a", "b"])
    return builder.build()


def test_a_recorded_hint_is_replayed_in_its_place() -> None:
    trace = recorded()
    replay = Replay(trace, ReplaySettings("chain-hazard", 10))
    received: list[object] = []
    replay.policy.on_hint = lambda tenant, row, key, hint, now_ns: received.append(  # type: ignore[method-assign]
        (tenant, row >= 0, key, hint, now_ns / 1e9, replay.clock.monotonic_ns() / 1e9)
    )
    result = replay.run()
    keys = [trace.key(block) for block in range(3)]
    assert received == [
        (0, True, keys[1], ChainHint(answer_tokens=70), 0.5, 0.5),
        (0, True, keys[0], ChainHint(will_continue=0.1), 0.5, 0.5),
        (0, True, keys[1], ChainHint(due_ns=500_000_250), 0.5, 0.5),
        (1, False, keys[2], ChainHint(next_step=2), 3.0, 3.0),
    ]
    assert result.hits.tolist() == [0, 0, 0, 2]
    assert result.held_block_s.tolist() == [0.0, 0.0, 2.0, 4.0], "seconds before a hint count as well"


def test_a_recorded_prompt_reaches_the_policy_in_either_order() -> None:
    for op in (Op.REQUEST, Op.GET):
        builder = TraceBuilder("t", "kvstored", 64)
        builder.add(0, ["a", "b"], input_tokens=150, op=op)
        builder.add(10**9, ["c"], op=op)
        replay = Replay(builder.build(), ReplaySettings("chain-hazard", 8))
        replay.run()
        book = replay.policy.follower.book  # type: ignore[attr-defined]
        assert book.chains.tokens[:2].tolist() == [150, -1]


def test_blocks_of_a_recorded_put_reach_the_policy_together_as_in_the_daemon() -> None:
    builder = TraceBuilder("t", "kvstored", 64)
    builder.add(0, ["a", "b", "c"], op=Op.PUT)
    replay = Replay(builder.build(), ReplaySettings("lru", 8))
    inserted, received = replay.policy.inserted, list[int]()

    def note(rows: Sequence[int], now_ns: int) -> None:
        received.append(len(rows))
        inserted(rows, now_ns)

    replay.policy.inserted = note  # type: ignore[method-assign]
    replay.run()
    assert received == [3] and len(replay.policy) == 3


def test_a_recorded_answer_reaches_the_policys_classes() -> None:
    """The chain's class follows the length of the recorded answer, and so does the replay."""
    classes = []
    for tokens in (10, 900):
        builder = TraceBuilder("t", "kvstored", 64)
        builder.add(0, ["a", "b", "c"], input_tokens=192, op=Op.GET)
        builder.add(0, ["a", "b", "c"], op=Op.PUT)
        builder.add_hint(RecordedHint(2, 10**9, 0, -1, answer_tokens=tokens), ["a", "b", "c"])
        builder.add(2 * 10**9, ["x"], op=Op.GET)
        replay = Replay(builder.build(), ReplaySettings("chain-hazard", 8))
        replay.run()
        book = replay.policy.follower.book  # type: ignore[attr-defined]
        classes.append([each.answer for each in book.features])
    assert classes == [[1, -1], [5, -1]]
