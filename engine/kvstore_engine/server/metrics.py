"""The server's figures for Prometheus, by its own client library.

The module owns the names, and the counters and histograms of requests as clients see them. The engine's own figures are
asked for when they are shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvstore_engine.batching.events import Finished
from kvstore_engine.server.engine_client import EngineClient

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """The counters and histograms of the HTTP server for Prometheus."""

    def __init__(self) -> None:
        # Else each counter and histogram has a second series, with the time it began.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, "kvengine", registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(name, text, (), "kvengine", buckets=buckets, registry=registry)

        self._responses = counter("responses", "HTTP responses.", "path", "status")
        self._answers = counter("answers", "How answers ended.", "reason")
        self._tokens = counter(
            "tokens", "Tokens of prompts and answers; of prompts also by where K/V came from.", "kind"
        )
        self._disconnects = counter("disconnects", "Clients that left before their answer ended.")
        self._ttft = histogram("time_to_first_token_seconds", "From arrival in the engine to the first token.")
        self._tpot = histogram("time_per_output_token_seconds", "Per token after the first, of one answer.", _PER_TOKEN)
        self._queued = histogram("queue_seconds", "From arrival in the engine to admission.")
        self._total = histogram("answer_seconds", "From arrival in the engine to the end of the answer.")

    def responded(self, path: str, status: int) -> None:
        self._responses.labels(path, str(status)).inc()

    def disconnected(self) -> None:
        """Count a client that has left before its answer ended."""
        self._disconnects.inc()

    def answered(self, event: Finished) -> None:
        """Add the answer that has ended with `event` to the counts: its tokens, times and reason."""
        usage = event.usage
        self._answers.labels(event.reason).inc()
        self._tokens.labels("generated").inc(usage.generated_tokens)
        if event.index == 0:
            self._tokens.labels("prompt").inc(usage.prompt_tokens)
            self._tokens.labels("prompt_local").inc(usage.local_tokens)
            self._tokens.labels("prompt_daemon").inc(usage.daemon_tokens)
        if usage.generated_tokens:
            self._ttft.observe(usage.ttft_s)
            self._total.observe(usage.total_s)
        if usage.generated_tokens > 1:
            self._tpot.observe(usage.tpot_s)
        self._queued.observe(usage.queued_s)

    def text(self, engine: EngineClient, status: Mapping[str, Any] | None) -> bytes:
        """Return all figures in Prometheus' text format. `status` is the scheduler's report, None if it does not
        answer.
        """
        now = CollectorRegistry()
        now.register(_Now(engine, status))
        return generate_latest(self._registry) + generate_latest(now)


class _Now(Collector):
    """The figures of the engine at one moment."""

    def __init__(self, engine: EngineClient, status: Mapping[str, Any] | None) -> None:
        self._engine, self._status = engine, status

    def collect(self) -> Iterator[Metric]:
        engine, status = self._engine, self._status
        yield _gauge("engine_ready", "1 while requests are taken in.", engine.state == "ready")
        yield _counter("engine_restarts", "Starts of the scheduler's process after the first.", engine.restarts)
        yield _gauge("requests_in_engine", "Requests that wait or run.", engine.requests)
        if status is None:
            return
        counters, pool = status["counters"], status["pool"]
        yield _counter("steps", "Steps that the engine has done.", counters["steps"])
        yield _counter("step_seconds", "Time in steps.", counters["step_s"])
        yield _counter("preemptions", "Running sequences that lost their blocks.", counters["preemptions"])
        yield _counter("swaps", "Preemptions by copying the blocks out.", counters["swaps"])
        yield _counter("worker_deaths", "ggml processes that died.", status["worker"]["deaths"])
        restored = status["restored"]
        yield _labelled("restorations", "Restorations by plan.", "plan", restored["by_plan"])
        yield _labelled(
            "restored_chunks", "Stored blocks of prompts by how they were restored.", "how", restored["chunks"]
        )
        yield _counter("restore_predicted_seconds", "Predicted time of restoring.", restored["predicted_s"])
        yield _counter("restore_seconds", "Time that the same restorations took.", restored["actual_s"])
        for name, count in status["sequences"].items():
            yield _gauge(f"sequences_{name}", f"Sequences that are {name}.", count)
        yield _gauge("pool_blocks", "Blocks of the K/V pool.", pool["blocks"])
        yield _gauge("pool_free_blocks", "Of them free.", pool["free_blocks"])
        is_connected = status["kvstore"] == "connected"
        yield _gauge("kvstore_connected", "1 while all sessions with kvstored are connected.", is_connected)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"kvengine_{name}", text, value)


def _labelled(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"kvengine_{name}", text, labels=[label])
    for value, count in values.items():
        family.add_metric([value], count)
    return family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"kvengine_{name}", text, value)
