"""The policy chain-hazard learns of hints: how much oftener their chains come back than was foretold without."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvstore_predictor.ages import HintFactors
from kvstore_predictor.features import CHANCES, NEXT_STEPS, Features, continued, with_hint
from kvstore_predictor.hazards import HazardTables
from kvstore_predictor.ladders import Ladder
from kvstore_proto.v1.kvstore_pb2 import NextStep
from kvstore_simulator.hints import HintOptions
from kvstore_simulator.replay import Replay, ReplaySettings
from kvstore_simulator.trace import Trace, TraceBuilder
from kvstored.store.policies import ChainHint
from kvstored.store.policies.chain_hazard import ChainHazard


def agents(sessions: int) -> Trace:
    """Sessions that nearly always go on, within seconds: far sooner than anybody who knows nothing would guess."""
    chance = random.Random(1)
    builder = TraceBuilder("agents", "made", 512)
    for number in range(sessions):
        at_s, blocks = chance.uniform(0, 1500), list(range(chance.randrange(4, 40)))
        while chance.random() < 0.95:
            tokens = chance.randrange(20, 600)
            builder.add(
                round(at_s * 1e9), blocks, input_tokens=512 * len(blocks), output_tokens=tokens, space=number
            )  # fmt: skip
            at_s += 0.5 + 0.02 * tokens + chance.expovariate(1 / 8)
            blocks = [*blocks, *range(len(blocks), len(blocks) + chance.randrange(1, 12))]
    return builder.build()


@pytest.mark.slow
def test_hints_that_say_nothing_change_nothing() -> None:
    trace = agents(100)
    replay = Replay(trace, ReplaySettings("chain-hazard", trace.distinct_blocks // 10, hints=HintOptions(0.5)))
    replay.run()
    assert isinstance(replay.policy, ChainHazard)
    chance, next_step = replay.policy.follower.book.tables.hint_factors()
    assert chance[1:, 4:16].mean(axis=1) == pytest.approx([1.0] * CHANCES, abs=0.3)
    assert (next_step == 1.0).all(), "no hint had a next step"


def test_a_word_means_something_until_more_is_known() -> None:
    word, values, bins = HintFactors((0.5, 2.0)), np.array([1, 2]), np.array([3, 3])
    assert word.factors()[:, 0].tolist() == [1.0, 0.5, 2.0]
    word.happened(values, bins, np.array([1000.0, 1000.0]), np.array([3000.0, 100.0]))
    assert word.factors()[:, 3].tolist() == pytest.approx([1.0, 3.0, 0.1], rel=0.1)
    assert word.factors()[:, 4].tolist() == pytest.approx([1.0, 3.0, 0.1], abs=0.1), "of other ages as of all"
    word.decay(0.0)
    assert word.factors()[:, 3].tolist() == [1.0, 0.5, 2.0]


def test_what_a_word_says_of_one_age_is_not_said_of_another() -> None:
    word = HintFactors((1.0,))
    word.happened(np.array([1, 1]), np.array([2, 20]), np.array([500.0, 500.0]), np.array([1500.0, 500.0]))
    factors = word.factors()[1]
    assert factors[2] == pytest.approx(3.0, abs=0.1) and factors[20] == pytest.approx(1.0, abs=0.1)
    assert factors[2] > factors[10] > factors[20]


def hinted(**hint: float | int) -> Features:
    return with_hint(continued(1, 5, 3, 9.0, 9.0, None), ChainHint(**hint))  # type: ignore[arg-type]


def test_a_hint_counts_at_once() -> None:
    tables = HazardTables([Ladder(("kind",))])
    plain, likely, unlikely = (
        tables.cell(each) for each in (hinted(), hinted(will_continue=0.95), hinted(will_continue=0.0))
    )
    ranks = tables.ranks(np.array([plain, likely, unlikely]), np.full(3, 30.0))
    assert ranks[1] > 1.5 * ranks[0] > 2.5 * ranks[2]


def test_two_words_do_not_say_the_same_twice() -> None:
    tables = HazardTables([Ladder(("kind",))])
    both, neither = (
        tables.cell(hinted(will_continue=0.5, next_step=NextStep.NEXT_STEP_TOOL_CALL)),
        tables.cell(hinted()),
    )
    for _ in range(60):
        for _ in range(30):
            tables.passed(neither, 0, 14)
            tables.passed(both, 0, 10)
            tables.returned(both, 10)
        while tables.fold():
            pass
        tables.renew(1.0)
        tables.want(np.array([both, neither], dtype=np.int32))
        while tables.make():
            pass
    chance, next_step = tables.hint_factors()
    assert tables._mixed[both, 10] * chance[3, 10] * next_step[1, 10] == pytest.approx(1.0, rel=0.2), "all came then"


def test_every_next_step_of_the_wire_is_distinguished() -> None:
    assert {hinted(next_step=number).next_step for number in NextStep.values()} == set(NextStep.values())
    assert max(NextStep.values()) == NEXT_STEPS - 1


@pytest.mark.parametrize("next_step", [4, 1000])
def test_an_unknown_next_step_is_none(next_step: int) -> None:
    assert hinted(next_step=next_step) == hinted()
