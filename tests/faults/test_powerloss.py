"""Power loss: every state that a cut of the power may leave of a tier recovers, and flawed tiers are caught."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore_tiers.nvme.check import check_directory
from kvstore_tiers.nvme.layout import Superblock, read_superblock
from kvstore_tiers.testing.powerloss import CompilerMissing, Figures, Recording, replay
from kvstore_tiers.testing.powerloss.campaign import power_loss, record_workload
from kvstore_tiers.testing.powerloss.crashes import Kept, crash_states
from kvstore_tiers.testing.powerloss.judge import CAPACITY_BYTES, judge_tier
from kvstore_tiers.testing.powerloss.log import Kind, Operation, UnseenChange, read_log, write_log
from kvstore_tiers.testing.powerloss.medium import Medium, Tree
from kvstore_tiers.testing.powerloss.promises import promises_at
from kvstore_tiers.testing.powerloss.record import shim_path
from kvstore_tiers.testing.powerloss.replay import judge_state
from tests.reference.examples import fewer
from tests.reference.powerloss_judges import DEATH_ENVIRONMENT
from tests.reference.skips import skip_without_compiler

SMALLEST_IMAGE_BYTES = 4200  # a header and some payload: neither a superblock nor records
EVERYTHING = Kept("", lambda change: 1.0, lambda change: 0)


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    skip_without_compiler()


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded workload."""
    return record_workload(tmp_path_factory.mktemp("powerloss") / "workload", seed=1, steps=25)


def found(root: Path) -> Tree:
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None for path in sorted(root.rglob("*"))
    }


def at_the_end(log: Path) -> Tree:
    """Return what the log says is there when nothing was lost."""
    medium = Medium(read_log(log))
    medium.advance(10**12)
    return medium.tree(EVERYTHING)


def recorded(directory: Path, program: str, *arguments: str) -> Recording:
    """Return the log of a program in an empty directory, which is its first argument."""
    (directory / "root").mkdir()
    recording = Recording(directory / "root", directory / "log")
    command = [sys.executable, "-c", program, str(recording.root), *arguments]
    subprocess.run(command, env=recording.environment(), check=True)
    return recording


def replay_changed(log: Path, change: Callable[[list[Operation]], list[Operation]], states: int = 120) -> Figures:
    """Replay the log of a tier that did something else."""
    changed = log.with_name("changed")
    write_log(changed, change(read_log(log)))
    return replay(changed, seed=1, states=states)


def test_the_recorder_sees_everything(log: Path) -> None:
    """The log, applied whole, gives the directory that the recorded processes left; it is sound."""
    root = log.with_name("root")
    assert at_the_end(log) == found(root)
    assert check_directory(root / "nvme", capacity_bytes=CAPACITY_BYTES, verify_payloads=True) == []


def test_the_workload_does_what_it_is_there_for(log: Path) -> None:
    operations = read_log(log)
    marks = [one.mark() for one in operations if one.kind is Kind.MARK]
    assert sum(len(mark.get("durable", ())) for mark in marks) > 30
    assert any(mark.get("gone") for mark in marks)
    assert sum(one.kind is Kind.RENAME and one.path.endswith(".new") for one in operations) >= 4, "slabs are made"
    superblocks = [(one.inode, read_superblock(one.data)) for one in operations if one.data.startswith(b"KVSLAB")]
    sizes = {(inode, superblock.slot_bytes) for inode, superblock in superblocks if isinstance(superblock, Superblock)}
    assert len(sizes) > len({inode for inode, _ in sizes}), "and get other slot sizes"
    assert any(one.path.endswith("seal") for one in operations if one.kind is Kind.UNLINK), "and a sealed index opened"


def test_every_state_recovers(log: Path) -> None:
    figures = replay(log, seed=1, states=100)
    assert figures.states == 100
    assert figures.promised > 300, "promises were checked"
    assert figures.is_sound, figures.failures


@pytest.mark.slow
def test_without_syncs_promises_are_broken(log: Path) -> None:
    figures = replay_changed(log, lambda operations: [one for one in operations if one.kind is not Kind.SYNC])
    assert figures.lost > 10
    assert figures.failures and not figures.is_sound


