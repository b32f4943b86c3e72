"""The benchmarks' KVFlow table and hits by codec, in small: what they replay is right, whatever the times are."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvstore_tiers.codecs.native import wait_for_library
from tests.reference.benchmark_scripts import importable

PROMPT, STEPS, LAYERS = 700, 4, 30


@pytest.fixture(autouse=True)
def _as_a_script(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from importable(monkeypatch)


def module(name: str) -> ModuleType:
    return importlib.import_module(name)


def replay(monkeypatch: pytest.MonkeyPatch) -> Any:
    """K and V of the shape of SmolLM2 at random, and a scratch that does not hold half of what is selected."""
    kvflow, recording = module("kvflow"), module("support.decode_recording")
    monkeypatch.setattr(kvflow, "SCRATCH_BYTES", 3 << 20)
    random = np.random.default_rng(3)
    keys, values = (random.normal(size=(LAYERS, PROMPT + STEPS, 3, 64)).astype(np.float16) for _ in range(2))
    queries = random.normal(size=(STEPS, LAYERS, 9, 64)).astype(np.float32)
    queries[1:] = queries[:1] + queries[1:] / 4  # so that selections resemble each other
    return kvflow.Replay(recording.Recording(PROMPT, 6400, keys, values, queries))


def test_attention_over_the_scratch_is_attention_over_the_chosen_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    made = replay(monkeypatch)
    held = sum(int((plan.source == -2).sum()) for plan in made.plans)
    early = sum(int((plan.source >= 0).sum()) for plan in made.plans)
    late = sum(int((plan.source == -1).sum()) for plan in made.plans)
    assert held and early and late, "all three ways into the scratch"
    for overlaps in (False, True):
        made.run(True, overlaps)
        made.check()


@pytest.mark.slow
def test_hits_under_int8_are_those_of_nearly_twice_the_bytes() -> None:
    wait_for_library()
    hits = module("codec_hits")
    trace = hits.trace_from(None, 60)
    rows = {row.name: row for row in hits.rows_of(trace)}
    assert rows["blocks_int8_equal_bytes"].ratio >= 1.85
    int8, plain = rows["hits_int8_equal_bytes"], rows["hits_none_equal_bytes"]
    assert int8.ratio == pytest.approx(1, abs=0.03) and rows["hits_none_more_bytes"].ratio == pytest.approx(1, abs=0.03)
    assert plain.ratio == pytest.approx(1, abs=0.03) and int8.value > 1.05 * plain.value
