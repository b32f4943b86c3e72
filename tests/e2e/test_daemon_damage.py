"""Damaged copies in a running daemon: never served, reported once, quarantined, replaced; their children return."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from kvstore_proto.v1 import admin_pb2 as pb
from tests.reference import forked, state
from tests.reference.conversations import holds, model, payloads_of, tokens_of
from tests.reference.damage import flip_in_dram, flip_on_disk
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon

MODEL = model()


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon("scrub.enabled=false") as running:
        yield running


def store(daemon: RunningDaemon, conversation: int, blocks: int, **options: str) -> None:
    with daemon.connect() as session:
        session.put(
            tokens_of(conversation, blocks),
            payloads=payloads_of(conversation, blocks, MODEL),
            wait="settled",
            **options,  # type: ignore[arg-type]
        )


def fetch(daemon: RunningDaemon, conversation: int, blocks: int) -> tuple[int, str]:
    """Return how many leading blocks are served, all of them right, and why no more."""
    with daemon.connect() as session, session.get(tokens_of(conversation, blocks)) as lease:
        assert holds(lease, payloads_of(conversation, blocks, MODEL)[: len(lease)])
        return len(lease), lease.reason


def spoil(daemon: RunningDaemon, conversation: int, blocks: int, depth: int) -> None:
    """Store a chain, leave it on NVMe alone, damage one block of it, and have a reader find that out."""
    store(daemon, conversation, blocks)
    daemon.drop("host")
    assert flip_on_disk(daemon, depth, conversation) == 1
    assert fetch(daemon, conversation, blocks) == (depth, "corrupt")


def kvctl(daemon: RunningDaemon, *arguments: str) -> tuple[int, Any]:
    command = [sys.executable, "-m", "kvctl.main", "--socket-dir", str(daemon.socket_dir), "--json"]
    done = forked.run([*command, *arguments])
    return done.returncode, json.loads(done.stdout)


def quarantined(daemon: RunningDaemon) -> list[pb.QuarantinedSlot]:
    return list(daemon.ask("Quarantine", pb.QuarantineRequest()).slots)


def test_a_damaged_block_is_a_miss_with_its_reason_and_the_next_put_replaces_it(daemon: RunningDaemon) -> None:
    spoil(daemon, 1, 4, depth=2)
    with daemon.connect() as session:
        assert session.lookup(tokens_of(1, 4)).reason == "corrupt"
    code, output = kvctl(daemon, "explain", "--recent", "1")
    assert (code, output["misses"][0]["cause"], output["misses"][0]["found_blocks"]) == (0, "corrupt", 2)
    code, output = kvctl(daemon, "explain", output["misses"][0]["key"])
    assert [block["cause"] for block in output["blocks"] if block["state"] == "missing"] == ["corrupt"]
    with daemon.connect() as session:
        receipt = session.put(tokens_of(1, 4), payloads=payloads_of(1, 4, MODEL), wait="settled")
    assert receipt.statuses == ["present", "present", "stored", "present"], "the rest was only cut off"
    assert receipt.durability[2] == "durable"
    daemon.drop("host")
    assert fetch(daemon, 1, 4)[0] == 4
    assert daemon.log.count("is damaged") == 1


def test_descendants_are_counted_and_reachable_again_with_their_parent(daemon: RunningDaemon) -> None:
    spoil(daemon, 1, 6, depth=1)
    assert eventually(lambda: daemon.status().orphaned_blocks == 4)
    with daemon.connect() as session:
        receipt = session.put(tokens_of(1, 2), payloads=payloads_of(1, 2, MODEL), wait="settled")
    assert receipt.statuses == ["present", "stored"]
    assert eventually(lambda: daemon.status().orphaned_blocks == 0)
    assert fetch(daemon, 1, 6)[0] == 6


def test_orphans_of_a_crash_are_counted_after_the_start(daemon: RunningDaemon) -> None:
    spoil(daemon, 1, 5, depth=0)
    store(daemon, 2, 1, durability="always")  # its sync covers the quarantine
    daemon.kill9()
    daemon.restart()
    assert eventually(lambda: daemon.status().orphaned_blocks == 4)


@pytest.mark.slow
def test_orphans_are_the_first_to_leave() -> None:
    """The orphans were used last, so that by its own order the policy would keep them."""
    with running_daemon(
        "scrub.enabled=false", "host.capacity=4MiB", "host.arena=1MiB", "host.staging=1MiB", "host.policy=lru",
        "nvme.capacity=8MiB", "nvme.slab=1MiB", "nvme.policy=lru", "limits.staging_per_client=1MiB",
    ) as daemon:  # fmt: skip
        others = 10
        for conversation in range(2, 2 + others):
            store(daemon, conversation, 4)
        spoil(daemon, 1, 12, depth=0)
        assert eventually(lambda: daemon.status().orphaned_blocks == 11)
        evicted = daemon.status().counters["evicted_blocks"]
        conversation = 100
        while daemon.status().counters["evicted_blocks"] == evicted:
            store(daemon, conversation, 4)
            conversation += 1
            assert conversation < 300, "nothing had to leave"
        assert eventually(lambda: daemon.status().orphaned_blocks < 11)
        gone = daemon.status().counters["evicted_blocks"] - evicted
        assert gone <= 11
        assert [fetch(daemon, other, 4)[0] for other in range(2, 2 + others)] == [4] * others


@pytest.mark.slow
def test_quarantine_is_listed_and_released(daemon: RunningDaemon) -> None:
    spoil(daemon, 1, 4, depth=2)
    (slot,) = quarantined(daemon)
    assert slot.reason == "the payload's checksum does not hold" and slot.tenant.startswith("uid-")
    assert not slot.stored_again and slot.fingerprint.startswith("test model:")
    store(daemon, 1, 4)
    code, output = kvctl(daemon, "quarantine", "list")
    assert code == 0 and output["limit"] == 16
    assert (output["slots"][0]["key"], output["slots"][0]["stored_again"]) == (slot.key, True)
    assert output["slots"][0]["location"].endswith(f".slab:{slot.offset}")
    assert daemon.tiers()["nvme"].used_by["quarantine"] == slot.bytes
    assert eventually(lambda: state.files_with(daemon.state_dir, slot.reason.encode()))
    daemon.kill9()
    daemon.restart()
    assert eventually(daemon.knows_its_state)
    (again,) = quarantined(daemon)
    assert (again.key, again.reason) == (slot.key, slot.reason), "it survives a crash"
    code, output = kvctl(daemon, "quarantine", "release", "77:4096")
    assert code == 1 and output["error"].startswith("77:4096 is not in quarantine")
    assert len(quarantined(daemon)) == 1
    assert kvctl(daemon, "quarantine", "release", f"{slot.slab}:{slot.offset}")[1]["released"] == 1
    assert quarantined(daemon) == [] and daemon.tiers()["nvme"].used_by["quarantine"] == 0
    daemon.kill9()
    daemon.restart()
    assert quarantined(daemon) == [], "nor does the release come undone"
    with pytest.raises(grpc.RpcError):
        daemon.ask("ReleaseQuarantine", pb.ReleaseQuarantineRequest())


def test_quarantine_is_bounded() -> None:
    with running_daemon("scrub.enabled=false", "nvme.quarantine_slots=2") as daemon:
        for conversation in range(1, 6):
            store(daemon, conversation, 1)
        daemon.drop("host")
        assert flip_on_disk(daemon, depth=0) == 5
        assert [fetch(daemon, conversation, 1) for conversation in range(1, 6)] == [(0, "corrupt")] * 5
        assert len(quarantined(daemon)) == 2
        assert daemon.status().counters["corrupt_blocks"] == 5
        assert kvctl(daemon, "quarantine", "release", "--all")[1]["released"] == 2


def test_only_an_operator_sees_quarantine(daemon: RunningDaemon) -> None:
    """Only the admin socket gives keys and places; the bytes are in files that only the daemon's user may read."""
    spoil(daemon, 1, 2, depth=0)
    assert (daemon.socket_dir / "admin.sock").stat().st_mode & 0o777 == 0o600
    for path in (daemon.nvme_dir, *daemon.nvme_dir.rglob("*.slab")):
        assert path.stat().st_mode & 0o077 == 0, path


