"""`kvstored simulate --mode timing`: rows, tables, the page, and one line for a mistake."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvstored.cli import main
from tests.reference.traces import sessions, write_mooncake

REQUESTS = sessions(5, 40)
COMMON = ("--format", "mooncake", "--mode", "timing", "--model", "llama-3.2-1b")
TIERS = ("--tiers", "engine=512MiB,dram=512MiB,nvme=4GiB")
FIELDS = {
    "mode", "plan", "policy", "admission", "capacity_blocks", "capacity_fraction", "distinct_blocks", "requests",
    "block_accesses", "hit_ratio", "compute_saved_ratio", "seconds", "ttft_s", "exposed_s", "queue_s", "bytes_by_lane",
    "hits_by_tier", "utilisation",
}  # fmt: skip


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    write_mooncake(tmp_path / "chat.jsonl.gz", REQUESTS, every_ms=20)
    return tmp_path / "chat.jsonl.gz"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["simulate", *map(str, arguments)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_rows_compare_orchestrated_with_the_baselines(chat: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report: dict[str, Any] = json.loads(run(capsys, chat, *COMMON, *TIERS, "--json").splitlines()[-1])
    assert (report["mode"], report["profile"], report["devices"]) == ("timing", "h100", 1)
    assert report["tiers"] == {"dram": 512 << 20, "nvme": 4 << 30} and report["engine_bytes"] == 512 << 20
    rows = report["rows"]
    assert [row["plan"] for row in rows] == ["engine-alone", "baseline", "baseline-eager", "orchestrated"]
    for row in rows:
        assert set(row) >= FIELDS
        assert row["requests"] == len(REQUESTS) and row["block_accesses"] == sum(map(len, REQUESTS))
        assert row["ttft_s"]["p50"] <= row["ttft_s"]["p90"] <= row["ttft_s"]["p99"]
    assert rows[0]["hits_by_tier"]["dram"] == 0 < rows[-1]["hits_by_tier"]["dram"] + rows[-1]["hits_by_tier"]["nvme"]
    assert set(rows[-1]["bytes_by_lane"]) == {"hbm→sram", "dram→engine", "engine→dram", "nvme→dram", "dram→nvme"}
    assert set(rows[-1]["speedup"]) == {"mean", "p50", "p90", "p99"}
    lines = report["timelines"]
    assert [line["plan"] for line in lines] == [row["plan"] for row in rows]
    assert {sample["tier"] for sample in lines[-1]["residency"]} == {"engine", "dram", "nvme"}
    assert set(lines[-1]["residency"][0]) == {"at_s", "tier", "hot", "warm", "cold"}


def test_tables_csv_and_page(chat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    shown = run(capsys, chat, *COMMON, *TIERS, "--without", "all", "--plot", page)
    for heading in (r"^PLAN +POLICY +TTFT P50", r"^PLAN +POLICY +LANE +BYTES", r"^PLAN +POLICY +TIER +BLOCKS, MEAN"):
        assert re.search(heading, shown, re.MULTILINE)
    for part in ("prefetch", "overlap", "weigh", "write-behind"):
        assert f"without {part} " in shown
    text = page.read_text()
    assert text.startswith("<!doctype html>") and text.count("<figure>") == 4 + 1 + 7 * 4
    assert "<script" not in text and "http" not in text and "nan" not in text
    rows = list(csv.DictReader(io.StringIO(run(capsys, chat, *COMMON, *TIERS, "--policy", "lru", "--csv"))))
    assert float(rows[-1]["ttft_s.p99"]) > 0 and rows[-1]["plan"] == "orchestrated"


def test_rows_of_one_plan_can_be_distinguished(chat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    crossed = ("--policy", "lru,fifo", "--admission", "always,second-touch", "--plot", page)
    shown = run(capsys, chat, *COMMON, *TIERS, *crossed)
    for name in ("lru", "lru, second-touch", "fifo", "fifo, second-touch"):
        lines = [line for line in shown.splitlines() if re.match(f"orchestrated +{name}  ", line)]
        assert len(lines) == 1 + 5 + 3, "its latency, its lanes, its tiers"
    assert "<h2>orchestrated, fifo, second-touch, over time</h2>" in page.read_text()


def test_profiles_and_tiers_can_be_chosen(chat: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def last(*more: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(run(capsys, chat, *COMMON, "--json", "--policy", "lru", *more))["rows"][-1]
        return found

    slow = last("--profile", "cpu-only", "--tiers", "engine=512MiB,dram=1GiB,remote")
    assert set(slow["hits_by_tier"]) == {"engine", "dram", "remote"} and "dram→sram" in slow["bytes_by_lane"]
    fast = last("--profile", "h200", "--tiers", "engine=512MiB,cxl", "--devices", "2")
    assert set(fast["hits_by_tier"]) == {"engine", "cxl"} and fast["devices"] == 2
    assert fast["ttft_s"]["p50"] < slow["ttft_s"]["p50"]
    assert last("--speed", "0.01")["queue_s"]["mean"] <= last()["queue_s"]["mean"]


def test_a_tier_in_the_devices_memory_can_be_chosen(chat: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiers = ("--tiers", "gpu=512MiB,engine=512MiB,dram=512MiB,nvme=4GiB", "--without", "gpu", "--policy", "lru")
    chosen = ("--gpu", "policy=fifo,admission=always,rate=1GB/s,to-gpu=1GB/s,from-gpu=2GB/s,latency=1ms")
    rows: list[dict[str, Any]] = json.loads(run(capsys, chat, *COMMON, *tiers, *chosen, "--json"))["rows"]
    assert [row["plan"] for row in rows][2:] == ["baseline-eager", "orchestrated", "without gpu"]
    assert all(list(row["hits_by_tier"]) == ["engine", "gpu", "dram", "nvme"] for row in rows)
    ours, without = rows[-2:]
    assert ours["hits_by_tier"]["gpu"] > 0 == without["hits_by_tier"]["gpu"]
    assert {"gpu→engine", "dram→gpu", "gpu→dram", "nvme→gpu"} <= set(ours["bytes_by_lane"]) and "gpu" in ours[
        "utilisation"
    ]
    by_dram = ("--gpu", f"{chosen[1]},from_nvme=off")
    other = json.loads(run(capsys, chat, *COMMON, *tiers, *by_dram, "--json"))["rows"][-2]
    assert "nvme→gpu" not in other["bytes_by_lane"]
    shown = run(capsys, chat, *COMMON, *tiers, *chosen)
    assert "GPU HITS" in shown and re.search(r"^orchestrated +lru +dram→gpu +[1-9].* [MG]iB", shown, re.MULTILINE)
    assert re.search(r"^orchestrated +lru +gpu +[1-9]", shown, re.MULTILINE), "what it held"


def test_an_engine_that_is_too_slow_is_reported(chat: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = run(capsys, chat, *COMMON, "--profile", "cpu-only", "--speed", "1000", "--policy", "lru")
    assert "note: the engine computes nearly all of the time" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mode", "time"], "'time' is unknown; known: replay, timing"),
        (["--profile", "h10"], "'h10' is unknown.*did you mean h100"),
        (["--profile", "/nowhere.toml"], "cannot read /nowhere.toml: No such file"),
        (["--devices", "0"], "--devices 0: 1 to"),
        (["--model", "llama-3.1-70b"], "do not fit h100 .*--devices 2 or more"),
        (["--speed", "0"], "--speed 0: how many times"),
        (["--speed", "nan"], "--speed nan"),
        (["--tiers", "nvme"], "the first is dram or cxl"),
        (["--tiers", "dram,nvme,cxl"], "fastest first"),
        (["--tiers", "cxl,dram"], "fastest first"),
        (["--tiers", "dram=much"], "'much' is not a size"),
        (["--tiers", "tape"], "'tape': h100 has"),
        (["--tiers", "dram=1MiB"], "holds no block of"),
        (["--tiers", "engine=1MiB,dram"], "the engine's memory has 1.0 MiB for blocks"),
        (["--tiers", "engine,dram"], "engine=SIZE once"),
        (["--tiers", "gpu=1GiB,dram", "--gpu", "from_nvme=direct"], "'direct' is unknown; known: bounce, off"),
        (["--tiers", "gpu,dram"], "gpu=SIZE too"),
        (["--tiers", "dram,nvme,gpu=1GiB"], "gpu is before dram or right after it"),
        (["--tiers", "gpu=100GiB,dram"], "gpu=100 GiB: the weights leave .* for both"),
        (["--tiers", "gpu=40GiB,engine=40GiB,dram"], "gpu=40.* GiB, engine=40.* GiB: the weights leave"),
        (["--profile", "cpu-only", "--tiers", "gpu=1GiB,dram"], "'gpu': cpu-only has dram"),
        (["--gpu", "rate=1GB/s"], "--gpu is of tier gpu: add"),
        (["--tiers", "gpu=1GiB,dram", "--gpu", "policy=best"], "--gpu 'policy=best': policy: 'best' is unknown"),
        (["--tiers", "gpu=1GiB,dram", "--gpu", "rate=fast"], "--gpu 'rate=fast': 'fast' is not a size"),
        (["--tiers", "gpu=1GiB,dram", "--gpu", "latency=1"], "--gpu 'latency=1': a time has a unit"),
        (["--tiers", "gpu=1GiB,dram", "--gpu", "to-gpu=0"], "--gpu to-gpu=0: a bandwidth is above 0"),
        (["--tiers", "gpu=1GiB,dram", "--gpu", "copies=4"], "--gpu 'copies=4': that is not known here"),
        (["--without", "gpu"], "parts of orchestration are prefetch, overlap, weigh, write-behind$"),
        (["--without", "magic"], "parts of orchestration are prefetch"),
        (["--policy", "clairvoyant"], "'clairvoyant' is unknown"),
        (["--capacity", "0.1"], "--capacity has no meaning in mode timing"),
        (["--reuse-distance"], "--reuse-distance has no meaning in mode timing"),
        (["--cost", "x.toml"], "--cost has no meaning in mode timing"),
        (["--mode", "replay", "--profile", "h100"], "--profile has no meaning in mode replay"),
    ],
)
def test_a_mistake_gets_one_line(
    chat: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["simulate", str(chat), *COMMON, *arguments]) == 2
    captured = capsys.readouterr().err
    assert captured.count("\n") == 1
    assert re.search(message, captured)


def test_requests_that_all_are_too_long_are_a_mistake(chat: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(chat), *COMMON, "--tiers", "engine=17MiB,dram"]) == 2
    assert re.search("no request fits the engine's memory of 1 blocks", capsys.readouterr().err)


def test_a_plot_that_cannot_be_written_is_a_failure(chat: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(chat), *COMMON, "--plot", "/nowhere/page.html"]) == 1
    assert "cannot write /nowhere/page.html" in capsys.readouterr().err


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    shown = capsys.readouterr().out
    assert "--mode timing --profile h100" in shown and "examples:" in shown


def test_plans_that_do_the_same_are_one_line_with_all_their_names(
    chat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    run(capsys, chat, *COMMON, "--tiers", "engine=64GiB,dram=64GiB,nvme=64GiB", "--plot", page)
    first_token = page.read_text().partition("</figure>")[0]
    assert "engine-alone = baseline, lru = baseline-eager, lru" in first_token
    assert first_token.partition("legend")[0].count("<path") < 4
    assert ".charts>figure:last-child:nth-child(odd){grid-column:1/-1}" in first_token, "no half of a page is empty"