@pytest.mark.slow
def test_a_name_that_is_not_synced_is_a_loss(log: Path) -> None:
    """The directory of slabs, never synced: whole files are gone."""

    def without(operations: list[Operation]) -> list[Operation]:
        slabs = next(one.inode for one in operations if one.path.endswith("/slabs"))
        return [one for one in operations if not (one.kind is Kind.SYNC and one.inode == slabs)]

    assert replay_changed(log, without).lost > 10


def test_a_commit_that_forgets_the_records_is_caught(tmp_path: Path) -> None:
    """A tier that syncs the images but not the records: run it, record it, and see its promises broken."""
    flawed = (
        "import sys, runpy\n"
        "from kvstore_tiers.nvme import commit\n"
        "commit._touched = lambda batch: set()\n"
        "sys.argv[0] = 'workload'\n"
        "runpy.run_module('kvstore_tiers.testing.powerloss.workload', run_name='__main__')\n"
    )
    operations = read_log(recorded(tmp_path, flawed, "--steps", "20").log)
    answered = [one.end + 1 for one in operations if one.kind is Kind.MARK and one.mark().get("durable")]
    reports = [
        judge_state(state, promises_at(operations, state.tick), judge_tier, tmp_path / "state")
        for state in crash_states(operations, answered, seed=1, rounds=1, random_states=0)
        if state.how == "nothing kept"
    ]
    assert any(report["lost"] or report["wrong"] for report in reports), "the next commit syncs them: a short window"


@pytest.mark.slow
def test_wrong_bytes_are_noticed(log: Path) -> None:
    """A disk that flips a bit in each payload breaks all promises; the tier says CORRUPT, the judge: lost."""

    def flipped(operations: list[Operation]) -> list[Operation]:
        slabs = {one.inode for one in operations if one.kind is Kind.CREATE and "/slabs/" in one.path}
        return [
            replace(one, data=one.data[:4106] + bytes([one.data[4106] ^ 1]) + one.data[4107:])
            if one.kind is Kind.WRITE and one.inode in slabs and len(one.data) > SMALLEST_IMAGE_BYTES
            else one
            for one in operations
        ]

    figures = replay_changed(log, flipped)
    assert figures.lost > 10 and figures.corrupt_reads > 10 and figures.wrong == 0


@pytest.mark.slow
def test_a_state_that_kills_its_judge_is_a_failure_of_that_state(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DEATH_ENVIRONMENT, str(tmp_path / "died"))
    figures = replay(log, seed=1, states=100, judge="tests.reference.powerloss_judges:killed_once")
    assert (figures.states, figures.died) == (100, 1)
    assert figures.lost > 0 and not figures.is_sound
    (failure,) = figures.failures
    assert failure["tick"] > 0 and failure["how"] and "status -7" in failure["broken"][0]


def test_mapped_memory_is_seen_when_it_is_synced(tmp_path: Path) -> None:
    program = (
        "import mmap, os, sys\n"
        "fd = os.open(sys.argv[1] + '/f', os.O_RDWR | os.O_CREAT)\n"
        "os.ftruncate(fd, 20000)\n"
        "m = mmap.mmap(fd, 20000)\n"
        "m[5000:5004] = b'here'\n"
        "m.flush()\n"
        "m[9000] = 7\n"
        "m.close()\n"
    )
    recording = recorded(tmp_path, program)
    assert at_the_end(recording.log) == found(recording.root)
    assert any(one.kind is Kind.SYNC for one in read_log(recording.log)), "the msync"


def test_what_the_recorder_does_not_follow_is_refused(tmp_path: Path) -> None:
    recording = recorded(tmp_path, "import os, sys; os.symlink('x', sys.argv[1] + '/s')")
    with pytest.raises(UnseenChange, match="symlink"):
        read_log(recording.log)


def test_a_recording_begins_with_an_empty_directory(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "old").touch()
    with pytest.raises(ValueError, match="not empty"):
        Recording(tmp_path / "root", tmp_path / "log")


def test_without_a_compiler_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORED_SHIM_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompilerMissing, match="install gcc"):
        shim_path()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_hundreds_of_states_recover() -> None:
    """Three workloads and recoveries of their crash states, cut in turn."""
    states = fewer(6000, 0.15)
    figures = power_loss(seed=11, states=states)
    assert figures.states >= states * 5 // 6
    assert figures.is_sound, figures.failures
