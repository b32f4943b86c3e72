"""The policy study: which cases it makes of traces, that its figures are the simulator's, and what it says of them."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvstore_simulator.readers import ReadOptions, read_trace
from kvstore_simulator.replay import Replay, ReplaySettings
from tests.reference.examples import quick_are

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture(autouse=True)
def _as_a_script(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Benchmarks are run as scripts, from their folder; nothing of theirs stays imported or registered."""
    from kvstore_simulator.policies import POLICIES

    before, policies = set(sys.modules), dict(POLICIES)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    POLICIES.clear()
    POLICIES.update(policies)
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("study", "support", "policy_study"):
            del sys.modules[name]


def load(name: str) -> ModuleType:
    return importlib.import_module(name)


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    folder = tmp_path / "traces"
    folder.mkdir()
    load("policy_study").write_standins(folder, requests=400, sessions=5)
    return folder


def study(capsys: pytest.CaptureFixture[str], *arguments: object, status: int | None = None) -> dict[str, Any]:
    code = load("policy_study").main([*map(str, arguments), "--processes", "1", "--json"])
    assert status is None or code == status
    report: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return report


def test_hit_ratios_are_the_simulators(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = study(
        capsys, "--traces", traces, "--sections", "hits", "--parts", "whole", "--policies", "lru,fifo", "--capacity",
        "0.05", "--seeds", "2",
    )  # fmt: skip
    found = {(line["trace"], line["policy"]): line for line in report["hits"]}
    silent = lambda done, total: None  # noqa: E731
    chat = read_trace(traces / "made-up-chat.jsonl.gz", "mooncake", ReadOptions(), silent)
    for policy in ("lru", "fifo", "clairvoyant", "chain-hazard"):
        result = Replay(chat, ReplaySettings(policy, round(0.05 * chat.distinct_blocks))).run()
        line = found["made-up-chat", policy]
        assert line["mean"] == pytest.approx(result.hits.sum() / chat.accesses, abs=1e-6)
        assert (line["n"], line["std"], line["min"]) == (1, 0.0, line["max"])
    ratios = []
    for seed in range(2):
        agents = read_trace(traces / "made-up-agents.jsonl.gz", "claude-code", ReadOptions(seed=seed), silent)
        result = Replay(agents, ReplaySettings("lru", round(0.05 * agents.distinct_blocks))).run()
        ratios.append(result.hits.sum() / agents.accesses)
    line = found["made-up-agents", "lru"]
    assert line["mean"] == pytest.approx(sum(ratios) / 2, abs=1e-6)
    assert (line["min"], line["max"]) == pytest.approx((min(ratios), max(ratios)), abs=1e-6)
    assert found["made-up-chat", "lru"]["share"] == 0.0
    assert found["made-up-chat", "clairvoyant"]["share"] == 1.0
    assert found["made-up-chat", "unbounded"]["mean"] >= found["made-up-chat", "clairvoyant"]["mean"]


@pytest.mark.slow
def test_knowing_the_future_is_worth_more_the_more_is_known(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = study(
        capsys, traces / "made-up-chat.jsonl.gz", "--sections", "hints,oracle", "--parts", "whole",
        "--capacity", "0.1", "--draws", "2", "--hints", "will-continue:0.95,queue:30",
    )  # fmt: skip
    (hinted,) = report["hints"]
    assert hinted["gain_n"] == 2
    assert hinted["gain_mean"] > 0
    lines = {line["told"]: line for line in report["oracle"]}
    assert set(lines) == {"no shipped tables", *load("study.oracle").KNOWLEDGE}
    assert lines["no shipped tables"]["with"] < lines["whether"]["with"] < lines["time"]["with"]
    assert lines["time"]["share_with"] <= 1.0


def test_windows_and_draws_are_cases(traces: Path) -> None:
    sources = load("study.sources")
    cases = list(
        sources.cases_of(
            sources.files_in(traces), groups=("whole", "halves", "quarters"), seeds=3, sessions=None, window_s=600.0
        )
    )
    chat = [case for case in cases if case.format == "mooncake"]
    assert [case.part for case in chat[:3]] == ["0:1", "0:0.5", "0.5:1"]
    whole, first, second = (case.load() for case in chat[:3])
    assert first.requests + second.requests == whole.requests
    assert sum(case.load().requests for case in chat[3:]) == whole.requests
    drawn = [case for case in cases if case.format == "claude-code"]
    assert [case.seed for case in drawn] == [0, 1, 2]
    assert len({case.load().times_ns.tobytes() for case in drawn}) == 3


_LOADED = """
import sys
from kvstore_simulator.policies import create
from kvstore_simulator.replay import Replay, ReplaySettings
from tests.reference.examples import quick_are
from kvstore_simulator.trace import TraceBuilder
from tests.reference.examples import quick_are
builder = TraceBuilder("made-up", "made-up", 512)
builder.add(0, [1, 2], input_tokens=1024, output_tokens=1)
Replay(builder.build(), ReplaySettings(sys.argv[1], 1)).run()
print(*(module.__file__ for module in list(sys.modules.values()) if getattr(module, "__file__", None)), sep="\\n")
"""


@pytest.mark.parametrize("policy", quick_are(["lru", "fifo", "chain-hazard"], [False, False, True]))
def test_a_results_key_covers_the_code_that_a_replay_loads(policy: str) -> None:
    found = subprocess.run([sys.executable, "-c", _LOADED, policy], check=True, capture_output=True, text=True)
    sources = load("study.sources")
    covered = set(sources.sources_of(policy))
    loaded = set(map(Path, found.stdout.split()))
    packages = ["kvstore_simulator/policies", "kvstored/store/policies", "kvstored/store/blocks"]
    if policy == sources.OURS:
        packages.append("kvstore_predictor")
    else:
        covered |= {path for path in sources.sources_of(sources.OURS) if set(sources._OURS_ALONE) & set(path.parts)}
    for package in packages:
        used = {path for path in loaded if package in path.as_posix()}
        assert used
        assert used <= covered


def test_a_run_that_was_cut_off_goes_on(
    traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept.jsonl"
    arguments = (
        traces / "made-up-chat.jsonl.gz", "--sections", "hits,compute", "--parts", "whole", "--policies", "lru",
        "--capacity", "0.05", "--results", kept,
    )  # fmt: skip
    whole = study(capsys, *arguments)
    lines = kept.read_text().splitlines()
    assert len(lines) == 3
    kept.write_text("\n".join([*lines[:2], lines[2][:40]]))
    runs = load("study.sources")
    run, code_of = runs.run, runs.code_of
    ran = []

    def watched(job: Any) -> Any:
        ran.append(job.policy)
        return run(job)

    monkeypatch.setattr(runs, "code_of", lambda policy: "another" if policy == "lru" else code_of(policy))
    monkeypatch.setattr(runs, "run", watched)
    assert study(capsys, *arguments)["compute"] == whole["compute"]
    assert ran == ["lru", "chain-hazard"], "one was cut off, one was made by other code"


def test_published_figures_are_met_or_missed(traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = traces / "made-up-chat.jsonl.gz"
    chat = read_trace(path, "mooncake", ReadOptions(), lambda done, total: None)
    result = Replay(chat, ReplaySettings("lru", round(0.05 * chat.distinct_blocks))).run()
    published = result.hits.sum() / chat.accesses
    for off, status in ((0.0009, 0), (0.0012, 1)):
        figures = tmp_path / "figures.toml"
        figures.write_text(
            f'[[figure]]\nrequests = {chat.requests}\ndistinct_blocks = {chat.distinct_blocks}\npolicy = "lru"\n'
            f'hit_ratio = {{ "0.05" = {published + off:.6f} }}\n'
        )
        report = study(
            capsys, path, "--sections", "reference", "--parts", "whole", "--capacity", "0.05", "--figures", figures,
            status=status,
        )  # fmt: skip
        (line,) = report["reference"]
        assert line["met"] is (status == 0)


def record(policy: str, ratio: float, saved: float, *, part: str = "0:1", capacity: float = 0.05) -> dict[str, Any]:
    return {
        "key": "", "trace": "t", "group": "halves", "part": part, "policy": policy, "knowledge": "", "draw": 0,
        "capacity": capacity, "capacity_blocks": 9, "distinct_blocks": 99, "requests": 9, "block_accesses": 99,
        "unbounded": 0.9, "hit_ratio": ratio, "compute_saved": {"llama-3.1-8b": saved, "llama-3.1-70b": saved / 2},
        "seconds": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("saved", "capacity", "above", "not_below"),
    [(0.31, 0.05, True, True), (0.2999, 0.05, False, True), (0.2999, 0.25, None, True), (0.29, 0.25, None, False)],
)
def test_verdicts(saved: float, capacity: float, above: bool | None, not_below: bool) -> None:
    tables = load("study.tables")
    records = [
        record(policy, 0.1, value, part=part, capacity=capacity)
        for part, change in (("0:0.5", 0.01), ("0.5:1", -0.01))
        for policy, value in (("chain-hazard", saved + change), ("lru", 0.2), ("arc", 0.3), ("clairvoyant", 0.8))
    ]
    (line,) = tables.compute_lines(tables.Book(records))
    assert (line["best_classical"], line["above"], line["not_below"]) == ("arc", above, not_below)
    wanted = min((saved - 0.3), (saved - 0.3) / 2)
    assert line["lead"] == pytest.approx(wanted, abs=1e-6), "at the model where it leads by the least"


def test_text_csv_and_page(traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    arguments = [
        str(traces / "made-up-chat.jsonl.gz"), "--quick", "--sections", "hits,compute", "--policies", "lru",
        "--processes", "1", "--results", str(tmp_path / "kept.jsonl"),
    ]  # fmt: skip
    main = load("policy_study").main
    main([*arguments, "--html", str(page)])
    shown = capsys.readouterr().out
    assert "made-up-chat, whole (1)" in shown and "best classical" in shown
    text = page.read_text()
    assert text.count("<figure>") == 1 and "chain-hazard" in text and "<script" not in text
    main([*arguments, "--csv"])
    rows = capsys.readouterr().out.splitlines()
    assert rows[0].startswith("section,trace,part,capacity") and rows[1].startswith("hits,made-up-chat,whole,0.01")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.jsonl"], "cannot read nowhere.jsonl"),
        (["--sections", "hints,tea"], "'tea' is unknown; known: hits"),
        (["--capacity", "7"], "shares of the distinct blocks"),
        (["--hints", "tea:1"], "takes will-continue:AUC"),
        (["--seeds", "0"], "at least 1"),
        (["--figures", "nowhere.toml"], "cannot read nowhere.toml"),
    ],
)
def test_a_mistake_gets_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert load("policy_study").main(["--quick", *arguments]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("policy_study: ")]
    assert len(lines) == 1 and message in lines[0]


def test_what_is_no_trace_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text('{"a": 1}\n')
    assert load("policy_study").main([str(path)]) == 2
    assert "its first line is of no trace format that is known" in capsys.readouterr().err
