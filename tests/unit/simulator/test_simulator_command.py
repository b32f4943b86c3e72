"""`kvstored simulate`: rows, formats, parts, and one line for a mistake."""

from __future__ import annotations

import csv
import errno
import gzip
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore_simulator.policies import POLICIES
from kvstored.cli import main
from tests.reference import forked
from tests.reference.traces import plain_hits, sessions, write_claude_code, write_mooncake

REQUESTS = sessions(5, 120)
FIELDS = {
    "policy", "admission", "capacity_blocks", "capacity_fraction", "distinct_blocks", "requests", "block_accesses",
    "hit_ratio", "compute_saved_ratio", "seconds",
}  # fmt: skip


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    write_mooncake(tmp_path / "chat.jsonl.gz", REQUESTS)
    return tmp_path / "chat.jsonl.gz"


def report(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["simulate", *map(str, arguments), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_rows_begin_with_the_bounds_and_name_what_was_asked_for(chat: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policies = "lru,lfu-ttl,best,clairvoyant"
    rows = report(capsys, chat, "--format", "mooncake", "--capacity", "0.05,0.2", "--policy", policies)["rows"]
    assert [row["policy"] for row in rows] == [
        "unbounded", *["clairvoyant"] * 2, *["lru"] * 2, *["lfu-ttl"] * 2, *["best"] * 2,
    ]  # fmt: skip
    distinct = len({block for request in REQUESTS for block in request})
    for row in rows:
        assert set(row) >= FIELDS
        assert row["distinct_blocks"] == distinct
        assert row["requests"] == len(REQUESTS)
        assert row["block_accesses"] == sum(map(len, REQUESTS))
        assert 0 <= row["hit_ratio"] <= rows[0]["hit_ratio"]
        assert row["seconds"] > 0
    small = rows[3]
    assert (small["capacity_fraction"], small["capacity_blocks"]) == (
        pytest.approx(round(0.05 * distinct) / distinct, abs=1e-5),
        round(0.05 * distinct),
    )
    assert small["hits"] == sum(plain_hits("lru", REQUESTS, small["capacity_blocks"]))
    assert rows[-1]["resolved_policy"] in POLICIES


def test_what_ships_is_what_best_means() -> None:
    from kvstored.config import load_config
    from kvstored.store.policies import resolve

    assert resolve("best") == load_config(None).host.policy
    assert resolve("lru") == "lru"


def test_compute_saved_weighs_deep_blocks_more(chat: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = report(capsys, chat, "--format", "mooncake", "--policy", "lru", "--capacity", "0.1")["rows"]
    by_hand = saved = 0.0
    linear, attention = 2 * 8.03e9, 2 * 32 * 32 * 128
    hits = plain_hits("lru", REQUESTS, rows[-1]["capacity_blocks"])
    for request, hit in zip(REQUESTS, hits, strict=True):
        prompt = len(request) * 512 - 7
        kept = min(hit * 512, prompt)
        by_hand += linear * prompt + attention * prompt**2
        saved += linear * kept + attention * kept**2
    assert rows[-1]["compute_saved_ratio"] == pytest.approx(saved / by_hand, abs=1e-6)


def test_a_half_starts_cold_and_a_warm_one_does_not(chat: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = (chat, "--format", "mooncake", "--policy", "lru", "--capacity", "40")
    whole = report(capsys, *common)["rows"][-1]
    cold = report(capsys, *common, "--part", "second-half")["rows"][-1]
    warm = report(capsys, *common, "--part", "0.5:1", "--warm")["rows"][-1]
    first = report(capsys, *common, "--part", "first-half")["rows"][-1]
    assert first["requests"] + cold["requests"] == whole["requests"]
    assert warm["requests"] == cold["requests"]
    assert first["hits"] + warm["hits"] == whole["hits"]
    assert cold["hits"] == sum(plain_hits("lru", REQUESTS[first["requests"] :], 40)) < warm["hits"]


def test_policies_are_crossed_with_admissions(chat: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = report(
        capsys, chat, "--format", "mooncake", "--policy", "lru,fifo", "--admission", "always,second-touch",
        "--capacity", "0.1",
    )["rows"]  # fmt: skip
    pairs = [(row["policy"], row["admission"]) for row in rows[2:]]
    assert pairs == [(p, a) for p in ("lru", "fifo") for a in ("always", "second-touch")]
    refused = {row["admission"]: row["evictions"]["refused"] for row in rows[2:]}
    assert refused["always"] == 0 < refused["second-touch"]


def test_a_time_to_live_expires(chat: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (chat, "--format", "mooncake", "--policy", "lfu-ttl", "--capacity", "1")
    lasting = report(capsys, *arguments)["rows"][-1]
    brief = report(capsys, *arguments, "--ttl-s", "10")["rows"][-1]
    assert lasting["evictions"]["expired"] == 0 < brief["evictions"]["expired"]
    assert brief["hits"] < lasting["hits"]


def test_a_worth_to_keep_frees_room(chat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text("storage_usd_per_gib_hour = 0.01\ncompute_usd_per_hour = 3.0\ncompute_flops_per_s = 4e14\n")
    arguments = (chat, "--format", "mooncake", "--policy", "lru,best", "--capacity", "1", "--cost", prices)
    everything = report(capsys, *arguments)["rows"][-2:]
    lru, best = report(capsys, *arguments, "--keep-worth", "60")["rows"][-2:]
    assert (lru["hits"], lru["held_blocks_mean"]) == (everything[0]["hits"], everything[0]["held_blocks_mean"])
    assert everything[1]["evictions"]["expired"] == 0 < best["evictions"]["expired"]
    assert 0 < best["held_blocks_mean"] < everything[1]["held_blocks_mean"] <= best["capacity_blocks"]
    assert best["cost"]["held_usd"] < best["cost"]["storage_usd"] == everything[1]["cost"]["storage_usd"]
    assert main(["simulate", *map(str, arguments), "--keep-worth", "60"]) == 0
    heading = capsys.readouterr().out.splitlines()[0]
    assert heading.split()[-6:] == ["EXPIRED", "HELD", "NET", "NET", "OF", "HELD"]


def test_agents_sessions_are_drawn_by_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_claude_code(tmp_path / "a.gz", 12)
    common = (
        tmp_path / "a.gz",
        "--format",
        "claude-code",
        "--group-tokens",
        "128",
        "--policy",
        "lru",
        "--capacity",
        "0.2",
    )

    def facts(seed: int) -> tuple[int, int]:
        row = report(capsys, *common, "--seed", seed)["rows"][-1]
        return row["distinct_blocks"], row["hits"]

    assert facts(1) == facts(1)
    assert len({facts(seed) for seed in range(6)}) > 1
    assert len({facts(seed)[0] for seed in range(6)}) == 1, "the blocks are the same, only their order is drawn"


def test_table_csv_reuse_and_page(chat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    arguments = ["simulate", str(chat), "--format", "mooncake", "--reuse-distance"]
    assert main([*arguments, "--plot", str(page)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^POLICY +ADMISSION +CAPACITY", shown)
    assert "MISS RATIO OF LRU" in shown
    text = page.read_text()
    assert text.startswith("<!doctype html>") and text.count("<figure>") == 3
    assert "<script" not in text and "http" not in text
    headings = shown.splitlines()[0].lower().split("  ")
    assert [f">{heading.strip()}</th>" in text for heading in headings if heading.strip()] == [True] * 11
    assert main([*arguments, "--csv"]) == 0
    captured = capsys.readouterr()
    assert "reuse distances are no rows" in captured.err
    rows = list(csv.DictReader(io.StringIO(captured.out)))
    assert len(rows) == 10 and float(rows[0]["hit_ratio"]) > 0 and rows[0]["evictions.evicted"] == "0"


def test_capacities_of_as_many_blocks_are_one(chat: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = report(capsys, chat, "--format", "mooncake", "--capacity", "0.1")["rows"]
    blocks = rows[-1]["capacity_blocks"]
    again = report(capsys, chat, "--format", "mooncake", "--capacity", f"0.1,{blocks}")["rows"]
    assert [row["capacity_blocks"] for row in again] == [row["capacity_blocks"] for row in rows]


def test_an_option_of_another_format_is_named(chat: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--sessions", "5", "--window-s", "60", "--group-tokens", "64", "--as-recorded"]
    assert main(["simulate", str(chat), "--format", "mooncake", "--capacity", "0.1", *options]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert sorted(lines) == [
        f"{option} changes nothing in format mooncake"
        for option in ("--as-recorded", "--group-tokens", "--sessions", "--window-s")
    ]


def test_a_page_takes_no_place_of_what_is_read(chat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = tmp_path / "mine.toml"
    profile.write_text("mine")
    arguments = ["simulate", str(chat), "--format", "mooncake", "--mode", "timing", "--profile", str(profile)]
    assert main([*arguments, "--plot", str(profile)]) == 2
    assert "would overwrite the input" in capsys.readouterr().err
    assert profile.read_text() == "mine"


def test_of_a_recording_without_its_end_it_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"op": "get", "n": 0, "c": 1, "b": 64, "f": 0}
    rows = [{"format": "kvstored", "version": 2}, *({"t": at, "k": f"{at:016x}", **facts} for at in range(5))]
    path = tmp_path / "cut.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows)[:-9])
    assert main(["simulate", str(path), "--format", "kvstored", "--capacity", "1", "--json"]) == 0
    captured = capsys.readouterr()
    assert "cut.jsonl is cut off after line 5: later requests are not counted" in captured.err
    assert json.loads(captured.out.splitlines()[-1])["rows"][-1]["requests"] == 4


def test_prices_say_what_is_won(chat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text("storage_usd_per_gib_hour = 0.01\ncompute_usd_per_hour = 3.0\ncompute_flops_per_s = 4e14\n")
    row = report(capsys, chat, "--format", "mooncake", "--capacity", "0.1", "--cost", prices)["rows"][-1]
    gib = row["capacity_blocks"] * 512 * 131072 / 2**30
    assert row["cost"]["storage_usd"] == pytest.approx(0.01 * gib * (len(REQUESTS) - 1) / 3600, abs=1e-3)
    assert row["cost"]["net_usd"] == pytest.approx(
        row["cost"]["compute_saved_usd"] - row["cost"]["storage_usd"], abs=1e-3
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "moonkake"], "'moonkake' is unknown.*did you mean mooncake"),
        (["--format", "mooncake", "--policy", "lruu"], "'lruu' is unknown.*did you mean lru"),
        (["--format", "mooncake", "--admission", "never"], "'never' is unknown"),
        (["--format", "mooncake", "--model", "gpt"], "'gpt' is unknown"),
        (["--format", "mooncake", "--capacity", "0"], "numbers above 0"),
        (["--format", "mooncake", "--capacity", "a,b"], "numbers above 0"),
        (["--format", "mooncake", "--capacity", "0.1,1.5"], "--capacity 1.5: above 1 it is blocks"),
        (["--format", "mooncake", "--capacity", "nan"], "numbers above 0"),
        (["--format", "mooncake", "--part", "0.5:0.5000001"], "no request falls into it"),
        (["--format", "mooncake", "--part", "0.5:0.5000001", "--warm"], "no request falls into it"),
        (["--format", "mooncake", "--part", "third"], "first-half, second-half"),
        (["--format", "mooncake", "--ttl-s", "-1"], "cannot be negative"),
        (["--format", "mooncake", "--ttl-s", "inf"], "nor above"),
        (["--format", "mooncake", "--keep-worth", "-1"], "0 \\(never\\) or more"),
        (["--format", "mooncake", "--keep-worth", "nan"], "0 \\(never\\) or more"),
        (["--format", "mooncake", "--keep-worth", "4", "--policy", "lru,lfu-ttl"], "means nothing to lru, lfu-ttl"),
        (["--format", "mooncake", "--window-s", "nan"], "cannot be negative"),
        (["--format", "mooncake", "--ghosts", "0"], "--ghosts must be at least 1"),
        (["--format", "mooncake", "--cost", "/nowhere.toml"], "cannot read /nowhere.toml: No such file"),
        (["--format", "mooncake,kvstored"], "--format mooncake,kvstored: one of mooncake"),
        (["--format", "mooncake", "--mode", "replay,timing"], "--mode replay,timing: one of replay, timing"),
        (["--format", "mooncake", "--model", "llama-3.1-8b,llama-3.2-1b"], "--model .*: one of "),
        (["--format", "mooncake", "--capacity", "1e300"], "at most 1e.12 blocks"),
        (["--format", "mooncake", "--capacity", ""], "numbers above 0"),
        (["--format", "mooncake", "--policy", ""], "'' is unknown"),
        (["--format", "mooncake", "--seed", "-1"], "--seed -1: 0 or more"),
        (["--format", "mooncake", "--warm"], "name the part too"),
        (["--format", "claude-code"], "not a Claude Code session"),
        (["--format", "claude-code", "--group-tokens", "-64"], "multiple of 64"),
        (["--format", "claude-code", "--group-tokens", "100"], "multiple of 64"),
    ],
)
def test_a_mistake_gets_one_line(
    chat: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["simulate", str(chat), *arguments]) == 2
    captured = capsys.readouterr().err
    assert captured.count("\n") == 1
    assert re.search(message, captured)


def test_blocks_that_the_index_cannot_hold_are_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_claude_code(tmp_path / "a.gz", 1, tokens=64 * 10_000)
    common = ["simulate", str(tmp_path / "a.gz"), "--format", "claude-code", "--group-tokens", "640000"]
    for mode in ("replay", "timing"):
        assert main([*common, "--mode", mode]) == 2
        assert "a block of this trace and model is" in capsys.readouterr().err


@pytest.mark.parametrize("price", ["nan", "inf", "-1"])
def test_a_price_is_a_number_that_json_has(
    chat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], price: str
) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text(f"storage_usd_per_gib_hour = {price}\ncompute_usd_per_hour = 3.0\ncompute_flops_per_s = 4e14\n")
    assert main(["simulate", str(chat), "--format", "mooncake", "--cost", str(prices)]) == 2
    assert "storage_usd_per_gib_hour must be a number from 0 to" in capsys.readouterr().err


def test_a_price_table_with_other_keys_is_refused(
    chat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text("storage = 1\n")
    assert main(["simulate", str(chat), "--format", "mooncake", "--cost", str(prices)]) == 2
    assert "a price table has the keys" in capsys.readouterr().err


def test_a_plot_that_cannot_be_written_is_a_failure(chat: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(chat), "--format", "mooncake", "--plot", "/nowhere/page.html"]) == 1
    captured = capsys.readouterr()
    assert "cannot write /nowhere/page.html: No such file" in captured.err and captured.out == "", "before the replay"
    assert main(["simulate", str(chat), "--format", "mooncake", "--plot", str(chat.parent)]) == 1
    assert "Is a directory" in capsys.readouterr().err


def test_a_plot_does_not_overwrite_the_trace(chat: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = chat.read_bytes()
    assert main(["simulate", str(chat), "--format", "mooncake", "--plot", str(chat)]) == 2
    assert "would overwrite the input" in capsys.readouterr().err
    assert chat.read_bytes() == before


def test_no_two_lines_of_a_chart_look_alike_and_what_ships_stands_out(chat: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    arguments = ["--format", "mooncake", "--policy", "all", "--admission", "always,second-touch", "--capacity", "9,30"]
    assert main(["simulate", str(chat), *arguments, "--plot", str(page)]) == 0
    figure = page.read_text().split("<figure>")[1]
    looks = re.findall(r'<path class="([^"]*)" [^>]*><title>([^<]*)', figure)
    assert len(looks) == 2 + 2 * len(POLICIES) == len({look for look, _ in looks})
    assert [name for look, name in looks if "strong" in look] == ["chain-hazard"]
    swatches = re.findall(r'<path class="([^"]*)"[^>]*/></svg>([^<]*)<', figure.split("legend")[1])
    assert swatches == looks, "the legend shows each line as it is drawn"


def test_a_trace_may_have_any_name_and_the_output_any_encoding(
    chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = tmp_path / os.fsdecode(b"chat-\xff.jsonl.gz")
    odd.write_bytes(chat.read_bytes())
    arguments = ["simulate", str(odd), "--format", "mooncake", "--policy", "lru"]
    plain = dict(os.environ, PYTHONIOENCODING="ascii:strict")
    command = [sys.executable, "-m", "kvstored", *arguments, "--json"]
    made = subprocess.run(command, env=plain, capture_output=True, timeout=60)
    assert (made.returncode, made.stderr) == (0, b"")
    assert "engine→host" in json.loads(made.stdout)["rows"][0]["bytes_by_lane"]
    for shape in (["--csv"], ["--plot", str(tmp_path / "page.html")]):
        monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict"))
        assert main([*arguments, *shape]) == 0


def test_standard_streams_may_be_closed(chat: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    command = f'"{sys.executable}" -m kvstored simulate "{chat}" --format mooncake --policy lru --plot "{page}"'
    made = subprocess.run(f"{command} >&- 2>&-", shell=True, timeout=60)
    assert made.returncode == 0
    assert page.read_text().endswith("</html>\n")


def test_a_full_disk_behind_standard_output_is_a_failure(
    chat: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("sys.stdout", Full())
    assert main(["simulate", str(chat), "--format", "mooncake", "--policy", "lru"]) == 1
    assert capsys.readouterr().err == "kvstored: cannot write the result: No space left on device\n"


@pytest.mark.parametrize("packed", [True, False])
def test_a_trace_comes_through_a_pipe(chat: Path, packed: bool, capsys: pytest.CaptureFixture[str]) -> None:
    plain = chat.with_suffix("")
    plain.write_bytes(gzip.decompress(chat.read_bytes()))
    arguments = ["simulate", "-", "--format", "mooncake", "--policy", "lru", "--capacity", "0.1,0.1", "--json"]
    with subprocess.Popen(["cat", chat if packed else plain], stdout=subprocess.PIPE) as pipe:
        piped = forked.run([sys.executable, "-m", "kvstored", *arguments], stdin=pipe.stdout)
    assert (piped.returncode, piped.stderr) == (0, "")
    rows = json.loads(piped.stdout)["rows"]
    expected = report(capsys, chat, *arguments[2:-1])["rows"]
    assert [row["policy"] for row in rows] == ["unbounded", "clairvoyant", "lru"], "a capacity named twice is one row"
    assert [row["hits"] for row in rows] == [row["hits"] for row in expected]
