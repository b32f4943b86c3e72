"""A step's logits, on the host and on a device of torch's: the same choices, and no row copied that is not used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kvstore_engine.batching.engine import BatchEngine
from kvstore_engine.devices import DeviceName
from kvstore_engine.executors.logits import FloatArray, HostLogits, StepLogits
from kvstore_engine.graph import SequenceSlice
from kvstore_engine.graph.step import StepLimits
from kvstore_engine.pool import BlockPool
from kvstore_engine.sampler import SamplingSettings
from tests.reference.batch_runs import request, run
from tests.reference.twin_compute import TwinCompute, TwinTokenizer, answer_alone, twin_pool

# Few values: equal ones are frequent.
_VALUES = st.sampled_from([0.0, -0.0, 1.0, -3.5, np.inf, -np.inf, np.nan])
_LOGITS = st.tuples(st.integers(1, 5), st.integers(1, 9)).flatmap(
    lambda shape: arrays(np.float32, shape, elements=_VALUES)
)


@given(_LOGITS, st.data())
def test_a_device_chooses_as_the_host_does(logits: FloatArray, data: st.DataObject) -> None:
    torch = pytest.importorskip("torch", reason="needs the extra torch")
    from kvstore_engine.torch_executor.step_memory import LogitsMemory, StepOutputs

    rows = data.draw(st.lists(st.integers(0, len(logits) - 1), unique=True))
    whole = data.draw(st.sampled_from([None, rows, [*reversed(rows)], [*range(len(logits))]]))
    host = HostLogits(logits)
    device = LogitsMemory(DeviceName.parse("torch:cpu")).received(
        StepOutputs.of(torch.from_numpy(logits.copy())), whole
    )
    np.testing.assert_array_equal(device.rows(rows), host.rows(rows))
    tokens, values = host.likeliest(rows)
    device_tokens, device_values = device.likeliest(rows)
    np.testing.assert_array_equal(np.array(device_values, np.float32), np.array(values, np.float32))
    is_number = ~np.isnan(values)
    np.testing.assert_array_equal(np.array(device_tokens)[is_number], np.array(tokens)[is_number])


class _Watched(StepLogits):
    """Counts the rows that are copied, as the step was asked for."""

    def __init__(self, logits: StepLogits, whole: Sequence[int] | None, copied: list[int]) -> None:
        assert whole is not None
        self._logits, self._whole = logits, whole
        copied += [len(whole)] if whole else []

    def likeliest(self, rows: Sequence[int]) -> tuple[list[int], list[float]]:
        return self._logits.likeliest(rows)

    def rows(self, rows: Sequence[int]) -> FloatArray:
        assert set(rows) <= set(self._whole)
        return self._logits.rows(rows)


class _WatchedCompute:
    """The twin, and how many rows each step had copied."""

    def __init__(self) -> None:
        self.twin = TwinCompute(twin_pool(256))
        self.copied: list[int] = []

    @property
    def limits(self) -> StepLimits:
        return self.twin.limits

    @property
    def pool(self) -> BlockPool:
        return self.twin.pool

    def step(self, slices: Sequence[SequenceSlice], whole: Sequence[int] | None = None) -> StepLogits:
        return _Watched(self.twin.step(slices), whole, self.copied)


def _engine() -> tuple[BatchEngine, _WatchedCompute]:
    compute = _WatchedCompute()
    return BatchEngine(compute, TwinTokenizer(frozenset())), compute


def test_greedy_answers_copy_no_row() -> None:
    engine, compute = _engine()
    for name in "abc":
        engine.add(request(name, [5, ord(name) % 64], 6))
    outcome = run(engine)
    assert compute.copied == []
    assert all(outcome.tokens[name, 0] == answer_alone([5, ord(name) % 64], 6) for name in "abc")


# What a request needs rows for, and how many of its 4 steps do.
_NEEDY: dict[str, tuple[dict[str, Any], list[int]]] = {
    "sampled": ({"sampling": SamplingSettings(temperature=1.0, seed=1)}, [1, 1, 1, 1]),
    "log probabilities": ({"logprobs": 2}, [1, 1, 1, 1]),
    "further answers": ({"n": 3}, [1]),
}


@pytest.mark.parametrize("what", _NEEDY)
def test_only_rows_that_are_needed_are_copied(what: str) -> None:
    settings, wanted = _NEEDY[what]
    answers = []
    for company in ([], ["b", "c"]):
        engine, compute = _engine()
        for name in ["a", *company]:
            engine.add(request(name, [7, ord(name) % 64], 4, **(settings if name == "a" else {})))
        outcome = run(engine)
        assert compute.copied == wanted
        answers.append({key: tokens for key, tokens in outcome.tokens.items() if key[0] == "a"})
        assert all(outcome.tokens[name, 0] == answer_alone([7, ord(name) % 64], 4) for name in company)
    assert answers[0] == answers[1]
