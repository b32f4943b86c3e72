"""What the policy chain-hazard learns of hints: how much oftener their chains come back than was foretold without."""

from __future__ import annotations

import random

import pytest

from kvstored.policies.chain_hazard import ChainHazard
from kvstored.simulator.hints import Hints
from kvstored.simulator.replay import Replay, ReplaySettings
from kvstored.simulator.trace import Trace, TraceBuilder


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


def test_hints_that_say_nothing_change_nothing() -> None:
    trace = agents(100)
    replay = Replay(trace, ReplaySettings("chain-hazard", trace.distinct_blocks // 10, hints=Hints(0.5)))
    replay.run()
    assert isinstance(replay.policy, ChainHazard)
    factors = replay.policy._book.tables.hint_factors()[1:6]
    assert factors == pytest.approx([1.0] * 5, abs=0.3)
