"""What the scheduler's process counts: steps, tokens by where they came from, answers by how they ended.

Owns numbers that only grow. It keeps no distributions: those are the HTTP process's and the profiler's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvstore_engine.batching import Event, Finished, Token


class EngineCounters:
    """Fed after each step."""

    def __init__(self) -> None:
        self.steps = 0
        self.step_s = 0.0
        self.tokens: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()
        self.preemptions = self.swaps = 0

    def step(self, seconds: float, events: Sequence[Event]) -> None:
        self.steps += 1
        self.step_s += seconds
        for event in events:
            if isinstance(event, Token):
                self.tokens["generated"] += 1
            else:
                self._end(event)

    def _end(self, event: Finished) -> None:
        usage = event.usage
        self.finished[event.reason] += 1
        self.tokens["local"] += usage.local_tokens
        self.tokens["daemon"] += usage.daemon_tokens
        self.tokens["computed"] += usage.computed_tokens
        self.preemptions += usage.preemptions
        self.swaps += usage.swaps

    def as_json(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "step_s": self.step_s,
            "tokens": dict(self.tokens),
            "finished": dict(self.finished),
            "preemptions": self.preemptions,
            "swaps": self.swaps,
        }
