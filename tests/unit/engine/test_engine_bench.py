"""The loads, drivers and files of `kvengine bench`, on an engine whose clock only its steps move."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from kvstore_engine.batching.engine import BatchEngine
from kvstore_engine.batching.settings import EngineSettings
from kvstore_engine.bench import against, study
from kvstore_engine.bench.against import Comparison, context_for, turn_loads
from kvstore_engine.bench.child import ServerChild
from kvstore_engine.bench.decoding import multiply_ours
from kvstore_engine.bench.ggml_build import kernel_environment, same_build
from kvstore_engine.bench.in_process import BenchEngine, run_in_process
from kvstore_engine.bench.over_http import MeasuredServer, run_over_http
from kvstore_engine.bench.report import COLUMNS, as_csv, as_json, report_page, write_files
from kvstore_engine.bench.servers import LlamaServerSettings, best_on_cpus
from kvstore_engine.bench.study import Case, StudySettings, case_of, study_engine, study_server
from kvstore_engine.bench.summary import BenchmarkRun, summarise
from kvstore_engine.bench.workload import (
    LOADS,
    Arrivals,
    ClosedLoop,
    LoadSettings,
    OpenLoop,
    Workload,
    ideal_tokens,
    make_load,
)
from kvstore_engine.errors import OperationError, UsageError
from kvstore_engine.ggml import tensor_at
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.graph import GraphBuilder
from kvstore_engine.model.weights import Linear, load_model
from kvstore_engine.profiler import Profiler
from tests.reference.batch_runs import twin_engine
from tests.reference.tiny_llama import write_tiny_llama
from tests.reference.twin_compute import VOCABULARY, StepClock, TwinCompute, TwinTokenizer, twin_pool

SMALL = LoadSettings(requests=12, prompt_tokens=64, generate_tokens=8, vocabulary=VOCABULARY)


def tokens_of(workload: Workload) -> list[list[int]]:
    return [request.tokens.tolist() for request in workload.requests]


class TestLoads:
    @pytest.mark.parametrize("name", LOADS)
    def test_a_seed_makes_the_same_load_and_another_seed_another(self, name: str) -> None:
        one, same = make_load(name, SMALL), make_load(name, SMALL)
        assert tokens_of(one) == tokens_of(same)
        assert [request.max_tokens for request in one.requests] == [request.max_tokens for request in same.requests]
        assert tokens_of(one) != tokens_of(make_load(name, LoadSettings(12, 64, 8, VOCABULARY, seed=2)))

    @pytest.mark.parametrize("name", LOADS)
    def test_requests_have_names_of_their_own_and_known_tokens(self, name: str) -> None:
        workload = make_load(name, SMALL)
        assert len({request.id for request in workload.requests}) == len(workload.requests) == 12
        for request in workload.requests:
            assert request.tokens.dtype == np.int32 and len(request.tokens)
            assert request.tokens.min() >= 0 and request.tokens.max() < VOCABULARY

    @pytest.mark.parametrize(("name", "common"), [("shared-50", 32), ("shared-90", 58)])
    def test_a_shared_prefix_is_shared(self, name: str, common: int) -> None:
        heads = {tuple(tokens[:common]) for tokens in tokens_of(make_load(name, SMALL))}
        assert len(heads) == 2

    def test_a_conversation_grows_by_its_turns(self) -> None:
        workload = make_load("multi-turn", SMALL)
        turns = {request.id: request.tokens.tolist() for request in workload.requests}
        for session in range(4):
            first, second, third = (turns[f"session-{session}-turn-{turn}"] for turn in range(3))
            assert second[: len(first)] == first and third[: len(second)] == second
        kinds = [request.kind for request in workload.requests]
        assert kinds == ["first turn"] * 4 + ["later turn"] * 8

    def test_an_unknown_load_is_named(self) -> None:
        with pytest.raises(UsageError, match="'nothing' is unknown; known: decode"):
            make_load("nothing", SMALL)


class TestIdeal:
    def test_each_distinct_block_counts_once(self) -> None:
        prefix = list(range(32))
        prompts = [np.array(prefix + own, np.int32) for own in ([40], [41, 42], [40])]
        assert ideal_tokens(prompts, 16) == 33 + 2 + 1

    def test_a_block_is_known_by_all_before_it(self) -> None:
        one, other = np.arange(32), np.concatenate([np.arange(1, 17), np.arange(16, 32)])
        assert ideal_tokens([one.astype(np.int32), other.astype(np.int32)], 16) == 64

    def test_the_last_token_is_always_computed(self) -> None:
        prompt = np.arange(32, dtype=np.int32)
        assert ideal_tokens([prompt, prompt], 16) == 33


class TestArrivals:
    def test_poisson_times_are_seeded_and_rise(self) -> None:
        due = OpenLoop(5.0, seed=3).due_s(200)
        assert due == OpenLoop(5.0, seed=3).due_s(200) == sorted(due)
        assert due != OpenLoop(5.0, seed=4).due_s(200)
        assert 200 / due[-1] == pytest.approx(5.0, rel=0.25)

    @pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
    def test_a_rate_that_is_none_is_refused(self, rate: float) -> None:
        with pytest.raises(UsageError, match="rate must be over 0"):
            OpenLoop(rate)


class Waiting:
    """A clock that steps move, and sleeping."""

    def __init__(self) -> None:
        self.steps = StepClock()

    def __call__(self) -> float:
        return self.steps.now

    def sleep(self, seconds: float) -> None:
        self.steps.now += seconds


def driven(name: str, arrivals: Arrivals, load: LoadSettings = SMALL, **settings: Any) -> tuple[Workload, BenchmarkRun]:
    clock, profiler = Waiting(), Profiler()
    compute = TwinCompute(twin_pool(512), on_step=clock.steps.step)
    engine = BatchEngine(compute, TwinTokenizer(), settings=EngineSettings(**settings), observer=profiler, clock=clock)
    workload = make_load(name, load)
    run = run_in_process(engine, workload, arrivals, clock=clock, sleep=clock.sleep)
    return workload, BenchmarkRun(run.outcomes, run.seconds, profiler.as_json())


class TestInProcess:
    @pytest.mark.parametrize("name", LOADS)
    def test_every_request_is_answered_in_full(self, name: str) -> None:
        workload, run = driven(name, ClosedLoop(4))
        wanted = {request.id: request.max_tokens for request in workload.requests}
        assert {outcome.id: outcome.generated for outcome in run.outcomes} == wanted
        assert all(outcome.ok and len(outcome.token_s) == outcome.generated for outcome in run.outcomes)

    def test_a_closed_loop_has_no_more_under_way_than_clients(self) -> None:
        _, run = driven("chat", ClosedLoop(3))
        for outcome in run.outcomes:
            others = [each for each in run.outcomes if each.due_s <= outcome.due_s < each.end_s]
            assert len(others) <= 3

    def test_an_open_loop_counts_from_when_a_request_was_due(self) -> None:
        """All are due long before the engine can have answered: the last one's wait shows in its latency."""
        _, run = driven("chat", OpenLoop(1e6), max_running=1)
        last = max(run.outcomes, key=lambda outcome: outcome.end_s)
        assert last.due_s < 1e-3
        assert last.ttft_s > 0.8 * run.seconds

    def test_an_open_loop_waits_for_what_is_not_due(self) -> None:
        _, run = driven("chat", OpenLoop(0.01, seed=1))
        assert run.seconds > OpenLoop(0.01, seed=1).due_s(12)[-1]
        assert max(outcome.ttft_s for outcome in run.outcomes) < 1.0

    def test_an_engine_that_takes_no_more_makes_requests_wait(self) -> None:
        _, run = driven("chat", OpenLoop(1e6), max_running=1, max_queued=1)
        assert all(outcome.ok for outcome in run.outcomes)

    def test_a_prompt_that_does_not_fit_is_an_outcome(self) -> None:
        _, run = driven("chat", ClosedLoop(2), LoadSettings(2, 9000, 4, VOCABULARY))
        assert {outcome.message[:10] for outcome in run.outcomes} == {"the prompt"}


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    found = []
    for name in ("chat", "shared-90", "long-short"):
        for count in (1, 4):
            workload, run = driven(name, ClosedLoop(count))
            found.append(case_of(workload, ClosedLoop(count), run, 16, lambda text: None))
    return found


