"""The torture runs' own parts: sums, models, damages, the command line. That a harness finds what is wrong stands here
too: a tier whose verification is switched off must be caught."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.reference.benchmark_scripts import BENCHMARKS, importable


@pytest.fixture(autouse=True)
def _as_a_script(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from importable(monkeypatch)


def module(name: str) -> ModuleType:
    return importlib.import_module(name)


def corrupt(tmp_path: Path, **assignment: Any) -> Any:
    figures = module("torture_runs.figures")
    found = figures.Figures()
    order = figures.Assignment(**({"seed": 1, "seconds": 60.0, "directory": tmp_path, "stop_at": 400} | assignment))
    module("torture_runs.corruption").torture(order, found)
    return found


# Corruption


@pytest.mark.slow
def test_a_sound_tier_serves_nothing_wrong(tmp_path: Path) -> None:
    found = corrupt(tmp_path).as_json()
    assert found["corruptions"] >= 400 and "failures" not in found
    assert found["reads_refused"]["corrupt"] > 50 and found["over_capacity_bytes"] == 0


@pytest.mark.slow
def test_a_tier_that_skips_checksums_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore_tiers.nvme.slot_transfers.checksum_of", lambda segments, nbytes: 1)
    found = corrupt(tmp_path)
    assert found.counts["served_wrong"] > 0 and "served other bytes" in found.failures[0]


@pytest.mark.slow
def test_a_tier_that_takes_any_header_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = importlib.import_module("kvstore_tiers.image")

    def believe(raw: bytes, expect_key: bytes, room_bytes: int, generation: int | None = None) -> Any:
        header = image.read_header(raw)
        return header if isinstance(header, str) or header.payload_bytes <= room_bytes else "too long"

    monkeypatch.setattr("kvstore_tiers.nvme.slot_transfers.judge_header", believe)
    found = corrupt(tmp_path)
    assert found.counts["served_wrong"] > 0 and found.counts["served_other_tenants"] > 0


@pytest.mark.parametrize("seed", range(3))
def test_every_damage_of_a_slot_changes_it_and_keeps_its_length(seed: int) -> None:
    damages = module("torture_runs.slot_damage")
    rng = np.random.default_rng(seed)
    image, former, other = (rng.integers(0, 256, 16384, dtype=np.uint8) for _ in range(3))
    for kind, damage in damages.SLOT_DAMAGES.items():
        damaged = damage(rng, damages.SlotBytes(image, 14_000, former, other))
        assert damaged.nbytes == image.nbytes and damaged.dtype == np.uint8, kind
        assert not np.array_equal(damaged, image), kind


def test_every_damage_of_files_is_seen_in_the_files(tmp_path: Path) -> None:
    stored = module("torture_runs.stored_directory").make_directory(np.random.default_rng(5), tmp_path / "d")
    damages = module("torture_runs.file_damage")
    for kind, damage in damages.FILE_DAMAGES.items():
        changed = False
        for seed in range(200):
            scene = damages.Scene({name: bytearray(raw) for name, raw in stored.newer.items()}, stored.older)
            if damage(np.random.default_rng(seed), scene):
                changed = True
                assert {name: bytes(raw) for name, raw in scene.files.items()} != stored.newer, kind
                break
        assert changed or kind in ("superblock_stale", "index_values_exchanged"), kind


# What a client may count on


def test_the_model_says_what_must_be_there_and_what_must_not() -> None:
    model = module("torture_runs.kill_model")
    chain = model.Conversation("own", 0, 7, 4)
    chain.putting(3)
    chain.answered(["durable", "durable", "volatile"])
    assert (chain.durable_head, chain.durable_blocks) == (2, 2)
    assert chain.lost(("nvme", "absent", "absent", "absent")) == [1]
    assert chain.lost(("host", "nvme")) == [] and chain.lost(("host",)) == [1]
    chain.deleting()
    assert chain.lost(()) == [] and chain.resurrected(("nvme",)) == [], "sent and not answered: both may be"
    chain.deleted()
    assert chain.resurrected(("absent", "nvme", "absent", "absent")) == [1]
    chain.putting(2)
    assert chain.resurrected(("nvme", "nvme", "nvme")) == [2]


def test_payloads_name_their_blocks() -> None:
    payload_of = module("torture_runs.kill_model").payload_of
    assert np.array_equal(payload_of(4096, "a", 1), payload_of(4096, "a", 1))
    assert not np.array_equal(payload_of(4096, "a", 1), payload_of(4096, "a", 2))
    assert payload_of(8, "short").nbytes == 8


# Sums


def test_figures_are_added_and_null_is_not_nought() -> None:
    figures = module("torture_runs.figures")
    first, second = figures.Figures(), figures.Figures()
    first.add("kills", 3)
    first.add_kind("kills_by_place", "random", 3)
    first.at_least("over_capacity_bytes", 0)
    first.leave_out("power_loss_states", "no compiler")
    second.add("kills", 4)
    second.add_kind("kills_by_place", "nvme.read", 1)
    second.at_least("over_capacity_bytes", 4096)
    second.fail("durable_lost", "block 3")
    total: dict[str, Any] = {}
    for one in (first, second):
        figures.add_up(total, one.as_json())
    assert (total["kills"], total["over_capacity_bytes"], total["durable_lost"]) == (7, 4096, 1)
    assert total["kills_by_place"] == {"random": 3, "nvme.read": 1}
    assert total["power_loss_states"] is None and total["power_loss_states_why_null"] == "no compiler"
    assert total["failures"] == ["durable_lost: block 3"]
    figures.add_up(total, {"power_loss_states": 5})
    assert total["power_loss_states"] == 5 and "power_loss_states_why_null" not in total


def test_what_the_page_wants_to_be_nought_is_what_fails_a_run() -> None:
    page = (BENCHMARKS.parent / "docs" / "torture.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.endswith("| 0 |")]
    wanted = {name for row in rows if len(row) == 3 for name in re.findall(r"`(\w+)`", row[0])}
    assert wanted == set(module("torture_runs.figures").MUST_BE_ZERO)


def test_the_ledger_adds_up_by_commit_and_passes_over_what_is_torn(tmp_path: Path) -> None:
    ledger, path = module("torture_runs.figures"), tmp_path / "state" / "torture.jsonl"
    for commit, kills in (("a", 5), ("b", 1), ("a", 7)):
        ledger.append(path, {"commit": commit, "seed": kills, "kills": kills, "seconds": 2.5})
    with path.open("a") as file:
        file.write('{"commit": "a", "kil')
    assert ledger.sums(path) == {
        "a": {"runs": 2, "kills": 12, "seconds": 5.0},
        "b": {"runs": 1, "kills": 1, "seconds": 2.5},
    }
    assert ledger.sums(tmp_path / "none") == {}


# The command line


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--only", "kils"], "no such harness: kils"),
        (["--only", ","], "no such harness"),
        (["--seconds", "0"], "must be positive"),
        (["--seed", "-1"], "must be from 0"),
        (["--stop-at", "kills"], "is not NAME=N"),
        (["--dir", "/nowhere"], "no such directory"),
    ],
)
def test_a_wrong_command_line_is_reported_in_one_line(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        module("torture").main(arguments)
    output = capsys.readouterr().err
    assert ended.value.code == 2 and complaint in output and "Traceback" not in output


def test_the_ledger_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ledger"
    assert module("torture").main(["--show-ledger", "--ledger", str(path)]) == 0
    assert "no runs yet" in capsys.readouterr().out
    path.write_text(json.dumps({"commit": "abc", "kills": 1200, "durable_lost": 2}) + "\n")
    assert module("torture").main(["--show-ledger", "--ledger", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "1,200" in shown and "WRONG" in shown and "abc" in shown
    assert module("torture").main(["--show-ledger", "--ledger", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["abc"]["kills"] == 1200


def test_findings_of_lanes_are_reported_with_those_of_the_harness() -> None:
    figures = module("torture_runs.figures").Figures()
    figures.add("kills")
    figures.at_least("over_capacity_bytes", 5)
    figures.beside = [
        {"kills": 3, "over_capacity_bytes": 4096, "kills_by_place": {"random": 3}, "failures": ["durable_lost: one"]},
        {"kills": 4, "over_capacity_bytes": 0, "kills_by_place": {"random": 1}},
    ]
    expected = {
        "kills": 8, "over_capacity_bytes": 4096, "kills_by_place": {"random": 4}, "failures": ["durable_lost: one"],
    }  # fmt: skip
    assert figures.as_json() == expected == figures.as_json()


def test_every_lane_runs_in_a_folder_of_its_own_and_its_crash_is_reported(tmp_path: Path) -> None:
    figures = module("torture_runs.figures")
    assignment = figures.Assignment(1, 5.0, tmp_path, stop_at=5)
    with pytest.raises(RuntimeError, match="lane 0 ended with status 1; lane 1 ended with status 1"):
        module("torture_runs.run_harness").in_lanes("no_such_harness", 2, assignment, figures.Figures())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_a_figure_of_several_harnesses_is_counted_in_one_way_by_all() -> None:
    named: dict[str, set[str]] = {"add": set(), "add_kind": set()}
    for path in (BENCHMARKS / "torture_runs").glob("*.py"):
        for way, name in re.findall(r'figures\.(add|add_kind)\("(\w+)"', path.read_text()):
            named[way].add(name)
    assert "reads_refused" in named["add_kind"]
    assert named["add"].isdisjoint(named["add_kind"])
