"""Latencies, throughput, memory and hit sources of all work of an engine since the profiler was made.

The module owns the histograms and counters, and for each sequence under way the time of its last token. It never keeps
a finished sequence, so its memory does not grow with the number of requests. Invariants: each prompt token is counted
under one source (local, daemon, computed); time to first token and end-to-end begin when the request was queued, so
waiting is never hidden.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from kvstore_engine.batching.events import Reason, Usage
from kvstore_engine.batching.observer import Observer, StepRecord
from kvstore_engine.profiler.histogram import Histogram

_LATENCIES = (
    "ttft",  # from being queued
    "tpot",  # mean of a sequence
    "inter_token",
    "total",  # from being queued
    "queued",  # to the first admission
    "step",
    "compute",  # the forward pass of a step
    "decode_step",  # a step without any prompt in it
)


@dataclass(slots=True)
class _Blocks:
    """The pool's use, weighted by the length of each step."""

    weighted_used: float = 0.0
    weighted_cached: float = 0.0
    seconds: float = 0.0
    peak_used: int = 0
    total: int = 0


class Profiler(Observer):
    """An observer that sums up an engine's work since it was made: latencies, throughput, use of the pool, and where
    prompt tokens came from.
    """

    def __init__(self) -> None:
        self.latency = {name: Histogram() for name in _LATENCIES}
        self.reasons: Counter[str] = Counter()
        self.sources: Counter[str] = Counter({"local": 0, "daemon": 0, "computed": 0})
        self.events: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self._blocks = _Blocks()
        self._last_token: dict[tuple[str, int], float] = {}
        self._queued: dict[str, float] = {}
        self._begin_s: float | None = None
        self._end_s = 0.0

    def queued(self, request_id: str, t: float) -> None:
        self._queued[request_id] = t
        self._seen(t)

    def admitted(self, request_id: str, index: int, t: float) -> None:
        begin = self._queued.pop(request_id, None)
        if begin is not None:  # later ones are re-admissions, or further answers of the same request
            self.latency["queued"].add(max(0.0, t - begin))

    def step(self, record: StepRecord) -> None:
        length = record.end_s - record.begin_s
        self.latency["step"].add(length)
        self.latency["compute"].add(record.compute_s)
        if record.decode_tokens and not record.prefill_tokens:
            self.latency["decode_step"].add(length)
        self.tokens["prefill"] += record.prefill_tokens
        self.tokens["decode"] += record.decode_tokens
        blocks = self._blocks
        blocks.seconds += length
        blocks.weighted_used += length * record.used_blocks
        blocks.weighted_cached += length * record.cached_blocks
        blocks.peak_used, blocks.total = max(blocks.peak_used, record.used_blocks), record.pool_blocks
        self._seen(record.begin_s)
        self._seen(record.end_s)

    def preempted(self, request_id: str, index: int, how: Literal["swap", "recompute"], t: float) -> None:
        self.events[f"preempted_{how}"] += 1

    def swapped_out(self, request_id: str, index: int, nbytes: int, runs: int, begin_s: float, end_s: float) -> None:
        self.events["swapped_out_bytes"] += nbytes
        self.events["swapped_out_runs"] += runs

    def swapped_in(self, request_id: str, index: int, nbytes: int, runs: int, begin_s: float, end_s: float) -> None:
        self.events["swapped_in_bytes"] += nbytes
        self.events["swapped_in_runs"] += runs

    def stored(self, request_id: str, index: int, tokens: int, reason: str, begin_s: float, end_s: float) -> None:
        self.events["not_stored_tokens" if reason else "stored_tokens"] += tokens

    def token(self, request_id: str, index: int, t: float) -> None:
        key = (request_id, index)
        if (last := self._last_token.get(key)) is not None:
            self.latency["inter_token"].add(max(0.0, t - last))
        self._last_token[key] = t

    def finished(self, request_id: str, index: int, reason: Reason, usage: Usage, t: float) -> None:
        self._last_token.pop((request_id, index), None)
        self._queued.pop(request_id, None)  # of one that was cancelled before it was admitted
        self._seen(t)
        self.reasons[reason] += 1
        self.tokens["generated"] += usage.generated_tokens
        for source in self.sources:
            self.sources[source] += getattr(usage, f"{source}_tokens")
        self.events["recomputed_tokens"] += usage.recomputed_tokens
        self.latency["total"].add(usage.total_s)
        if usage.generated_tokens:
            self.latency["ttft"].add(usage.ttft_s)
        if usage.generated_tokens > 1:
            self.latency["tpot"].add(usage.tpot_s)

    @property
    def seconds(self) -> float:
        """The seconds from the first observed event to the last."""
        return max(0.0, self._end_s - self._begin_s) if self._begin_s is not None else 0.0

    def as_json(self) -> dict[str, object]:
        """Return all figures so far as a dictionary of counts, tokens, seconds and rates."""
        seconds, blocks = self.seconds, self._blocks
        per_second = (lambda count: count / seconds) if seconds else (lambda count: 0.0)
        mean_used = blocks.weighted_used / blocks.seconds if blocks.seconds else 0.0
        mean_cached = blocks.weighted_cached / blocks.seconds if blocks.seconds else 0.0
        total = blocks.total or 1
        return {
            "seconds": seconds,
            "answers": dict(self.reasons),
            "latency_s": {name: histogram.as_json() for name, histogram in self.latency.items()},
            "throughput": {
                "generated_tokens_per_s": per_second(self.tokens["generated"]),
                "prefill_tokens_per_s": per_second(self.tokens["prefill"]),
                "answers_per_s": per_second(self.reasons.total()),
            },
            "tokens": dict(self.tokens),
            "prompt_tokens_by_source": dict(self.sources),
            "kv": {
                "blocks": blocks.total,
                "mean_used": mean_used / total,
                "mean_cached": mean_cached / total,
                "peak_used": blocks.peak_used / total,
            },
            "events": dict(self.events),
        }

    def _seen(self, t: float) -> None:
        self._begin_s = t if self._begin_s is None else min(self._begin_s, t)
        self._end_s = max(self._end_s, t)