class TestFiles:
    def test_prompts_computed_are_the_ideal_where_prefixes_are_shared(self, cases: list[Case]) -> None:
        ratios = [case.evaluated_ratio for case in cases]
        assert ratios == pytest.approx([1.0] * 6)

    def test_json_has_every_case_with_its_latencies(self, cases: list[Case]) -> None:
        report: Any = json.loads(json.dumps(as_json({"model": "m"}, cases)))
        assert report["model"] == "m" and len(report["cases"]) == 6
        for case in report["cases"]:
            for latency in ("ttft_s", "tpot_s", "inter_token_s", "total_s", "queued_s"):
                assert case[latency]["count"] > 0
                assert case[latency]["p50"] <= case[latency]["p99"] <= case[latency]["max"]
            assert case["failed"] == 0 and case["generated_per_s"] > 0
            assert set(case["profile"]["prompt_tokens_by_source"]) == {"local", "daemon", "computed"}
        assert set(report["cases"][-1]["by_kind"]) == {"long", "short"}

    def test_csv_has_one_line_a_case(self, cases: list[Case]) -> None:
        rows = list(csv.DictReader(io.StringIO(as_csv(cases))))
        assert len(rows) == 6 and tuple(rows[0]) == COLUMNS
        assert [row["concurrency"] for row in rows] == ["1", "4"] * 3
        assert all(float(row["ttft_s_p50"]) > 0 and row["rate"] == "" for row in rows)

    def test_the_page_loads_nothing_and_is_well_formed(self, cases: list[Case]) -> None:
        text = report_page({"model": "<m & m>"}, cases)
        assert "<script" not in text and "@import" not in text
        assert not re.search(r"""(?:src|href|url)\s*[=(]\s*["']?(?!#)""", text)
        assert "&lt;m &amp; m&gt;" in text and "<m & m>" not in text
        assert text.count("<svg") >= 3 * 5
        assert ".charts>figure:last-child:nth-child(odd){grid-column:1/-1}" in text, (
            "no empty cell beside the last chart"
        )
        balance = _Balance()
        balance.feed(text)
        assert balance.open == []

    def test_three_files_are_written(self, cases: list[Case], tmp_path: Path) -> None:
        written = write_files(tmp_path / "new", {}, cases[:1])
        assert [path.name for path in written] == ["bench.json", "bench.csv", "bench.html"]
        assert all(path.stat().st_size for path in written)

    def test_a_folder_that_cannot_be_created_is_reported(self, cases: list[Case], tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(OperationError, match="cannot write to"):
            write_files(tmp_path / "file" / "in", {}, cases[:1])


class _Balance(HTMLParser):
    """Tags that are open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


class _Streaming(BaseHTTPRequestHandler):
    """Answers like an OpenAI-style server: three pieces of four tokens, then the account."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((body, self.headers.get("Authorization")))  # type: ignore[attr-defined]
        if body["prompt"][0] == 0:
            self._send(429, [json.dumps({"error": {"message": "come back later"}})])
            return
        pieces: list[dict[str, Any]] = [{"choices": [{"text": "x", "finish_reason": None}]}] * 3
        usage = {"completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 5}}
        events = [*pieces, {"choices": [{"text": "", "finish_reason": "length"}]}, {"choices": [], "usage": usage}]
        self._send(200, [f"data: {json.dumps(event)}\n\n" for event in events] + ["data: [DONE]\n\n"])

    def _send(self, status: int, parts: list[str]) -> None:
        self.send_response(status)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        raw = "".join(parts).encode()
        for first in range(0, len(raw), 7):  # chunks that know nothing of lines
            piece = raw[first : first + 7]
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def streaming() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Streaming) as server:
        server.asked = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class TestStudy:
    def test_no_load_of_a_server_finds_what_another_left_behind(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[Workload] = []

        def answered(endpoint: MeasuredServer, workload: Workload, arrivals: Arrivals) -> BenchmarkRun:
            asked.append(workload)
            return BenchmarkRun([], 1.0)

        monkeypatch.setattr(study, "run_over_http", answered)
        wanted = StudySettings(tuple(LOADS), (ClosedLoop(1), ClosedLoop(4)), replace(SMALL, prompt_tokens=64))
        list(study_server(MeasuredServer("http://somewhere"), wanted, lambda text: None))
        assert [workload.name for workload in asked[1:]] == [*LOADS, *LOADS]
        heads = [{request.tokens[:8].tobytes() for request in workload.requests} for workload in asked]
        assert sum(map(len, heads)) == len(set.union(*heads))

    def test_the_first_requests_of_an_engine_are_ones_that_its_model_knows(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = twin_engine(512)
        monkeypatch.setattr(study, "opened", lambda config, observer: contextlib.nullcontext(engine))
        asked: list[BenchmarkRun] = []

        def noted(engine: BatchEngine, workload: Workload, arrivals: Arrivals) -> BenchmarkRun:
            asked.append(run_in_process(engine, workload, arrivals))
            return asked[-1]

        monkeypatch.setattr(study, "run_in_process", noted)
        wanted = StudySettings(("decode",), (ClosedLoop(1),), SMALL)
        list(study_engine(BenchEngine(Path("model"), 0), wanted, lambda text: None))
        assert len(asked) == 2 and not any(outcome.message for run in asked for outcome in run.outcomes)

    def test_the_ideal_is_that_of_what_was_answered(self) -> None:
        workload = make_load("chat", SMALL)
        run = run_in_process(twin_engine(512), workload, ClosedLoop(2))
        run.outcomes[0].message = "failed"
        case = case_of(workload, ClosedLoop(2), run, 16, lambda text: None)
        assert case.evaluated_ratio == 1.0


class TestOverHttp:
    def test_answers_are_read_as_they_stream(self, streaming: ThreadingHTTPServer) -> None:
        url = f"http://127.0.0.1:{streaming.server_port}/v1"
        run = run_over_http(MeasuredServer(url, "m", "secret"), make_load("chat", SMALL), ClosedLoop(3))
        summary = summarise(run)
        assert (summary.requests, summary.failed, summary.generated_tokens) == (12, 0, 48)
        assert summary.computed_tokens == summary.prompt_tokens - 12 * 5
        assert all(len(outcome.token_s) == 3 for outcome in run.outcomes)
        body, key = streaming.asked[0]  # type: ignore[attr-defined]
        assert key == "Bearer secret"
        assert body["model"] == "m" and body["stream"] and body["max_tokens"] == 8 and body["ignore_eos"]

    def test_a_refusal_is_an_outcome_with_the_servers_words(self, streaming: ThreadingHTTPServer) -> None:
        workload = make_load("decode", LoadSettings(1, 4, 4, VOCABULARY))
        workload.requests[0].tokens[0] = 0
        run = run_over_http(MeasuredServer(f"127.0.0.1:{streaming.server_port}"), workload, OpenLoop(100.0))
        assert run.outcomes[0].message == "HTTP 429: come back later"
        assert summarise(run).failed == 1

    def test_an_absent_server_is_reported(self) -> None:
        with pytest.raises(OperationError, match="no server answers at"):
            run_over_http(MeasuredServer("http://127.0.0.1:1"), make_load("chat", SMALL), ClosedLoop(1))

    def test_a_wrong_url_is_reported(self) -> None:
        with pytest.raises(UsageError, match="is no URL"):
            run_over_http(MeasuredServer("ftp://somewhere"), make_load("chat", SMALL), ClosedLoop(1))


class TestComparable:
    def test_the_context_holds_the_longest_request_of_every_turn(self) -> None:
        wanted = Comparison(Path("model"), 2, rounds=3)
        turns = turn_loads(wanted, replace(SMALL, requests=1, prompt_tokens=256, seed=3))
        assert len({load.requests[0].tokens[:16].tobytes() for load in turns}) == 3
        assert context_for(turns[:1]) == 256 and context_for(turns) == 512

    def test_barriers_spin_alike_on_both_sides(self, monkeypatch: pytest.MonkeyPatch) -> None:
        spin_counts: list[str] = []

        class Child:
            def __init__(self, module: str, arguments: list[str], environment: dict[str, str] | None = None) -> None:
                spin_counts.append({**os.environ, **(environment or {})}["GOMP_SPINCOUNT"])

            def close(self) -> None:
                pass

        monkeypatch.setenv("GOMP_SPINCOUNT", "1000")  # as a ggml that was loaded in this process leaves it
        monkeypatch.setattr(against, "ServerChild", Child)
        with against.decoders(Path("model"), 2, {}):
            assert spin_counts == ["300000", "300000"]

    def test_the_products_of_a_step_are_all_of_the_models(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = write_tiny_llama(tmp_path / "tiny.gguf")
        with GGUFFile.open(path) as file, load_model(file) as model:
            multiplied = {tensor_at(linear.weight).name.decode() for linear in model.linears()}
            matrices = {name for name, tensor in file.tensors.items() if len(tensor.shape) == 2}
            assert multiplied >= matrices - {"token_embd.weight"}
        built: list[Linear] = []
        plain = GraphBuilder.linear

        def noted(builder: GraphBuilder, linear: Linear, rows: int) -> int:
            built.append(linear)
            return plain(builder, linear, rows)

        monkeypatch.setattr(GraphBuilder, "linear", noted)
        for head in (True, False):
            answer = multiply_ours(path, 2, {"sequences": 3, "steps": 2, "seed": 1, "head": head})
            assert len(cast("list[float]", answer["seconds"])) == 2
            assert len(built) == len(multiplied) - (not head)
            built.clear()

    def test_only_the_side_of_products_leaves_out_the_rest_of_a_step(self) -> None:
        asked: list[dict[str, object]] = []

        class Child:
            def ask(self, question: dict[str, object]) -> dict[str, object]:
                asked.append(question)
                return {"seconds": [0.5, 0.5], "core_wait_s": 0.0}

        child = cast(ServerChild, Child())
        sides = {against.OURS: child, against.PRODUCTS: child}
        speeds = against.decode_speeds(sides, 4, prompt_tokens=8, steps=2, rounds=1)
        assert speeds.per_s == {against.OURS: 8.0, against.PRODUCTS: 8.0}
        assert [question.get("products") for question in asked] == [None, True]

    def test_a_build_is_its_bytes(self, tmp_path: Path) -> None:
        for name, content in (("libggml-cpu.so", b"a"), ("copy-libggml-cpu.so", b"a"), ("libggml-base.so", b"b")):
            (tmp_path / name).write_bytes(content)
        one, copy, other = (tmp_path / n for n in ("libggml-cpu.so", "copy-libggml-cpu.so", "libggml-base.so"))
        assert same_build([one], [copy, other])
        assert not same_build([one, other], [copy])
        assert not same_build([], [copy]) and not same_build([one], [])

    def test_our_kernels_use_no_more_than_the_baseline(self) -> None:
        assert kernel_environment(["avx", "avx2"]) == {"KVENGINE_KERNEL_ISA": "avx2"}
        assert kernel_environment(["avx2", "avx512"]) == {} == kernel_environment(["neon"])

    def test_the_default_is_no_option_and_the_best_is_the_documented_one(self) -> None:
        assert LlamaServerSettings(2).command() == ["-t", "2"]
        best = " ".join(best_on_cpus(2, 16, 512).command())
        assert "-np 16 -no-kvu -fa off -c 8192" in best