def kvstored(*arguments: str) -> tuple[int, str, str]:
    done = forked.run([sys.executable, "-m", "kvstored", *arguments])
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_a_directory_is_inspected_while_its_daemon_runs_and_repaired_when_it_does_not(daemon: RunningDaemon) -> None:
    spoil(daemon, 1, 4, depth=2)
    store(daemon, 2, 1)
    key = quarantined(daemon)[0].key
    place = str(daemon.nvme_dir)
    code, output, _ = kvstored("inspect", place, "key", key)
    assert code == 0 and f"in use by process {daemon.pid}" in output and "quarantined" in output
    child = next(block for block in daemon.ask("Blocks", pb.BlocksRequest()).blocks if block.depth == 3)
    code, output, _ = kvstored("inspect", place, "block", child.key, "--json")
    assert (code, json.loads(output)["parent"], json.loads(output)["parent_stored"]) == (0, key, False)
    for arguments in (("check", place), ("check", place, "--repair")):
        code, _, said = kvstored(*arguments)
        assert code == 1 and f"in use by process {daemon.pid}" in said
    assert flip_on_disk(daemon, depth=1) == 1
    daemon.kill9()
    assert kvstored("check", place, "--payloads")[0] == 3
    code, output, _ = kvstored("check", place, "--payloads", "--repair")
    assert code == 0 and "did quarantine the slot" in output
    assert kvstored("check", place, "--payloads")[:2] == (0, "no damage found\n")
    daemon.restart()
    assert len(quarantined(daemon)) == 2
    assert fetch(daemon, 1, 4)[0] == 1 and fetch(daemon, 2, 1)[0] == 1


