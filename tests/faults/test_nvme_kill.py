"""kill -9 at every named place of the NVMe tier: what sync answered is there, the rest is whole or absent."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from kvstore_tiers import failpoints
from kvstore_tiers.nvme.check import Severity, check_directory
from kvstore_tiers.testing.transfers import block, get
from tests.faults.nvme_writer import CAPACITY_BYTES, ENCRYPTS, open_tier
from tests.reference import forked
from tests.reference.examples import first_of_each

AT_OPEN = ("nvme.recover-before-repair", "nvme.recover-after-repair")
NOT_ON_THE_WAY = ("nvme.read", "nvme.probe")  # killed while reading, or before scratch bytes: nothing is being changed
RELOCATED, FREED = 34, 35  # the commits of blocks copied to other slots, and of their old slots
SHORTER = 5  # the first reformat that makes a slab shorter
HITS = {  # early, where slots are reused and slabs reformatted, and where blocks move
    "nvme.before-slot-write": (1, 400),
    "nvme.after-invalidate": (300,),
    "nvme.after-slot-write": (2, 330),
    "nvme.after-relocation": (2,),
    "nvme.sync-start": (18, RELOCATED, FREED),
    "nvme.after-data-sync": (20, RELOCATED),
    "nvme.between-records": (21, RELOCATED, FREED),
    "nvme.after-records-write": (1, 22, RELOCATED),
    "nvme.after-record-sync": (2, 23, RELOCATED, FREED),
    "nvme.slab-records-zeroed": (1, 3, SHORTER),
    "nvme.slab-reformat": (1, 2, SHORTER),
}
CASES = [
    (name, hit)
    for name in failpoints.REGISTRY
    if name.startswith("nvme.") and name not in (*AT_OPEN, *NOT_ON_THE_WAY)
    for hit in HITS.get(name, (1,))
]


def run_writer(directory: Path, failpoint: str) -> tuple[int, set[int], set[int]]:
    """Exit status, blocks answered durable and not freed since, blocks that were freed."""
    environment = {**os.environ, failpoints.ENVIRONMENT: failpoint, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = forked.run([sys.executable, "-m", "tests.faults.nvme_writer", str(directory)], env=environment)
    assert done.returncode in (0, -9), done.stderr
    durable: set[int] = set()
    freed: set[int] = set()
    for line in done.stdout.splitlines():
        what, *numbers = line.split()
        (durable if what == "durable" else freed).update(map(int, numbers))
    return done.returncode, durable - freed, freed


def must_be_sound(directory: Path, durable: set[int]) -> None:
    """No damage before recovery; durable blocks back; every block whole; nothing to complain about afterwards."""
    damage = [f for f in check_directory(directory, capacity_bytes=CAPACITY_BYTES) if f.severity is Severity.DAMAGE]
    assert not damage, damage
    tier = open_tier(str(directory))
    try:
        recovered = {int.from_bytes(header.key, "big"): (slot, header) for slot, header in tier.recover()}
        assert durable <= recovered.keys(), f"durable and lost: {sorted(durable - recovered.keys())}"
        for number, (slot, header) in recovered.items():
            outcome, copy = get(tier, slot, header.key, header.payload_bytes)
            assert outcome.ok, (number, outcome)
            assert np.array_equal(copy, block(number, header.payload_bytes)[1]), number
        statistics = tier.statistics()
        assert statistics.used_bytes <= CAPACITY_BYTES
        assert statistics.blocks == len(recovered)
    finally:
        tier.close()
    assert check_directory(directory, capacity_bytes=CAPACITY_BYTES, verify_payloads=True) == []


@pytest.mark.parametrize(("name", "hit"), first_of_each(CASES, lambda case: case[0]))
def test_a_kill_loses_nothing_durable(tmp_path: Path, name: str, hit: int) -> None:
    status, durable, _ = run_writer(tmp_path, f"{name}=kill@{hit}")
    assert status == -9, f"{name} was not passed {hit} times"
    must_be_sound(tmp_path, durable)


SEALED_CASES = [
    ("nvme.after-slot-write", 330), ("nvme.between-records", RELOCATED), ("nvme.after-relocation", 2),
    ("nvme.recover-after-repair", 1), ("file.keys", 1), ("keys.written", 1),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "hit"), first_of_each(SEALED_CASES, lambda case: case[0]))
def test_a_kill_loses_nothing_durable_that_is_encrypted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, hit: int
) -> None:
    pytest.importorskip("cryptography", reason="needs the extra encryption")
    monkeypatch.setenv(ENCRYPTS, "1")
    directory = tmp_path / "nvme"
    status, durable, _ = run_writer(directory, f"{name}=kill@{hit}")
    assert status == -9, f"{name} was not passed {hit} times"
    must_be_sound(directory, durable)


@pytest.mark.slow
@pytest.mark.parametrize("name", AT_OPEN)
def test_a_kill_in_recovery_loses_nothing_either(tmp_path: Path, name: str) -> None:
    status, durable, _ = run_writer(tmp_path, "nvme.after-records-write=kill@20")
    assert status == -9
    assert run_writer(tmp_path, f"{name}=kill")[0] == -9
    must_be_sound(tmp_path, durable)


@pytest.mark.slow
def test_a_writer_that_is_not_killed_ends_clean(tmp_path: Path) -> None:
    status, durable, _ = run_writer(tmp_path, "")
    assert status == 0
    assert durable
    assert check_directory(tmp_path, capacity_bytes=CAPACITY_BYTES, verify_payloads=True) == []
    must_be_sound(tmp_path, durable)
