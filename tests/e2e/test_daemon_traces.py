"""Spans of a live daemon, as a collector of OpenTelemetry receives them: over HTTP, decoded by its own messages."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import kvstore_client
from kvstore_proto.trace import TraceContext
from kvstore_proto.v1 import unary_pb2 as pb
from kvstored.clock import SystemClock
from kvstored.telemetry.spans import EndedSpan, Sampler, Sending, SpanExporter, TracesError
from tests.reference.conversations import model, put_conversation, tokens_of
from tests.reference.running_daemon import DaemonDied, RunningDaemon, eventually, running_daemon
from tests.reference.running_server import RunningServer
from tests.reference.skips import skip_without_ggml
from tests.reference.tiny_llama import byte_level_vocabulary, write_tiny_llama
from tests.reference.unary_client import by_tokens, unary_client

otel = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason="needs the extra otel")

BLOCKS = 4
TRACE, SPAN = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
HEADER = f"00-{TRACE:032x}-{SPAN:016x}-01"


class Collector(ThreadingHTTPServer):
    """A receiver of OTLP over HTTP. `spans` has all that came; with `refuses` set it answers with that status."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[Any] = []
        self.refuses = 0
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        request = otel.ExportTraceServiceRequest.FromString(body)
        if not self.server.refuses and self.path == "/v1/traces":
            for resource in request.resource_spans:
                self.server.resources.append(resource.resource)
                self.server.spans += [span for scope in resource.scope_spans for span in scope.spans]
        self.send_response(self.server.refuses or 200)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def facts(span: Any) -> dict[str, Any]:
    return {
        each.key.removeprefix("kvstored."): getattr(each.value, each.value.WhichOneof("value"))
        for each in span.attributes
    }


def blocks_of(moves: Sequence[Any]) -> int:
    """Return how many blocks the transfers of `moves` had together."""
    return sum(facts(move)["blocks"] for move in moves)


@contextmanager
def traced_daemon(collector: Collector, *settings: str) -> Iterator[RunningDaemon]:
    with running_daemon(f"traces.endpoint={collector.url}", *settings) as daemon:
        yield daemon


def test_a_request_of_an_engine_is_one_trace_with_its_movement_and_lease(collector: Collector) -> None:
    with traced_daemon(collector, "traces.sample=0") as daemon, daemon.connect(client_name="engine 7") as session:
        put_conversation(session, 1, BLOCKS, wait="settled")
        daemon.drop("host")
        with kvstore_client.traced(HEADER):
            assert session.lookup(tokens_of(1, BLOCKS + 1)).blocks == BLOCKS
            with session.get(tokens_of(1, BLOCKS)) as lease:
                assert len(lease) == BLOCKS
        assert eventually(lambda: len(collector.named("kvstored.lease")) == 1)
        spans = list(collector.spans)
        assert {int.from_bytes(span.trace_id) for span in spans} == {TRACE}, "nothing else was asked to be traced"
        [lookup] = collector.named("kvstored.lookup")
        assert lookup.parent_span_id == SPAN.to_bytes(8) and lookup.kind == lookup.SPAN_KIND_SERVER
        assert facts(lookup).items() >= {
            "tenant": f"uid-{os.getuid()}", "client": "engine 7", "model": "test model", "blocks_asked": BLOCKS + 1,
            "blocks_found": BLOCKS, "miss": "never_stored",
        }.items()  # fmt: skip
        *_, acquire = collector.named("kvstored.acquire")  # the one before leased what was in DRAM
        assert acquire.parent_span_id == SPAN.to_bytes(8)
        assert facts(acquire).items() >= {"blocks_found": BLOCKS, "blocks_promoted": BLOCKS}.items()
        moves = collector.named("kvstored.move")
        assert blocks_of(moves) == BLOCKS and {facts(move)["lane"] for move in moves} == {"nvme→host"}
        [lease_span] = collector.named("kvstored.lease")
        assert {span.parent_span_id for span in (*moves, lease_span)} == {acquire.span_id}
        for inner in moves:
            assert acquire.start_time_unix_nano <= inner.start_time_unix_nano
            assert inner.start_time_unix_nano <= inner.end_time_unix_nano <= acquire.end_time_unix_nano
        assert lease_span.end_time_unix_nano >= acquire.end_time_unix_nano
        assert not any(len(span.span_id) != 8 or span.status.code for span in spans)
        [service] = {
            each.value.string_value for each in collector.resources[0].attributes if each.key == "service.name"
        }
        assert service == "kvstored"


@pytest.mark.slow
def test_an_http_request_is_one_trace_through_the_engine(collector: Collector, tmp_path: Path) -> None:
    """Lookups, loads and puts of kvengine for a request are below the span that its caller names."""
    skip_without_ggml()
    for needed in ("uvicorn", "httptools"):
        pytest.importorskip(needed, reason="the extra server is not installed")
    weights = write_tiny_llama(tmp_path / "tiny.gguf", byte_level_vocabulary())
    with traced_daemon(collector, "traces.sample=0") as daemon:
        for turn in range(2):  # the second engine loads what the first one stored
            server = RunningServer(
                tmp_path, weights, "--served-name", "tiny", "--threads", "1", "--kvstore", str(daemon.socket_dir)
            )
            try:
                body = {"model": "tiny", "prompt": "the cat sat on the mat " * 20, "max_tokens": 2, "temperature": 0}
                headers = {"traceparent": HEADER, "content-type": "application/json"}
                request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode(), headers)
                with urllib.request.urlopen(request, timeout=60) as response:
                    assert response.status == 200
                assert server.stop() == 0, server.log
            finally:
                server.close()
            wanted = ("kvstored.store",) if turn == 0 else ("kvstored.acquire", "kvstored.lease")
            assert eventually(lambda wanted=wanted: all(collector.named(name) for name in wanted)), server.log
    assert {int.from_bytes(span.trace_id) for span in collector.spans} == {TRACE}
    roots = [*collector.named("kvstored.store"), *collector.named("kvstored.acquire")]
    assert {span.parent_span_id for span in roots} == {SPAN.to_bytes(8)}


