"""Plain greedy answers go on by the likeliest tokens alone, where a compute object finds them: the same answers, and no
logits unless an answer of the step needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore_engine.batching import BatchEngine, Token
from kvstore_engine.executors.likeliest import Likeliest
from kvstore_engine.graph import SequenceSlice
from kvstore_engine.sampler import SamplingSettings
from tests.reference.batch_runs import Outcome, request, run
from tests.reference.twin_compute import TwinCompute, TwinTokenizer, answer_alone, twin_pool


class FindingCompute(TwinCompute):
    """Counts which of the two was asked; finds `odd` in the place of each greatest logit, if given."""

    def __init__(self, odd: float | None = None) -> None:
        super().__init__(twin_pool(256))
        self.asked = {"logits": 0, "likeliest": 0}
        self._odd = odd

    def forward(self, slices: Sequence[SequenceSlice]) -> npt.NDArray[np.float32]:
        self.asked["logits"] += 1
        return super().forward(slices)

    def likeliest(self, slices: Sequence[SequenceSlice]) -> Likeliest:
        self.asked["likeliest"] += 1
        found = Likeliest.of(super().forward(slices))
        return found if self._odd is None else Likeliest(found.tokens, np.full_like(found.logits, self._odd))


def _prompt(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 64, count).tolist()


def _answered(compute: FindingCompute, **changes: Any) -> Outcome:
    """One plain answer of 8 tokens, and beside it one of 4 with `changes`."""
    engine = BatchEngine(compute, compute.pool, TwinTokenizer())
    engine.add(request("plain", _prompt(1, 50), 8))
    engine.add(request("other", _prompt(2, 50), 4, **changes))
    return run(engine)


def test_answers_by_the_likeliest_tokens_are_those_by_logits() -> None:
    compute = FindingCompute()
    outcome = _answered(compute)
    assert outcome.tokens["plain", 0] == answer_alone(_prompt(1, 50), 8)
    assert outcome.tokens["other", 0] == answer_alone(_prompt(2, 50), 4)
    assert compute.asked["logits"] == 0 and compute.asked["likeliest"] >= 8


def test_steps_with_an_answer_that_needs_logits_have_them() -> None:
    by_chance = SamplingSettings(temperature=0.8, seed=3)
    for changes in ({"logprobs": 2}, {"n": 2}, {"sampling": by_chance}):
        compute = FindingCompute()
        outcome = _answered(compute, **changes)
        assert outcome.tokens["plain", 0] == answer_alone(_prompt(1, 50), 8)
        others = [tokens for (name, _), tokens in outcome.tokens.items() if name == "other"]
        assert [len(tokens) for tokens in others] == [4] * len(others) and len(others) == (2 if "n" in changes else 1)
        assert compute.asked["logits"] >= 4, changes
        assert compute.asked["likeliest"] >= 3, "after the other one has ended"
        named = [event for event in outcome.events if isinstance(event, Token) and event.request_id == "other"]
        assert all((event.logprob is not None) == ("logprobs" in changes) for event in named)


def test_a_logit_that_is_no_number_fails_the_answer() -> None:
    for odd in (np.nan, np.inf):
        outcome = _answered(FindingCompute(odd))
        assert {finished.reason for finished in outcome.finished.values()} == {"failed"}
        assert "cannot be sampled" in outcome.finished["plain", 0].message
