"""`kvstored simulate --format pages`: page traces, the KVFlow table, and one line for a mistake."""

from __future__ import annotations

import csv
import gzip
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore_simulator.decode import DecodeStudy, Scratch, plans_of
from kvstore_simulator.hit_value import models
from kvstore_simulator.machine import load_machine
from kvstore_simulator.page_trace import PageStep, PageTrace, read_pages
from kvstore_simulator.trace import TraceError
from kvstored.cli import main

MODEL = models()["smollm2-135m"]


def made(steps: int, pages: int, each: int) -> PageTrace:
    """Half of the selected pages remain from token to token, the others move on."""
    sets = [
        tuple(sorted({*range(each // 2), *((each + number * 3 + at) % pages for at in range(each // 2))}))
        for number in range(steps)
    ]  # fmt: skip
    return PageTrace("made", MODEL, 64, [PageStep(pages, [chosen] * MODEL.layers) for chosen in sets], "made up")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    made(5, 60, 20).write(tmp_path / "made.pages.gz")
    return tmp_path / "made.pages.gz"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["simulate", *map(str, arguments), "--format", "pages"]) == 0
    return capsys.readouterr().out


def test_a_page_trace_is_read_as_it_was_written(trace: Path) -> None:
    assert read_pages(trace).steps == made(5, 60, 20).steps


def test_the_shipped_trace_reaches_the_figures_of_the_kvflow_table() -> None:
    trace, machine = read_pages(Path("smollm2-135m")), load_machine("h100")
    assert len(trace.steps) == 64
    slow = [machine.media["hbm"], machine.media["cxl"]]
    rows = list(DecodeStudy(replace(trace, steps=trace.steps[:12]), machine, 16 << 20, slow, ["w-tinylfu"]).rows())
    assert len(rows) == 8
    for row in rows:
        found = row.as_json(next(each for each in rows if (each.slow, each.overlaps) == (row.slow, row.overlaps)))
        if row.policy:
            assert found["read_bytes_ratio"] <= 0.54 and found["slow_bytes_ratio"] <= 0.54
            assert found["scratch_hits"] >= 0.144 and found["exposed_s_ratio"] < 1
        else:
            assert found["scratch_hits"] == 0


def test_a_scratch_with_room_for_all_reads_from_slow_memory_what_is_new(trace: Path) -> None:
    pages = read_pages(trace)
    before: set[int] = set()
    for step, layers in zip(pages.steps, plans_of(pages, Scratch(10_000, pages.page_bytes, "lru")), strict=True):
        assert all(plan.held & set(plan.pages) == before & set(plan.pages) for plan in layers)
        before |= set(step.selected[0])


def test_tables_and_csv(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = run(capsys, trace, "--scratch", "64MiB", "--policy", "lru,w-tinylfu", "--each-token")
    assert shown.startswith("made up: 5 tokens, 60 to 60 pages of 64 tokens in 30 layers; h100, scratch 64.0 MiB")
    assert shown.count("\nhbm ") == shown.count("\ncxl ") == 6 and shown.count("orchestrated lru") == 4 * (1 + 5)
    rows = list(csv.DictReader(io.StringIO(run(capsys, trace, "--csv"))))
    assert len(rows) == 8 and "tokens" not in rows[0]


def test_a_slower_cxl_exposes_more(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def exposed_s(*options: str) -> float:
        rows = json.loads(run(capsys, trace, "--json", *options))["rows"]
        return float(next(row["exposed_s"] for row in rows if row["slow"] == "cxl" and row["policy"]))

    assert exposed_s() < exposed_s("--cxl", "latency=2us") < exposed_s("--cxl", "latency=2us,bandwidth=2GB/s")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--scratch", "1KiB"], "holds no page"),
        (["--scratch", "much"], "--scratch much"),
        (["--cxl", "speed=3"], "--cxl"),
        (["--cxl", "bandwidth=0"], "above 0"),
        (["--policy", "nope"], "--policy"),
        (["--tiers", "dram"], "--tiers has no meaning in --format pages"),
        (["--plot", "page.html"], "--plot has no meaning"),
        (["--ttl-s", "3"], "--ttl-s has no meaning"),
        (["--mode", "timing"], "--mode, --part and --admission have no meaning in --format pages"),
        (["--part", "0:0.5"], "--mode, --part and --admission have no meaning in --format pages"),
    ],
)
def test_a_mistake_is_one_line(trace: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(trace), "--format", "pages", *options]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_options_of_pages_have_no_meaning_elsewhere(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(trace), "--format", "mooncake", "--scratch", "1MiB"]) == 2
    assert "--scratch has no meaning in mode replay" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "line"),
    [
        (0, {"format": "kvstored", "version": 2}),
        (0, {"format": "pages", "version": 9, "model": "smollm2-135m", "page_tokens": 64, "about": ""}),
        (0, {"format": "pages", "version": 1, "model": "unknown", "page_tokens": 64, "about": ""}),
        (0, {"format": "pages", "version": 1, "model": "smollm2-135m", "page_tokens": 0, "about": ""}),
        (0, []),
        (1, {"pages": 60, "toggled": [[1]]}),
        (1, {"pages": 60, "toggled": [[60]] * 30}),
        (1, {"pages": 60, "toggled": [["1"]] * 30}),
        (1, {"pages": 60, "toggled": [[]] * 30}),
        (1, {"pages": "60", "toggled": [[1]] * 30}),
        (2, {"pages": 59, "toggled": [[58]] * 30}),
        (2, 7),
    ],
)
def test_what_is_no_page_trace_is_refused(trace: Path, number: int, line: object) -> None:
    lines = gzip.decompress(trace.read_bytes()).decode().splitlines()
    lines[number] = json.dumps(line)
    trace.write_bytes("\n".join(lines).encode())
    with pytest.raises(TraceError, match="head of a page trace" if number == 0 else f"line {number + 1}"):
        read_pages(trace)


def test_a_trace_without_steps_or_a_file_that_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    PageTrace("none", MODEL, 64, []).write(tmp_path / "none.gz")
    with pytest.raises(TraceError, match="no step"):
        read_pages(tmp_path / "none.gz")
    assert main(["simulate", str(tmp_path / "missing"), "--format", "pages"]) == 2
    assert "cannot read" in capsys.readouterr().err
