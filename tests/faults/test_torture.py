"""The torture run as an operator starts it: its object is whole, it finds nothing wrong, it leaves nothing behind."""

from __future__ import annotations

import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore_tiers import failpoints
from tests.reference.examples import fewer
from tests.reference.running_daemon import eventually

TORTURE = Path(__file__).resolve().parents[2] / "benchmarks" / "torture.py"
PROMISED = (
    "corruptions", "served_wrong", "kills", "durable_lost", "power_loss_states", "power_loss_wrong",
    "power_loss_lost", "over_capacity_bytes", "wrong_bytes_after_kill", "dram_blocks_before",
    "dram_blocks_after_restart", "visibility_checks", "visibility_misses", "seed", "commit", "seconds_by_harness",
)  # fmt: skip
KILLS = 200  # each costs a start of the daemon, most of a second on two quiet cores
KILLS_PATIENCE_S = 1500
HOSTILE_S = fewer(300, 0.4)
SOAK_S = fewer(600, 0.6)


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A short path: socket names are limited."""
    path = Path("/tmp") / f"kvt-{os.getpid()}-{time.monotonic_ns() % 10**8}"
    path.mkdir()
    yield path
    shutil.rmtree(path, ignore_errors=True)


def command(place: Path, *arguments: str) -> list[str]:
    return [sys.executable, str(TORTURE), "--dir", str(place), "--ledger", str(place / "ledger"), "--json", *arguments]


def run(place: Path, *arguments: str, timeout_s: float = 230.0) -> dict[str, Any]:
    done = subprocess.run(command(place, *arguments), capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert "Traceback" not in done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def processes_below(place: Path) -> list[str]:
    """Return the processes that name the directory on their command line, and processes that write to a file in it:
    daemons that were forked.
    """
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes()
            output = os.fsencode(os.readlink(path.parent / "fd" / "1"))
        except OSError:
            continue
        if os.fsencode(place) + b"/" in arguments + b"\0" + output and int(path.parent.name) != os.getpid():
            found.append(arguments.replace(b"\0", b" ").decode(errors="replace"))
    return found


@pytest.mark.slow
def test_a_short_run_of_everything(place: Path) -> None:
    result = run(place, "--seed", "3", "--seconds", "20")
    assert not set(PROMISED) - set(result)
    assert result["corruptions"] > 100 and result["kills"] >= 1 and result["visibility_checks"] > 100
    assert result["dram_blocks_before"] > 0
    assert result["power_loss_states"] or "power_loss_states_why_null" in result
    assert [path.name for path in place.iterdir()] == ["ledger"]
    assert json.loads((place / "ledger").read_text())["corruptions"] == result["corruptions"]
    assert processes_below(place) == []


@pytest.mark.slow
def test_what_was_not_asked_for_is_null_with_a_reason(place: Path) -> None:
    result = run(place, "--seed", "4", "--seconds", "120", "--only", "corruption", "--stop-at", "corruption=50")
    assert result["corruptions"] > 20 and result["served_wrong"] == 0
    assert result["kills"] is None and "not asked for" in result["kills_why_null"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_leaves_nothing_behind(place: Path, number: signal.Signals) -> None:
    """Killed outright it cannot remove its files; the next run does that."""
    arguments = command(place, "--seed", "5", "--seconds", "60", "--only", "kills")
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert eventually(lambda: any("kill_client" in line for line in processes_below(place)), 60.0)
        child.send_signal(number)
        output, errors = child.communicate(timeout=60)
    clients = [line for line in processes_below(place) if "torture.py" not in line]
    assert eventually(lambda: processes_below(place) == [], 20.0), clients
    if number == signal.SIGKILL:
        assert any(path.name.startswith("kvtorture-") for path in place.iterdir())
        run(place, "--seconds", "2", "--only", "corruption")
    else:
        assert child.returncode == 130 and "Traceback" not in errors, errors
        assert json.loads(output.splitlines()[-1])["interrupted"] is True
    assert [path.name for path in place.iterdir()] == ["ledger"]


@pytest.mark.slow
def test_an_interrupted_run_reports_what_it_had_found(place: Path) -> None:
    arguments = command(place, "--seed", "5", "--seconds", "120", "--only", "corruption")
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        assert any("corruptions" in line for line in child.stderr)
        child.send_signal(signal.SIGINT)
        output, _ = child.communicate(timeout=60)
    assert json.loads(output.splitlines()[-1])["corruptions"] > 0


@pytest.mark.slow
def test_a_daemon_that_forgets_is_caught(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness can fail: what was promised is taken away between two lives."""
    monkeypatch.syspath_prepend(str(TORTURE.parent))
    kills = importlib.import_module("torture_runs.kills")
    figures = importlib.import_module("torture_runs.figures").Figures()
    with kills._lives(place / "kills", np.random.default_rng(1), figures) as lives:
        for _ in range(3):
            lives._one_life("")
        assert figures.counts["durable_lost"] == 0 and figures.counts["kill_puts"] > 0
        shutil.rmtree(lives._daemon.nvme_dir)
        lives._one_life("")
    assert figures.counts["durable_lost"] > 0 and figures.counts["wrong_bytes_after_kill"] == 0
    assert figures.failures and "life" in figures.failures[0]


