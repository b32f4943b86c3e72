"""Logits that are no numbers: whose answer fails by them, and what becomes of the K/V that they were made of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore_engine.sampler import SamplingSettings
from tests.reference.batch_runs import request, run, twin_engine
from tests.reference.block_invariants import check_blocks
from tests.reference.twin_compute import TwinCompute, answer_alone

_PROMPT = list(range(40))


def test_logits_that_are_no_numbers_fail_their_answer_alone() -> None:
    engine = twin_engine()
    compute = engine.compute
    assert isinstance(compute, TwinCompute)
    forward = compute.forward

    def broken(slices: Any) -> Any:
        logits = forward(slices)
        if len(logits) == 2:
            logits[1] = np.nan
        return logits

    compute.forward = broken  # type: ignore[method-assign]
    engine.add(request("first", _PROMPT, 5))
    engine.add(request("second", _PROMPT[:20], 5))
    outcome = run(engine)
    assert sorted(finished.reason for finished in outcome.finished.values()) == ["failed", "length"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("step", [2, 30])
def test_blocks_that_led_to_logits_that_are_no_numbers_are_not_shared(temperature: float, step: int) -> None:
    """The K/V of the one that fails leave the trie, but for what others use; a later request computes them anew."""
    engine, own = twin_engine(), [5] * 16 + list(range(30, 62))
    compute = engine.compute
    assert isinstance(compute, TwinCompute)
    forward = compute.forward

    def broken(slices: Any) -> Any:
        logits = forward(slices)
        if compute.steps == step and not compute.threads:
            logits[-1] = np.nan
        return logits

    compute.forward = broken  # type: ignore[method-assign]
    engine.add(request("other", [*_PROMPT, 1], 4))
    run(engine)
    compute.steps, compute.threads = 0, 0  # from here on
    engine.add(request("bad", own, 60, sampling=SamplingSettings(temperature=temperature)))
    outcome = run(engine)
    assert outcome.finished["bad", 0].reason == "failed"
    assert "cannot be sampled" in outcome.finished["bad", 0].message
    keys = engine.space.keys(np.array(own, np.int32))
    assert engine.space.trie.match("", keys) == []
    assert engine.space.trie.nodes == 2, "what others have computed stays"
    check_blocks(engine.space, [])
    compute.threads = 1
    engine.add(request("again", own, 5))
    again = run(engine)
    assert again.tokens["again", 0] == answer_alone(own, 5)
    assert again.finished["again", 0].usage.local_tokens == 0


def test_what_others_use_of_a_failed_ones_blocks_stays_theirs() -> None:
    engine = twin_engine()
    space = engine.space
    common, tail = list(range(32)), [7] * 20
    block_table = space.claim("", np.array(common + tail, np.int32))
    other = space.claim("", np.array([*common, 9], np.int32))
    space.seal(block_table, np.array(common + tail, np.int32), 0, 48)
    space.discard(block_table)
    check_blocks(space, [other])
    assert space.trie.nodes == 2 and all(node.is_attached for node in other.nodes)
    below = space.claim("", np.array(common + [8] * 16, np.int32))
    space.seal(below, np.array(common + [8] * 16, np.int32), 32, 48)
    space.release(below)
    space.discard(other)  # no other sequence uses the common part now: the blocks after it go, too
    assert space.trie.nodes == 0
    check_blocks(space, [])
    assert space.references.free_blocks == space.pool.blocks
