"""The profiler and the trace of an engine whose clock only its steps move."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvstore_engine.batching.engine import BatchEngine
from kvstore_engine.batching.events import Usage
from kvstore_engine.batching.observer import Observer
from kvstore_engine.batching.settings import EngineSettings
from kvstore_engine.errors import OperationError
from kvstore_engine.profiler import FanOut, Profiler, TracingObserver
from kvstore_engine.restore.record import RestorationRecord, Work
from tests.reference.batch_runs import Outcome, request, run
from tests.reference.twin_compute import StepClock, TwinCompute, TwinTokenizer, twin_pool


def observed(observer: Observer, blocks: int = 256, **settings: Any) -> tuple[BatchEngine, StepClock]:
    clock = StepClock()
    compute = TwinCompute(twin_pool(blocks), on_step=clock.step)
    engine = BatchEngine(compute, TwinTokenizer(), settings=EngineSettings(**settings), observer=observer, clock=clock)
    return engine, clock


def answered(engine: BatchEngine, count: int = 6, prompt: int = 40, tokens: int = 10) -> Outcome:
    for number in range(count):
        engine.add(request(f"r{number}", [number, *range(prompt - 1)], tokens))
    return run(engine)


def preempted(engine: BatchEngine) -> None:
    """A request that is swapped out or recomputed because a more important one came."""
    engine.add(request("low", range(40), 30))
    for _ in range(5):
        engine.step()
    engine.add(request("high", range(50), 5, priority=1))
    run(engine)


class TestProfiler:
    def test_latencies_are_those_that_the_engine_reports(self) -> None:
        profiler = Profiler()
        engine, clock = observed(profiler)
        usages = [finished.usage for finished in answered(engine).finished.values()]
        for name, values in (
            ("ttft", [usage.ttft_s for usage in usages]),
            ("tpot", [usage.tpot_s for usage in usages]),
            ("total", [usage.total_s for usage in usages]),
            ("queued", [usage.queued_s for usage in usages]),
        ):
            histogram = profiler.latency[name]
            assert histogram.count == len(values), name
            assert histogram.greatest == pytest.approx(max(values)), name
            assert histogram.mean == pytest.approx(sum(values) / len(values)), name
        assert profiler.latency["inter_token"].count == 6 * 9
        assert profiler.seconds == pytest.approx(clock())

    def test_throughput_is_tokens_over_the_clock(self) -> None:
        profiler = Profiler()
        engine, clock = observed(profiler)
        answered(engine)
        report: Any = profiler.as_json()
        assert report["throughput"]["generated_tokens_per_s"] == pytest.approx(60 / clock())
        assert report["tokens"]["generated"] == 60
        assert report["answers"] == {"length": 6}

    def test_every_prompt_token_has_one_source(self) -> None:
        profiler = Profiler()
        engine, _ = observed(profiler)
        for number in range(4):
            engine.add(request(f"r{number}", range(64), 4))
            run(engine)
        assert sum(profiler.sources.values()) == 4 * 64
        assert profiler.sources["local"] >= 3 * 32
        assert profiler.sources["daemon"] == 0

    def test_the_pools_use_is_a_share_of_it(self) -> None:
        profiler = Profiler()
        engine, _ = observed(profiler, blocks=64)
        answered(engine)
        kv: Any = profiler.as_json()["kv"]
        assert kv["blocks"] == 64
        assert 0 < kv["mean_used"] <= kv["peak_used"] <= 1

    def test_nothing_is_kept_of_what_has_ended(self) -> None:
        profiler = Profiler()
        engine, _ = observed(profiler)
        answered(engine)
        engine.add(request("gone", range(20)))
        engine.cancel("gone")
        engine.step()
        assert not profiler._last_token and not profiler._queued
        assert profiler.reasons["cancelled"] == 1

    def test_preemptions_are_counted(self) -> None:
        profiler = Profiler()
        engine, _ = observed(profiler, policy="priority", max_running=1)
        preempted(engine)
        assert profiler.events["preempted_swap"] + profiler.events["preempted_recompute"] == 1


class TestTrace:
    def test_it_is_a_chrome_trace(self, tmp_path: Path) -> None:
        events = traced(tmp_path / "trace.json", answered)
        for event in events:
            assert set(event) <= {"name", "ph", "ts", "dur", "pid", "tid", "args", "s"}
            assert event["ph"] in {"M", "X", "i", "C"}
            assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
            if event["ph"] != "M":
                assert event["ts"] >= 0
            if event["ph"] == "X":
                assert event["dur"] >= 0

    def test_each_sequence_and_worker_has_a_track_with_a_name(self, tmp_path: Path) -> None:
        events = traced(tmp_path / "trace.json", answered)
        groups = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
        tracks = defaultdict(set)
        for event in events:
            if event["name"] == "thread_name":
                tracks[groups[event["pid"]]].add(event["args"]["name"])
        assert tracks["workers"] == {"scheduler", "compute"}
        assert tracks["sequences"] == {f"sequence {number}" for number in range(1, 7)}
        named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
        assert {(event["pid"], event["tid"]) for event in events if event["ph"] in "Xi"} <= named

    def test_nothing_on_a_track_overlaps(self, tmp_path: Path) -> None:
        def load(engine: BatchEngine) -> None:
            answered(engine, count=12)
            preempted(engine)

        events = traced(tmp_path / "trace.json", load, policy="priority", max_running=3)
        tracks = defaultdict(list)
        for event in events:
            if event["ph"] == "X":
                tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        for spans in tracks.values():
            spans.sort()
            for (_, end), (begin, _) in pairwise(spans):
                assert begin >= end - 0.002  # the file gives microseconds with three digits

    def test_a_preemption_is_seen(self, tmp_path: Path) -> None:
        names = [event["name"] for event in traced(tmp_path / "t.json", preempted, policy="priority", max_running=1)]
        assert any(name.startswith("preempted: ") for name in names)
        assert "swapped out" in names or "dropped" in names

    def test_tracks_are_used_again(self, tmp_path: Path) -> None:
        def load(engine: BatchEngine) -> None:
            for number in range(5):
                engine.add(request(f"r{number}", range(20)))
                run(engine)

        events = traced(tmp_path / "trace.json", load)
        names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
        assert [name for name in names if name.startswith("sequence")] == ["sequence 1"]

    def test_daemon_hits_and_swaps_have_lanes(self, tmp_path: Path) -> None:
        observer = TracingObserver(tmp_path / "trace.json")
        observer.queued("r", 1.0)
        observer.admitted("r", 0, 1.5)
        observer.restored("r", 0, "daemon", 512, 1.6)
        observer.stored("r", 0, 64, True, 1.7, 1.8)
        observer.preempted("r", 0, "swap", 2.0)
        observer.swapped_out("r", 0, 1 << 20, 3, 2.0, 2.1)
        observer.swapped_in("r", 0, 1 << 20, 1, 3.0, 3.1)
        observer.admitted("r", 0, 3.1)
        observer.finished("r", 0, "length", Usage(), 4.0)
        observer.close()
        events = read(tmp_path / "trace.json")
        lanes = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
        assert {"restore (daemon)", "store", "swap out", "swap in"} <= lanes
        (out,) = (event for event in events if event["ph"] == "X" and event["name"] == "swapped out")
        assert (out["ts"], out["dur"]) == (1e6, 1.1e6)

    def test_a_restoration_draws_both_pointers(self, tmp_path: Path) -> None:
        observer = TracingObserver(tmp_path / "trace.json")
        observer.queued("r", 1.0)
        work = (Work("compute", 0, 64, 2.0, 2.5), Work("load", 192, 64, 2.0, 2.25), Work("load", 128, 64, 2.25, 2.5))
        names = {field.name: 0 for field in fields(RestorationRecord)}
        record = RestorationRecord(**{**names, "request_id": "r", "plan": "tokens", "work": work})  # type: ignore[arg-type]
        observer.restoration(record)
        observer.close()
        spans = [event for event in read(tmp_path / "trace.json") if event["ph"] == "X"]
        assert [(span["name"], span["args"]["position"]) for span in spans] == [
            ("compute 64", 0),
            ("load 64", 192),
            ("load 64", 128),
        ]
        assert spans[0]["tid"] != spans[1]["tid"] == spans[2]["tid"]

    def test_each_stage_of_a_restoration_has_pointers_of_its_own(self, tmp_path: Path) -> None:
        observer = TracingObserver(tmp_path / "trace.json")
        observer.queued("r", 1.0)
        work = (Work("compute", 0, 64, 2.0, 2.5), Work("states", 0, 64, 1.5, 2.0), Work("load", 64, 64, 2.0, 2.5))
        names = {field.name: 0 for field in fields(RestorationRecord)}
        for stage in range(2):
            record = RestorationRecord(**{**names, "request_id": "r", "work": work, "stage": stage})  # type: ignore[arg-type]
            observer.restoration(record)
        observer.close()
        tracks = {event["args"]["name"] for event in read(tmp_path / "trace.json") if event["name"] == "thread_name"}
        kinds = ("compute", "load", "states")
        assert {f"sequence 1, stage {stage}: restore, {kind}" for stage in range(2) for kind in kinds} <= tracks

    def test_a_path_that_cannot_be_written_is_reported_in_one_line(self, tmp_path: Path) -> None:
        with pytest.raises(OperationError, match="cannot write the trace"):
            TracingObserver(tmp_path / "nowhere" / "trace.json")


def test_each_of_several_observers_is_notified_of_everything() -> None:
    one, other = Profiler(), Profiler()
    engine, _ = observed(FanOut(one, other))
    answered(engine)
    assert one.as_json() == other.as_json()
    assert one.reasons["length"] == 6


def test_a_fan_out_passes_on_every_notification() -> None:
    notifications = [name for name in vars(Observer) if not name.startswith("_")]
    assert [name for name in notifications if name not in vars(FanOut)] == []


def traced(path: Path, load: Any, **settings: Any) -> list[dict[str, Any]]:
    observer = TracingObserver(path)
    engine, _ = observed(observer, **settings)
    load(engine)
    observer.close()
    return read(path)


def read(path: Path) -> list[dict[str, Any]]:
    trace = json.loads(path.read_text())
    assert trace["displayTimeUnit"] == "ms"
    events: list[dict[str, Any]] = trace["traceEvents"]
    return events
