"""Spans of requests, movement and leases for OpenTelemetry, by OTLP over HTTP.

The control thread notes a span when it has ended, which takes a few microseconds and never waits. A thread makes the
library's spans of what was noted and sends them in batches; what does not fit into the queue, or cannot be sent, is
dropped and counted. The library is imported only when a collector is configured. Spans name tenants, clients, models
and sizes, never keys, token ids or payload.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, Full, Queue
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from kvstore_proto.trace import SAMPLED, TraceContext
from kvstore_proto.version import VERSION, pip_install
from kvstored.clock import Clock

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

log = logging.getLogger(__name__)
EXTRA = "otel"
BATCH_SPANS, BATCH_S = 512, 1.0
SEND_S = 5.0  # for one batch, and for the rest at the end
DEFAULT_PATH = "/v1/traces"
Facts = Mapping[str, str | int | bool]


class TracesError(ValueError):
    """An error: spans cannot be sent as the configuration says. The message says why and what to do."""


class EndedSpan(NamedTuple):
    """A span that has ended, with monotonic times. `parent` is the number of the span that began it, 0 for none. `kind`
    is "server" for a client's request. `error` is empty unless it failed."""

    name: str
    context: TraceContext
    parent: int
    began_ns: int
    ended_ns: int
    facts: Facts
    kind: str = "internal"
    error: str = ""


class Sampler:
    """A choice of which spans to keep. A caller's own choice counts; of all else, `share` (0 to 1) is kept."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._random = random.Random()

    def child(self, parent: TraceContext | None) -> TraceContext:
        """Return the context of a new span below `parent`, or of one that begins a trace."""
        if parent is None:
            flags = SAMPLED if self._random.random() < self._share else 0
            return TraceContext(self._random.getrandbits(128) or 1, self._random.getrandbits(64) or 1, flags)
        return TraceContext(parent.trace_id, self._random.getrandbits(64) or 1, parent.flags)


@dataclass(frozen=True)
class Sending:
    """The settings of the exporter: the collector's `endpoint`, an http(s) URL, and how many spans may wait in the
    `queue`. `count(name, amount)` adds to the daemon's counters, from any thread."""

    endpoint: str
    queue: int
    count: Callable[[str, int], None]


class SpanExporter:
    """A queue of ended spans, and the thread that sends them. Raises TracesError if the library is not installed."""

    def __init__(self, sending: Sending, clock: Clock) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
        except ImportError as error:
            raise TracesError(
                f"traces.endpoint is set, but {error.name} cannot be loaded: {pip_install(EXTRA)}"
            ) from None
        logging.getLogger(OTLPSpanExporter.__module__.partition(".")[0]).setLevel(logging.CRITICAL)  # we say it once
        parts = urlsplit(sending.endpoint)
        endpoint = sending.endpoint if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}{DEFAULT_PATH}"
        self._endpoint, self._count, self._clock = endpoint, sending.count, clock
        self._resource = Resource.create({"service.name": "kvstored", "service.version": VERSION})
        self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=SEND_S)
        self._waiting: Queue[EndedSpan | None] = Queue(sending.queue)
        self._is_failing = False
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def note(self, span: EndedSpan) -> None:
        """Queue a span to be sent. If the queue is full, the span is dropped and counted."""
        try:
            self._waiting.put_nowait(span)
        except Full:
            self._count("dropped_spans", 1)

    def close(self) -> None:
        """Send what waits, for `SEND_S` seconds at most."""
        until_s = time.monotonic() + SEND_S
        try:
            self._waiting.put(None, timeout=SEND_S)
        except Full:
            pass
        else:
            self._thread.join(max(0.0, until_s - time.monotonic()))
        self._exporter.shutdown()
        self._thread.join(SEND_S)

    # In the thread

    def _run(self) -> None:
        is_last = False
        while not is_last:
            batch: list[EndedSpan] = []
            until_s = time.monotonic() + BATCH_S
            while len(batch) < BATCH_SPANS and not is_last:
                try:
                    span = self._waiting.get(timeout=max(0.0, until_s - time.monotonic()))
                except Empty:
                    break
                is_last = span is None
                batch += [span] if span is not None else []
            if batch:
                self._send(batch)

    def _send(self, batch: list[EndedSpan]) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        shift_ns = self._clock.wall_ns() - self._clock.monotonic_ns()
        sent = False
        with suppress(Exception):  # some versions raise what their HTTP library does, as for a collector that hangs
            sent = self._exporter.export([self._made(span, shift_ns) for span in batch]) is SpanExportResult.SUCCESS
        self._count("traced_spans" if sent else "dropped_spans", len(batch))
        if sent == self._is_failing:
            self._is_failing = not sent
            log.warning("spans are %s to %s", "sent again" if sent else "dropped: they cannot be sent", self._endpoint)

    def _made(self, span: EndedSpan, shift_ns: int) -> ReadableSpan:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

        trace_id, span_id, flags = span.context
        return ReadableSpan(
            span.name,
            SpanContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(flags)),
            SpanContext(trace_id, span.parent, is_remote=True) if span.parent else None,
            self._resource,
            {f"kvstored.{name}": value for name, value in span.facts.items()},
            kind=SpanKind.SERVER if span.kind == "server" else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
            start_time=span.began_ns + shift_ns,
            end_time=span.ended_ns + shift_ns,
            instrumentation_scope=InstrumentationScope("kvstored", VERSION),
        )