def test_what_no_engine_traces_begins_traces_of_its_own(collector: Collector) -> None:
    with traced_daemon(collector) as daemon:
        with daemon.connect() as session:
            put_conversation(session, 1, BLOCKS, wait="settled")
            with kvstore_client.traced(HEADER.removesuffix("1") + "0"):  # the engine does not keep this trace
                session.lookup(tokens_of(1, BLOCKS))
            with kvstore_client.traced("no header"):
                session.lookup(tokens_of(2, 3))
        assert eventually(lambda: len(collector.named("kvstored.lookup")) == 1)
        assert facts(collector.named("kvstored.lookup")[0])["blocks_asked"] == 3
        assert eventually(lambda: blocks_of(collector.named("kvstored.move")) == BLOCKS)
        [store, *_] = collector.named("kvstored.store")
        assert not store.parent_span_id and facts(store)["blocks_stored"] == BLOCKS
        roots = {bytes(span.trace_id) for span in collector.spans if not span.parent_span_id}
        assert roots == {bytes(span.trace_id) for span in collector.spans}
        assert eventually(lambda: daemon.status().counters["traced_spans"] == len(collector.spans))


def test_a_unary_call_is_below_its_callers_span(collector: Collector) -> None:
    with (
        traced_daemon(collector, "unary.enabled=true") as daemon,
        unary_client(f"unix:{daemon.socket_dir}/unary.sock") as client,
    ):
        request = pb.UnaryLookupRequest(chain=by_tokens(model(), tokens_of(1, 2)))
        client.stub.Lookup(request, timeout=20, metadata=(("traceparent", HEADER),))
        assert eventually(lambda: len(collector.named("kvstored.lookup")) == 1)
        assert collector.named("kvstored.lookup")[0].parent_span_id == SPAN.to_bytes(8)


def test_a_collector_that_fails_costs_spans_and_nothing_else(collector: Collector) -> None:
    collector.refuses = 400
    with traced_daemon(collector) as daemon:
        with daemon.connect() as session:
            for _ in range(20):
                session.lookup(tokens_of(1, 2))
            assert eventually(lambda: daemon.status().counters["dropped_spans"] == 20)
            collector.refuses = 0
            session.lookup(tokens_of(1, 2))
            assert eventually(lambda: daemon.status().counters["traced_spans"] == 1)
        assert daemon.log.count("spans are dropped") == 1 and daemon.log.count("spans are sent again") == 1
        assert "Traceback" not in daemon.log


def test_an_error_of_the_library_costs_the_batch_alone(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest version that the extra allows raises the error of its HTTP library when a collector hangs."""
    library = pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    counted: dict[str, int] = {}
    failed = threading.Event()

    def export(*_: object) -> None:
        monkeypatch.undo()
        failed.set()
        raise TimeoutError("the collector hangs")

    monkeypatch.setattr(library.OTLPSpanExporter, "export", export)
    exporter = SpanExporter(Sending(collector.url, 10, lambda name, _: counted.update({name: 1})), SystemClock())
    span = EndedSpan("one", TraceContext(1, 2, 1), 0, 1, 2, {})
    exporter.note(span)
    assert failed.wait(30)
    exporter.note(span)
    assert eventually(lambda: len(collector.spans) == 1)
    exporter.close()
    assert counted == {"dropped_spans": 1, "traced_spans": 1}


def test_a_full_queue_drops_and_counts(collector: Collector) -> None:
    counted: dict[str, int] = {}

    def count(name: str, amount: int) -> None:
        counted[name] = counted.get(name, 0) + amount

    collector.refuses = 503
    exporter = SpanExporter(Sending(collector.url, 10, count), SystemClock())
    span = EndedSpan("one", TraceContext(1, 2, 1), 0, 1, 2, {})
    for _ in range(10_000):
        exporter.note(span)
    exporter.close()
    exporter.note(span)
    assert counted.keys() == {"dropped_spans"} and 0 < counted["dropped_spans"] <= 10_000


def test_a_share_of_traces_is_kept() -> None:
    kept = sum(Sampler(0.25).child(None).is_sampled for _ in range(4000))
    assert 800 < kept < 1200
    assert not any(Sampler(0).child(None).is_sampled for _ in range(100))
    assert Sampler(0).child(TraceContext(7, 8, 1))[0::2] == (7, 1)


def test_without_the_extra_the_daemon_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(TracesError, match=r"\[otel\]"):
        SpanExporter(Sending("http://127.0.0.1:4318", 1, lambda *_: None), SystemClock())


def test_an_endpoint_that_is_none_is_named() -> None:
    with (
        pytest.raises(DaemonDied, match=r"traces\.endpoint 'localhost:4318' is no URL"),
        running_daemon("traces.endpoint=localhost:4318"),
    ):
        pass


def test_a_daemon_imports_nothing_that_only_settings_or_callers_ask_for() -> None:
    absent = {
        "opentelemetry", "kvstored.rpc.verbs.traced", "kvstored.rpc.verbs.recorded", "kvstored.events.opening",
        "kvstored.health.scrub.slab_reader", "kvstore_tiers.nvme.inspect", "kvstore_cuda.native_build",
        "grpc_reflection.v1alpha", "difflib", "shutil", "tempfile", "importlib.resources",
    }  # fmt: skip
    ask = f"import sys, kvstored.daemon; print({absent} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, timeout=60).stdout == "set()\n"
