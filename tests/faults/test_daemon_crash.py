"""kill -9 and damage on disk, seen by clients: what was answered durable is there, nothing is ever wrong."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvstore_client import Session
from kvstore_proto.arena import HEADER_BYTES
from kvstore_proto.v1 import admin_pb2 as pb
from kvstore_tiers.nvme.layout import FORMAT_VERSION
from tests.reference import forked
from tests.reference.conversations import holds, model, payloads_of, serves_whole, tokens_of
from tests.reference.examples import each_nth
from tests.reference.running_daemon import RunningDaemon, daemon_directory, ended_with, eventually, running_daemon

MODEL = model()
BLOCKS = 8
FAILPOINTS = (
    "host.before-copy=kill@20",
    "host.before-header=kill@20",
    "nvme.before-slot-write=kill@5",
    "nvme.after-slot-write=kill@13",
    "nvme.sync-start=kill@3",
    "nvme.after-data-sync=kill@2",
    "nvme.between-records=kill@2",
    "nvme.after-records-write=kill@2",
    "nvme.after-record-sync=kill@2",
)


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """One directory for all crashes: each starts on what the one before left."""
    with daemon_directory() as directory:
        yield directory


def put_until_killed(daemon: RunningDaemon, first: int) -> tuple[set[int], set[int]]:
    """Conversations answered durable as a whole, and all that were tried, until the failpoint kills the daemon."""
    durable: set[int] = set()
    tried: set[int] = set()
    with daemon.connect(MODEL, deadline_s=5.0) as session:
        for conversation in range(first, first + 40):
            tried.add(conversation)
            receipt = session.put(
                tokens_of(conversation, BLOCKS),
                payloads=payloads_of(conversation, BLOCKS, MODEL),
                durability=("always", "batch")[conversation % 2],
                wait="settled",
            )
            if receipt.durability == ["durable"] * BLOCKS:
                durable.add(conversation)
            if receipt.stored_blocks < BLOCKS or session.state != "connected":
                break
    daemon.wait_killed()
    return durable, tried


def must_be_sound(session: Session, durable: set[int], tried: set[int]) -> None:
    for conversation in tried:
        with session.get(tokens_of(conversation, BLOCKS)) as lease:
            assert holds(lease, payloads_of(conversation, len(lease), MODEL)), "wrong bytes"
            assert conversation not in durable or len(lease) == BLOCKS, f"durable and lost: {conversation}, {lease}"


@pytest.mark.parametrize("failpoint", each_nth(FAILPOINTS, 3))
def test_killed_at_any_point_of_a_put(place: Path, failpoint: str) -> None:
    daemon = RunningDaemon(place, failpoints=failpoint)
    with ended_with(daemon):
        daemon.start()
        durable, tried = put_until_killed(daemon, 1000 * (1 + FAILPOINTS.index(failpoint)))
        daemon.restart()
        with daemon.connect(MODEL) as session:
            must_be_sound(session, durable, tried)
            for conversation in tried:
                receipt = session.put(
                    tokens_of(conversation, BLOCKS), payloads=payloads_of(conversation, BLOCKS, MODEL), wait="settled"
                )
                assert receipt.visible_blocks == BLOCKS, receipt
            must_be_sound(session, tried, tried)
        daemon.stop()


def test_killed_again_and_again_while_writing_and_evicting() -> None:
    """More than NVMe holds, so that slots are reused; what is there after each crash is right."""
    with running_daemon("nvme.capacity=8MiB", "nvme.slab=1MiB", "host.capacity=8MiB", "host.staging=2MiB") as daemon:
        for life in range(2):
            with daemon.connect(MODEL, deadline_s=5.0) as session:
                for conversation in range(100 * life, 100 * life + 50):
                    session.put(tokens_of(conversation, BLOCKS), payloads=payloads_of(conversation, BLOCKS, MODEL))
                last = 100 * life + 99
                receipt = session.put(
                    tokens_of(last, BLOCKS), payloads=payloads_of(last, BLOCKS, MODEL), durability="always"
                )
                assert receipt.durability == ["durable"] * BLOCKS
                daemon.kill9()
            daemon.restart()
            tiers = daemon.tiers()
            assert tiers["nvme"].used_bytes <= tiers["nvme"].capacity_bytes and tiers["nvme"].blocks > 0
            with daemon.connect(MODEL) as session:
                found = sum(session.lookup(tokens_of(number, BLOCKS)).blocks for number in range(100 * life + 100))
                assert found > 100
                must_be_sound(session, {last}, {last, *range(100 * life, 100 * life + 50)})


def test_what_was_stored_without_durability_is_there_once_a_put_that_asked_for_it_was_answered(
    daemon: RunningDaemon,
) -> None:
    """Another client removes the blocks: the lookup index shows that they are there, and it names them alone."""
    written: list[int] = []

    def fill(destination: npt.NDArray[np.uint8]) -> None:
        written.append(len(destination))

    with daemon.connect(MODEL) as first, daemon.connect(MODEL) as second:
        for conversation in (1, 2):
            payloads = payloads_of(conversation, BLOCKS, MODEL)
            receipt = first.put(tokens_of(conversation, BLOCKS), payloads=payloads, durability="none", wait="settled")
            assert receipt.durability == ["volatile"] * BLOCKS
        assert eventually(lambda: second.probe(tokens_of(1, BLOCKS)).blocks == BLOCKS)
        receipt = second.put(tokens_of(1, BLOCKS), payloads=[fill] * BLOCKS, durability="always")
        assert receipt.statuses == ["present"] * BLOCKS and not written
        assert receipt.durability == ["durable"] * BLOCKS
        assert first.put(tokens_of(2, BLOCKS), payloads=payloads, durability="none").durability == ["volatile"] * BLOCKS
        daemon.kill9()
    daemon.restart()
    with daemon.connect(MODEL) as session:
        must_be_sound(session, {1}, {1, 2})
        assert session.lookup(tokens_of(2, BLOCKS)).blocks == 0, "no put asked for durability"
        receipt = session.put(tokens_of(1, BLOCKS), payloads=payloads_of(1, BLOCKS, MODEL), durability="none")
        assert receipt.statuses == ["present"] * BLOCKS and receipt.durability == ["durable"] * BLOCKS


# Damage


def stored(daemon: RunningDaemon, conversation: int, blocks: int = BLOCKS) -> list[pb.BlockStatus]:
    """Put a conversation durably; its blocks as listed, head first."""
    with daemon.connect(MODEL) as session:
        receipt = session.put(
            tokens_of(conversation, blocks), payloads=payloads_of(conversation, blocks, MODEL), durability="always"
        )
        assert receipt.durability == ["durable"] * blocks
        keys = session.keys(tokens_of(conversation, blocks))
    assert keys is not None
    wanted = {key.hex() for key in keys}
    listed = daemon.ask("Blocks", pb.BlocksRequest(limit=1000)).blocks
    return sorted((block for block in listed if block.key in wanted), key=lambda block: block.depth)


def flip(block: pb.BlockStatus, offset: int) -> None:
    """Damage one byte of a stored block, `offset` bytes into its slot."""
    path, _, start = block.location.rpartition(":")
    with open(path, "r+b") as slab:
        slab.seek(int(start) + offset)
        before = slab.read(1)
        slab.seek(-1, 1)
        slab.write(bytes([before[0] ^ 0x10]))


@pytest.mark.parametrize("offset", each_nth([HEADER_BYTES + 5000, 300, 20], 3), ids=["payload", "token ids", "key"])
def test_a_damaged_block_is_never_served_and_can_be_stored_again(daemon: RunningDaemon, offset: int) -> None:
    blocks = stored(daemon, 1)
    daemon.stop()
    flip(blocks[3], offset)
    check = forked.run([sys.executable, "-m", "kvstored", "check", "--payloads", str(daemon.nvme_dir)])
    assert check.returncode == 3, check.stdout
    daemon.restart()
    with daemon.connect(MODEL) as session:
        with session.get(tokens_of(1, BLOCKS)) as lease:
            assert holds(lease, payloads_of(1, 3, MODEL)) and lease.reason == "corrupt"
        status = daemon.status()
        assert status.counters["corrupt_blocks"] == 1
        assert daemon.tiers()["nvme"].quarantined_blocks == 1
        found = session.lookup(tokens_of(1, BLOCKS))
        assert (found.blocks, found.reason) == (3, "corrupt")
        again = session.put(tokens_of(1, BLOCKS), payloads=payloads_of(1, BLOCKS, MODEL), durability="always")
        assert again.statuses[3] == "stored" and again.statuses.count("present") == BLOCKS - 1
        with session.get(tokens_of(1, BLOCKS)) as lease:
            assert holds(lease, payloads_of(1, BLOCKS, MODEL)), "the chain is whole again"
    daemon.kill9()
    daemon.restart()
    assert serves_whole(daemon, 1, BLOCKS)
    daemon.process.kill()  # type: ignore[union-attr]  # its directory keeps the quarantined bytes: no clean check
    daemon.process.wait()  # type: ignore[union-attr]


def test_a_truncated_slab_costs_its_blocks_only(daemon: RunningDaemon) -> None:
    stored(daemon, 1, 200)  # of 20 KiB each: just under one slab of 4 MiB
    daemon.stop()
    slab = sorted((daemon.nvme_dir / "slabs").glob("*.slab"))[0]
    with open(slab, "r+b") as file:
        file.truncate(slab.stat().st_size // 2)
    daemon.restart()
    with daemon.connect(MODEL) as session:
        with session.get(tokens_of(1, 200)) as lease:
            assert len(lease) < 200 and holds(lease, payloads_of(1, len(lease), MODEL))
        receipt = session.put(tokens_of(1, 200), payloads=payloads_of(1, 200, MODEL), wait="settled")
        assert receipt.visible_blocks == 200
        with session.get(tokens_of(1, 200)) as lease:
            assert holds(lease, payloads_of(1, len(lease), MODEL)) and len(lease) > 0
    daemon.kill9()


def test_a_directory_of_a_newer_version_is_left_alone(daemon: RunningDaemon) -> None:
    stored(daemon, 1)
    daemon.stop()
    (daemon.nvme_dir / "format").write_text("format_version: 99\n")
    result = subprocess.run(daemon.command(), capture_output=True, text=True, timeout=60)
    assert result.returncode == 1 and "format 99" in result.stderr and "Traceback" not in result.stderr
    (daemon.nvme_dir / "format").write_text(f"format_version: {FORMAT_VERSION}\n")
    daemon.restart()
    assert serves_whole(daemon, 1, BLOCKS)


def test_a_full_disk_costs_durability_not_service() -> None:
    """Every write to the medium fails; puts and gets go on in DRAM and say what they are."""
    failing = "nvme.before-slot-write=error:ENOSPC"
    settings = ("host.capacity=8MiB", "host.staging=2MiB")
    with running_daemon(*settings, failpoints=failing) as daemon, daemon.connect(MODEL) as session:
        for conversation in range(60):  # more than DRAM holds
            payloads = payloads_of(conversation, BLOCKS, MODEL)
            receipt = session.put(tokens_of(conversation, BLOCKS), payloads=payloads, wait="settled")
            assert receipt.statuses == ["stored"] * BLOCKS, (conversation, receipt)
            assert receipt.durability == ["volatile"] * BLOCKS
            with session.get(tokens_of(conversation, BLOCKS)) as lease:
                assert holds(lease, payloads)
        assert daemon.status().counters["write_failures"] > 0
        more = count(60)

        def is_full() -> bool:  # a probe finds room, as the disk itself has some: until the next write
            session.put(tokens_of(next(more), BLOCKS), payloads=payloads, wait="settled")
            status = daemon.status()
            return daemon.tiers()["nvme"].state == "full" and bool(status.warnings)

        assert eventually(is_full)


def test_a_medium_that_cannot_be_read_is_a_miss(daemon: RunningDaemon) -> None:
    stored(daemon, 1)
    daemon.stop()
    daemon.restart(failpoints="nvme.read=error:EIO@1")
    with daemon.connect(MODEL) as session:
        with session.get(tokens_of(1, BLOCKS)) as lease:
            assert len(lease) < BLOCKS and holds(lease, payloads_of(1, len(lease), MODEL))
        assert daemon.status().counters["read_failures"] == 1
        with session.get(tokens_of(1, BLOCKS)) as lease:
            assert holds(lease, payloads_of(1, BLOCKS, MODEL)), "a passing error loses nothing"


@pytest.mark.parametrize(("holder", "durability"), [("off", "always"), ("holder", "none")])
def test_expiry_and_priority_outlive_a_crash_and_so_does_a_durable_pin(holder: str, durability: str) -> None:
    def shown(daemon: RunningDaemon) -> set[tuple[bool, int, bool]]:
        listed = daemon.ask("Blocks", pb.BlocksRequest()).blocks
        return {(3500 < block.expires_in_s <= 3600, block.priority, bool(block.pinned_by)) for block in listed}

    def put(session: Session, conversation: int, **terms: Any) -> None:
        payloads = payloads_of(conversation, BLOCKS, MODEL)
        receipt = session.put(
            tokens_of(conversation, BLOCKS), payloads=payloads, durability=durability, wait="settled", **terms
        )
        assert receipt.stored_blocks == BLOCKS

    with running_daemon(f"host.warm_restart={holder}") as daemon:
        with daemon.connect(MODEL) as session:
            put(session, 1, ttl=3600, priority=-2, pin="a")
            put(session, 2)
            put(session, 3, priority=7)
            put(session, 4, ttl=1)
        assert shown(daemon) >= {(True, -2, True), (False, 0, False), (False, 7, False)}
        daemon.kill9()
        daemon.start()
        assert shown(daemon) - {(False, 0, False)} == {(True, -2, durability == "always"), (False, 7, False)}
        with daemon.connect(MODEL) as session:
            assert eventually(lambda: session.lookup(tokens_of(4, BLOCKS)).reason == "expired")
            assert session.lookup(tokens_of(1, BLOCKS)).blocks == BLOCKS
