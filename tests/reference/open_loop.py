"""Requests that arrive by themselves, on the clock of the twin model's steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore_engine.batching.engine import BatchEngine
from kvstore_engine.batching.events import Finished
from kvstore_engine.batching.settings import EngineSettings
from kvstore_engine.bench.in_process import EndsAfter
from kvstore_engine.graph import SequenceSlice
from kvstore_restore.learned import LearnedCosts
from tests.reference.batch_runs import request
from tests.reference.twin_compute import VOCABULARY, StepClock, TwinCompute, TwinTokenizer, twin_pool


@dataclass(frozen=True)
class Arrival:
    """A request of a kind: `at_s` in units of a second of load, which `run_load` stretches."""

    at_s: float
    name: str
    tenant: str
    prompt_tokens: int
    answer_tokens: int
    limit: int
    priority: int = 0


def mixed_load(count: int, seed: int = 1, long_share: float = 0.1) -> list[Arrival]:
    """Mostly questions with short answers, and some long ones, with one request a second on average."""
    randoms = np.random.default_rng(seed)
    at, arrivals = 0.0, []
    for n in range(count):
        at += float(randoms.exponential())
        is_long = randoms.random() < long_share
        prompt = int(randoms.integers(300, 500) if is_long else randoms.integers(20, 60))
        answer = int(randoms.integers(150, 400) if is_long else randoms.integers(4, 24))
        arrivals.append(Arrival(at, f"{'long' if is_long else 'short'}{n}", "", prompt, answer, 512))
    return arrivals


def run_load(arrivals: Sequence[Arrival], rate: float, **settings: Any) -> dict[str, float]:
    """Latencies by request, with `rate` requests a second. The engine cannot know when an answer will end."""
    clock = StepClock(fixed_s=0.005, row_s=0.001)
    compute = _TimedCompute(twin_pool(2048), on_step=clock.step)
    costs = LearnedCosts()
    engine = BatchEngine(
        compute,
        TwinTokenizer(),
        settings=EngineSettings(prefix_sharing=False, **settings),
        costs=costs,
        clock=clock,
    )
    latencies: dict[str, float] = {}
    lengths: dict[str, int] = {}
    randoms = np.random.default_rng(5)
    coming = list(arrivals)
    arrived: dict[str, float] = {}
    while coming or engine.has_work:
        if not engine.has_work and coming:
            clock.now = max(clock.now, coming[0].at_s / rate)
        while coming and coming[0].at_s / rate <= clock.now:
            arrival = coming.pop(0)
            arrived[arrival.name] = arrival.at_s / rate
            lengths[arrival.name] = arrival.answer_tokens
            tokens = randoms.integers(0, 64, arrival.prompt_tokens).tolist()
            engine.add(
                request(
                    arrival.name,
                    tokens,
                    arrival.limit,
                    tenant=arrival.tenant,
                    priority=arrival.priority,
                    ignore_end=False,
                    constraint=lambda length=arrival.answer_tokens: EndsAfter(length),
                )
            )
        for event in engine.step():
            if isinstance(event, Finished):
                latencies[event.request_id] = clock.now - arrived[event.request_id]
    return latencies


class _TimedCompute(TwinCompute):
    """Takes its time and says nothing: whose turn it is does not depend on what is said."""

    def forward(self, slices: Sequence[SequenceSlice]) -> npt.NDArray[np.float32]:
        self.on_step(slices)
        return np.zeros((sum(piece.outputs == "last" for piece in slices), VOCABULARY), np.float32)