# DRAM


@pytest.mark.parametrize("mode", ["first", "always"])
def test_a_damaged_dram_copy_is_read_again_from_nvme(mode: str) -> None:
    with running_daemon("scrub.enabled=false", f"host.verify_reads={mode}") as daemon:
        store(daemon, 1, 4)
        assert flip_in_dram(daemon, depth=2) == 1
        assert fetch(daemon, 1, 4)[0] == 4
        status = daemon.status()
        assert (status.counters["corrupt_blocks"], status.counters["promoted_blocks"]) == (1, 1)
        assert status.counters["verified_reads"] == 4
        assert "is damaged in tier host" in daemon.log
        assert fetch(daemon, 1, 4)[0] == 4
        again = daemon.status().counters["verified_reads"] - 4
        assert again == (1 if mode == "first" else 4)
        if mode == "always":
            assert flip_in_dram(daemon, depth=1) == 1
            assert fetch(daemon, 1, 4)[0] == 4
            assert daemon.status().counters["corrupt_blocks"] == 2


def test_a_damaged_dram_copy_without_another_is_a_miss() -> None:
    with running_daemon("scrub.enabled=false", "host.verify_reads=first") as daemon:
        store(daemon, 1, 4, durability="none")
        assert flip_in_dram(daemon, depth=2) == 1
        assert fetch(daemon, 1, 4) == (2, "corrupt")
        assert eventually(lambda: daemon.status().orphaned_blocks == 1)
        store(daemon, 1, 4, durability="none")
        assert fetch(daemon, 1, 4)[0] == 4


def test_only_mapped_blocks_are_verified_for_who_wants_only_those() -> None:
    with running_daemon("scrub.enabled=false", "host.verify_reads=always") as daemon:
        store(daemon, 1, 4)
        assert flip_in_dram(daemon, depth=2) == 1
        with daemon.connect() as session, session.get(tokens_of(1, 4), promote=False) as lease:
            assert len(lease) == 2 and holds(lease, payloads_of(1, 2, MODEL))
        assert fetch(daemon, 1, 4)[0] == 4


def test_unless_asked_dram_is_not_verified(daemon: RunningDaemon) -> None:
    store(daemon, 1, 2)
    assert fetch(daemon, 1, 2)[0] == 2
    assert daemon.status().counters["verified_reads"] == 0
