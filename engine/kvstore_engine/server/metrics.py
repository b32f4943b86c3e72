"""The server's figures in Prometheus' text format.

Owns histograms and counters of requests as clients see them. The engine's own figures are asked for when they are
shown. It never keeps single samples.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from kvstore_engine.batching import Finished

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Histogram:
    """Counts of values up to each bound."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds, self._counts = bounds, [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str) -> Iterable[str]:
        total = 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self._sum}"
        yield f"{name}_count {total}"


class Metrics:
    """Fed by the endpoints."""

    def __init__(self) -> None:
        self.responses: Counter[tuple[str, int]] = Counter()
        self.disconnects = 0
        self._finished: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._histograms = {
            "time_to_first_token_seconds": (Histogram(_SECONDS), "From arrival in the engine to the first token."),
            "time_per_output_token_seconds": (Histogram(_PER_TOKEN), "Per token after the first, of one answer."),
            "queue_seconds": (Histogram(_SECONDS), "From arrival in the engine to admission."),
            "answer_seconds": (Histogram(_SECONDS), "From arrival in the engine to the end of the answer."),
        }

    def answered(self, event: Finished) -> None:
        """An answer has ended."""
        usage = event.usage
        self._finished[event.reason] += 1
        self._tokens["generated"] += usage.generated_tokens
        if event.index == 0:
            self._tokens["prompt"] += usage.prompt_tokens
            self._tokens["prompt_local"] += usage.local_tokens
            self._tokens["prompt_daemon"] += usage.daemon_tokens
        if usage.generated_tokens:
            self._histograms["time_to_first_token_seconds"][0].observe(usage.ttft_s)
            self._histograms["answer_seconds"][0].observe(usage.total_s)
        if usage.generated_tokens > 1:
            self._histograms["time_per_output_token_seconds"][0].observe(usage.tpot_s)
        self._histograms["queue_seconds"][0].observe(usage.queued_s)

    def text(self, engine: Mapping[str, Any] | None, gauges: Mapping[str, tuple[float, str]]) -> str:
        """All of it; `engine` is the scheduler's status, None while it gives none."""
        lines: list[str] = []
        _family(lines, "responses_total", "counter", "HTTP responses.")
        for (path, status), count in sorted(self.responses.items()):
            lines.append(f'kvengine_responses_total{{path="{path}",status="{status}"}} {count}')
        _labelled(lines, "answers_total", "How answers ended.", "reason", self._finished)
        _labelled(
            lines,
            "tokens_total",
            "Tokens of prompts and answers; of prompts also by where K/V came from.",
            "kind",
            self._tokens,
        )
        _single(lines, "disconnects_total", "counter", "Clients that left before their answer ended.", self.disconnects)
        for name, (value, text) in gauges.items():
            _single(lines, name, "counter" if name.endswith("_total") else "gauge", text, value)
        for name, (histogram, text) in self._histograms.items():
            _family(lines, name, "histogram", text)
            lines += histogram.lines(f"kvengine_{name}")
        if engine is not None:
            _engine(lines, engine)
        return "\n".join(lines) + "\n"


def _engine(lines: list[str], status: Mapping[str, Any]) -> None:
    counters, pool = status["counters"], status["pool"]
    for name, text, value in (
        ("steps_total", "Steps that the engine has done.", counters["steps"]),
        ("step_seconds_total", "Time in steps.", counters["step_s"]),
        ("preemptions_total", "Running sequences that lost their blocks.", counters["preemptions"]),
        ("swaps_total", "Preemptions by copying the blocks out.", counters["swaps"]),
    ):
        _single(lines, name, "counter", text, value)
    _single(lines, "worker_deaths_total", "counter", "ggml processes that died.", status["worker"]["deaths"])
    for name, count in status["sequences"].items():
        _single(lines, f"sequences_{name}", "gauge", f"Sequences that are {name}.", count)
    _single(lines, "pool_blocks", "gauge", "Blocks of the K/V pool.", pool["blocks"])
    _single(lines, "pool_free_blocks", "gauge", "Of them free.", pool["free_blocks"])
    connected = int(status["kvstore"] == "connected")
    _single(lines, "kvstore_connected", "gauge", "1 while all sessions with kvstored are connected.", connected)


def _family(lines: list[str], name: str, kind: str, text: str) -> None:
    lines += [f"# HELP kvengine_{name} {text}", f"# TYPE kvengine_{name} {kind}"]


def _single(lines: list[str], name: str, kind: str, text: str, value: float) -> None:
    _family(lines, name, kind, text)
    lines.append(f"kvengine_{name} {value}")


def _labelled(lines: list[str], name: str, text: str, label: str, counts: Mapping[str, int]) -> None:
    _family(lines, name, "counter", text)
    lines += [f'kvengine_{name}{{{label}="{key}"}} {count}' for key, count in sorted(counts.items())]
