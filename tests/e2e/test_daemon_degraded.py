"""A real daemon whose disk goes bad: engines are answered at once, DRAM is served, health says so, and it
comes back without a restart."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvstore_client
from kvstore_proto.v1 import admin_pb2
from tests.e2e.test_daemon_health import NOT_SERVING, SERVING, check
from tests.reference.conversations import found_blocks, holds, model, payloads_of, put_conversation, tokens_of
from tests.reference.running_daemon import RunningDaemon, daemon_directory, ended_with, eventually, running_daemon

MODEL = model()
BLOCKS = 12


def put(daemon: RunningDaemon, conversation: int, blocks: int = BLOCKS, **how: str) -> list[str]:
    """Put blocks, and return the receipt's durability of each; all must have been stored."""
    with daemon.connect(MODEL) as session:
        receipt = put_conversation(session, conversation, blocks, wait="settled", **how)
        assert receipt.stored_blocks == blocks, receipt.statuses
        return list(receipt.durability)


def got(daemon: RunningDaemon, conversation: int) -> int:
    with daemon.connect(MODEL) as session:
        return found_blocks(session, conversation, BLOCKS)


def state(daemon: RunningDaemon) -> str:
    return str(daemon.tiers()["nvme"].state)


@pytest.mark.slow  # the probe comes after ten seconds
def test_reads_that_fail_shed_the_tier_and_a_probe_brings_it_back() -> None:
    with running_daemon(failpoints="nvme.read=error:EIO@1-12;nvme.probe=error:EIO@1-2") as daemon:
        assert set(put(daemon, 1)) == {"durable"}
        daemon.drop("host")
        assert check(daemon, "data", "kvstored.nvme") == SERVING
        assert got(daemon, 1) == 0
        assert eventually(lambda: state(daemon) == "failed")
        assert check(daemon, "data", "kvstored.nvme") == NOT_SERVING
        assert check(daemon, "data") == SERVING and check(daemon, "admin", "kvstored.host") == SERVING
        status = daemon.status()
        assert [(part.part, part.mode) for part in status.degraded] == [("nvme", "failed")]
        assert any("nvme is failed" in warning for warning in status.warnings)
        with daemon.connect(MODEL) as session:
            found = session.lookup(tokens_of(1, BLOCKS))
            assert found.blocks == 0 and found.reason == "read_failed"
        assert set(put(daemon, 1)) == {"volatile"}, "the same blocks are taken into DRAM meanwhile"
        assert got(daemon, 1) == BLOCKS
        assert eventually(lambda: state(daemon) == "ok")
        assert check(daemon, "data", "kvstored.nvme") == SERVING
        assert set(put(daemon, 2)) == {"durable"}
        daemon.drop("host")
        assert eventually(lambda: got(daemon, 2) == BLOCKS, 30), "reads that were not used up may fail once more"
        counters = daemon.status().counters
        said = daemon.log.count("nvme is failed") + daemon.log.count("nvme is ok again")
        assert said == counters["degraded_transitions"] + counters["degraded_recoveries"] >= 2


def test_a_medium_that_becomes_read_only_serves_what_it_has() -> None:
    with running_daemon(failpoints="nvme.before-slot-write=error:EROFS@13-13;nvme.probe=error:EROFS@1-1") as daemon:
        assert set(put(daemon, 1)) == {"durable"}
        assert "volatile" in put(daemon, 2)
        assert eventually(lambda: state(daemon) == "read-only")
        status = daemon.status()
        assert len(status.warnings) == len(status.degraded), "what is degraded is warned of once"
        daemon.drop("host", discard=True)
        assert got(daemon, 1) == BLOCKS
        assert eventually(lambda: state(daemon) == "ok")
        assert set(put(daemon, 3)) == {"durable"}


@pytest.mark.slow  # noticed after ten seconds
def test_a_directory_that_is_removed_is_noticed_and_dram_goes_on() -> None:
    with daemon_directory() as directory:
        daemon = RunningDaemon(directory)
        with ended_with(daemon):
            daemon.start()
            assert set(put(daemon, 1)) == {"durable"}
            shutil.rmtree(daemon.nvme_dir)
            assert eventually(lambda: state(daemon) == "read-only")
            assert any("is gone" in part.reason for part in daemon.status().degraded)
            assert set(put(daemon, 2)) == {"volatile"}
            assert got(daemon, 2) == BLOCKS
            daemon.kill9()


def test_why_a_block_is_volatile_is_explained() -> None:
    with running_daemon("nvme.admission=second-touch") as daemon:
        assert set(put(daemon, 1)) == {"volatile"}
        assert set(put(daemon, 2, durability="none")) == {"volatile"}
        keys = [block.key for block in daemon.ask("Blocks", admin_pb2.BlocksRequest()).blocks]
        reply = daemon.ask("Explain", admin_pb2.ExplainRequest(keys=keys))
        assert (
            sorted(block.volatile_because for block in reply.blocks) == ["admission"] * BLOCKS + ["not-asked"] * BLOCKS
        )
        assert daemon.status().counters["admission_refused_blocks"] == BLOCKS


def test_a_budget_is_kept_over_kill_9() -> None:
    setting = "nvme.endurance_bytes_per_day=4MiB"
    with running_daemon(setting) as daemon:
        durability = [word for conversation in range(1, 12) for word in put(daemon, conversation)]
        assert "volatile" in durability and "durable" in durability
        before = daemon.status().endurance
        assert before.scarce and before.left_bytes <= before.bytes_per_day // 2
        daemon.kill9()
        daemon.restart()
        assert eventually(daemon.knows_its_state)
        after = daemon.status().endurance
        assert after.left_bytes <= before.left_bytes + (1 << 20), "a crash gives nothing back"
        spent = durability.count("durable") * (17 << 10)
        assert spent <= after.spent_bytes <= before.bytes_per_day + (1 << 16)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["state.commit", "endurance.saved"])
