"""The regret benchmark: its made-up families are what their seeds make of them, and it judges what it replays."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvstored.policy_names import CHAIN_HAZARD, LRU

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
FAMILIES_TWICE = """
import sys
sys.path.insert(0, sys.argv[1])
from study.families import FAMILIES, trace_of
for name in FAMILIES:
    one, again, other = (trace_of(name, seed, 80) for seed in (1, 1, 2))
    assert one.requests == 80 and (one.times_ns[1:] >= one.times_ns[:-1]).all(), name
    assert one.times_ns.tolist() == again.times_ns.tolist() and one.blocks.tolist() == again.blocks.tolist(), name
    assert one.times_ns.tolist() != other.times_ns.tolist(), name
print(len(FAMILIES))
"""


def regret(*arguments: str) -> subprocess.CompletedProcess[str]:
    script = str(BENCHMARKS / "policy_regret.py")
    return subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, timeout=60, check=False)


def write_popular(path: Path) -> None:
    """One prompt comes every other time, which first in, first out evicts all the same."""
    with path.open("w") as out:
        for at in range(40):
            ids = [10 * (at % 2 * at) + depth for depth in range(5)]
            row = {"timestamp": at * 1000, "input_length": 5 * 512, "output_length": 1, "hash_ids": ids}
            out.write(json.dumps(row) + "\n")


def test_a_family_and_a_seed_give_one_trace() -> None:
    command = [sys.executable, "-c", FAMILIES_TWICE, str(BENCHMARKS)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) >= 20


@pytest.mark.slow
def test_regret_is_what_the_best_classical_policy_has_more(tmp_path: Path) -> None:
    path = tmp_path / "popular.jsonl"
    write_popular(path)
    found = regret(str(path), "--capacity", "0.1", "--ours", "fifo", "--json")
    (line,) = json.loads(found.stdout.splitlines()[-1])
    hits = {name: pair[0] for name, pair in line["policies"].items()}
    ours, clairvoyant = hits.pop("fifo"), hits.pop("clairvoyant")
    assert set(hits) == {LRU, "lfu-ttl", "gdsf", "s3-fifo", "arc"}
    assert line["regret"] == max(hits.values()) - ours > 0.005 and clairvoyant >= max(hits.values())
    assert found.returncode == 1, "more than is allowed"
    assert regret(str(path), "--capacity", "0.1", "--ours", "fifo", "--allowed", "1").returncode == 0


@pytest.mark.slow
def test_a_smoke_test_gives_no_verdict_and_a_mistake_is_named(tmp_path: Path) -> None:
    quick = regret("--quick", "--ours", CHAIN_HAZARD)
    assert quick.returncode == 0 and "sessions beside documents" in quick.stdout
    path = tmp_path / "no-trace.jsonl"
    path.write_text("{}\n")
    assert regret(str(path)).returncode == 2
    assert "--capacity" in regret("--quick", "--capacity", "2").stderr