@pytest.mark.slow
@pytest.mark.timeout(KILLS_PATIENCE_S + 120)
def test_two_hundred_kills_lose_nothing(place: Path) -> None:
    """The kills come at random and at each failpoint, under clients of two tenants."""
    arguments = ("--seed", "6", "--seconds", str(KILLS_PATIENCE_S), "--only", "kills", "--stop-at", f"kills={KILLS}")
    result = run(place, *arguments, timeout_s=KILLS_PATIENCE_S + 100)
    assert result["kills"] >= KILLS
    wrong = ("durable_lost", "resurrected", "wrong_bytes_after_kill", "over_capacity_bytes", "over_host_capacity_bytes")
    assert {name: result.get(name, 0) for name in wrong} == dict.fromkeys(wrong, 0), result.get("failures")
    assert result["kill_checked_durable"] > 50 * KILLS, "there was something to lose"
    reached = set(result["kills_by_place"]) & set(failpoints.REGISTRY)
    assert len(reached) > len(failpoints.REGISTRY) // 2, result["failpoints_not_reached"]


@pytest.mark.slow
def test_twenty_thousand_visibility_checks(place: Path) -> None:
    arguments = ("--seed", "7", "--seconds", "120", "--only", "visibility", "--stop-at", "visibility=20000")
    result = run(place, *arguments)
    assert result["visibility_checks"] >= 20000 and result["visibility_misses"] == 0
    assert result["visibility_probes"] >= 20000 and result["visibility_probes_absent"] == 0


@pytest.mark.slow
@pytest.mark.timeout(HOSTILE_S + 180)
def test_hostile_clients_have_no_success(place: Path) -> None:
    result = run(place, "--seed", "8", "--seconds", str(HOSTILE_S), "--only", "hostile", timeout_s=HOSTILE_S + 150)
    assert result["hostile_inputs"] > 10_000 and len(result["hostile_by_kind"]) >= 8
    wrong = ("hostile_successes", "hostile_crashes", "over_hostile_memory_bytes", "over_hostile_descriptors")
    assert {name: result[name] for name in wrong} == dict.fromkeys(wrong, 0), result.get("failures")


@pytest.mark.slow
@pytest.mark.timeout(SOAK_S + 300)
def test_a_daemon_under_churn_does_not_grow(place: Path) -> None:
    result = run(place, "--seed", "9", "--seconds", str(SOAK_S), "--only", "soak", timeout_s=SOAK_S + 250)
    assert result["soak_rounds"] >= 12, "growth is judged"
    assert {"new_guest", "reload", "full", "drop", "bump", "expire", "vanish"} <= result["soak_actions"].keys()
    wrong = ("soak_wrong", *(f"over_soak_{name}" for name in ("memory_bytes", "descriptors", "threads", "disk_bytes")))
    assert {name: result[name] for name in wrong} == dict.fromkeys(wrong, 0), result.get("failures")


@pytest.mark.slow
def test_attackers_who_are_the_victim_are_caught(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness can fail: the daemon takes the attackers for the victim."""
    monkeypatch.syspath_prepend(str(TORTURE.parent))
    hostile = importlib.import_module("torture_runs.hostile")
    figures = importlib.import_module("torture_runs.figures").Figures()
    with hostile.ListingDaemon(place / "hostile", *hostile.SETTINGS) as daemon:
        daemon.start()
        with hostile._stored(daemon) as sessions:
            scene = hostile.Scene(daemon, sessions, random.Random(1), figures)
            victims = daemon.own_socket("victim")
            monkeypatch.setattr(daemon, "own_socket", lambda tenant: victims)
            for attack in (scene.memory, scene.others_names, scene.pool):
                before = figures.counts["hostile_successes"]
                attack()
                assert figures.counts["hostile_successes"] > before, attack.__name__