def test_killed_while_a_lease_is_saved(place: str) -> None:
    """The saved lease is the old or the new one, whole; what was spent of it is never there again."""
    with running_daemon("nvme.endurance_bytes_per_day=4MiB", failpoints=f"{place}=kill@10") as daemon:
        durable = 0
        with contextlib.suppress(kvstore_client.DaemonUnavailable, kvstore_client.KVStoreError, AssertionError):
            for conversation in range(1, 40):
                durable += put(daemon, conversation, 1).count("durable")
        daemon.wait_killed()
        daemon.restart()
        assert eventually(daemon.knows_its_state)
        budget = daemon.status().endurance
        assert not budget.trouble
        assert durable and budget.left_bytes <= budget.bytes_per_day - durable * (20 << 10)


@pytest.fixture
def tiny_disk() -> Iterator[Path]:
    """A file system of 8 MiB."""
    with daemon_directory() as directory:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=8m,mode=700", "kvstored-test", directory],
            capture_output=True,
            text=True,
        )
        if mounted.returncode:
            pytest.skip(f"needs the right to mount a tmpfs: {mounted.stderr.strip()}")
        try:
            yield directory
        finally:
            subprocess.run(["umount", "-l", directory], check=False)


@pytest.mark.slow  # ten seconds; a disk that only says so is in the quick ones
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small file system")
def test_a_disk_that_is_really_full(tiny_disk: Path) -> None:
    """Another user's file takes the room that the configuration promised us."""
    (tiny_disk / "somebody-else").write_bytes(bytes(3 << 20))
    with running_daemon(f"nvme.path={tiny_disk}/nvme", "nvme.capacity=7MiB", "nvme.slab=2MiB") as daemon:
        assert set(put(daemon, 1)) == {"durable"}
        for conversation in range(2, 40):
            put(daemon, conversation)
        assert eventually(lambda: state(daemon) == "full")
        assert check(daemon, "data", "kvstored.nvme") == SERVING, "what is there is read and overwritten"
        assert got(daemon, 39) == BLOCKS
        assert set(put(daemon, 50)) <= {"durable", "volatile"}
        (tiny_disk / "somebody-else").unlink()
        deadline = time.monotonic() + 60
        conversation = 100
        while state(daemon) != "ok" and time.monotonic() < deadline:
            put(daemon, conversation)
            conversation += 1
        assert state(daemon) == "ok", "it grows again by itself"


@pytest.mark.slow  # like a directory that is removed, it is noticed after ten seconds
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small file system")
def test_a_file_system_that_is_unmounted(tiny_disk: Path) -> None:
    with running_daemon(f"nvme.path={tiny_disk}/nvme", "nvme.capacity=5MiB", "nvme.slab=2MiB") as daemon:
        assert set(put(daemon, 1)) == {"durable"}
        assert subprocess.run(["umount", "-l", str(tiny_disk)]).returncode == 0
        assert eventually(lambda: state(daemon) == "read-only")
        assert set(put(daemon, 2)) == {"volatile"}
        assert got(daemon, 2) == BLOCKS and got(daemon, 1) == BLOCKS


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A memory cgroup of 192 MiB, of whichever version this machine has."""
    version_1 = Path("/sys/fs/cgroup/memory")
    folder = (version_1 if version_1.is_dir() else Path("/sys/fs/cgroup")) / f"kvstored-test-{os.getpid()}"
    try:
        folder.mkdir()
        limit = "memory.limit_in_bytes" if version_1.is_dir() else "memory.max"
        (folder / limit).write_text(str(192 << 20))
    except OSError as error:
        pytest.skip(f"needs the right to make a memory cgroup: {error}")
    try:
        yield folder
    finally:
        eventually(lambda: not (folder / "cgroup.procs").read_text().strip())
        folder.rmdir()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make a memory cgroup")
def test_a_cgroup_that_is_too_small_for_the_configured_capacity(small_cgroup: Path) -> None:
    """The kernel would kill the daemon without `host.min_free`: 384 MiB of arenas do not go into 192 MiB."""
    settings = (
        "host.capacity=384MiB",
        "host.arena=8MiB",
        "host.min_free=64MiB",
        "nvme.capacity=1GiB",
        "nvme.slab=32MiB",
    )
    large = model("large", kib_a_block=512)
    with running_daemon(*settings) as daemon:
        (small_cgroup / "cgroup.procs").write_text(str(daemon.pid))
        with daemon.connect(large) as session:
            for conversation in range(100):
                tokens, payloads = tokens_of(conversation, 8), payloads_of(conversation, 8, large)
                session.put(tokens, payloads=payloads, wait="settled")
        assert daemon.process is not None and daemon.process.poll() is None, "it was killed for its memory"
        status = daemon.status()
        assert [(part.part, part.mode) for part in status.degraded] == [("host", "shrunk")]
        assert status.counters["host_shrunk_bytes"] > 0
        assert check(daemon, "data", "kvstored.host") == SERVING
        with daemon.connect(large) as session, session.get(tokens_of(99, 8)) as lease:
            assert holds(lease, payloads_of(99, 8, large))
