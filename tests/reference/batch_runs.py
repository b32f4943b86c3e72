"""Runs of the batch engine over the twin model, and what came of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvstore_engine.batching.engine import BatchEngine
from kvstore_engine.batching.events import Event, Finished, Token
from kvstore_engine.batching.observer import Observer
from kvstore_engine.batching.request import Request, RequestSettings
from kvstore_engine.batching.settings import EngineSettings
from tests.reference.block_invariants import check_blocks
from tests.reference.twin_compute import StepClock, TwinCompute, TwinTokenizer, twin_pool

Key = tuple[str, int]


@dataclass
class Outcome:
    """The events of each answer, by request and index."""

    tokens: dict[Key, list[int]] = field(default_factory=lambda: defaultdict(list))
    text: dict[Key, str] = field(default_factory=lambda: defaultdict(str))
    finished: dict[Key, Finished] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    def take(self, events: Iterable[Event]) -> None:
        for event in events:
            key = event.request_id, event.index
            assert key not in self.finished, "an event after the end"
            self.events.append(event)
            self.text[key] += event.text
            if isinstance(event, Token):
                self.tokens[key].append(event.token)
            else:
                self.finished[key] = event


def twin_engine(
    blocks: int = 256,
    *,
    end_ids: frozenset[int] = frozenset(),
    max_sequences: int = 16,
    max_context: int = 4096,
    clock: StepClock | None = None,
    observer: Observer | None = None,
    **settings: Any,
) -> BatchEngine:
    """An engine over the twin, on a clock that only steps move."""
    clock = clock or StepClock()
    compute = TwinCompute(twin_pool(blocks), max_sequences=max_sequences, max_context=max_context, on_step=clock.step)
    return BatchEngine(
        compute,
        TwinTokenizer(end_ids),
        settings=EngineSettings(**settings),
        observer=observer,
        clock=clock,
    )


def request(name: str, tokens: Iterable[int], max_tokens: int = 8, **changes: Any) -> Request:
    tenant, priority = changes.pop("tenant", ""), changes.pop("priority", 0)
    changes.setdefault("ignore_end", True)
    settings = RequestSettings(max_tokens=max_tokens, **changes)
    return Request(name, np.array(list(tokens), np.int32), settings, tenant, priority)


def run(
    engine: BatchEngine, outcome: Outcome | None = None, *, each_step: Callable[[BatchEngine], None] = lambda e: None
) -> Outcome:
    """Step until nothing is left, walking the invariants of blocks now and then."""
    outcome = outcome or Outcome()
    idle = 0
    while engine.has_work:
        events = engine.step()
        outcome.take(events)
        idle = 0 if events else idle + 1
        assert idle < 3000, "the engine makes no progress"
        if len(outcome.events) % 50 == 0:
            check(engine)
        each_step(engine)
    check(engine)
    return outcome


def check(engine: BatchEngine) -> None:
    """Every block is accounted for, unless puts hold some."""
    run_queue = engine.scheduler.run_queue
    assert all(sequence.block_table is None for sequence in run_queue.waiting)
    if not engine.storer.outstanding:
        check_blocks(engine.space, [sequence.held for sequence in run_queue.running])
