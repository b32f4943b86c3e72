"""kill -9, an upgrade, an orderly stop with warm restart: every block that was in DRAM is there, leases still hold."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvstore_client import Session
from kvstore_proto.arena import HEADER_BYTES
from kvstore_proto.v1 import admin_pb2 as pb
from kvstore_tiers.child_processes import send_packet
from kvstored.lifetime.warm.holders import HOLDER_SOCKET
from tests.reference import state
from tests.reference.conversations import found_blocks, holds, model, payloads_of, put_conversation, tokens_of
from tests.reference.held_memory import held_memory, holder_pid
from tests.reference.running_daemon import RunningDaemon, daemon_directory, ended_with, eventually, running_daemon

WARM = (
    "host.warm_restart=holder", "host.capacity=24MiB", "host.staging=4MiB", "nvme.enabled=false", "host.policy=lru",
)  # fmt: skip
MODEL = model()
OTHER = model("other weights", kib_a_block=32)
BLOCKS = 8
OTHER_GID = 12345
TENANTS = f'[[tenant]]\nname = "second"\ngids = [{OTHER_GID}]\n'


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(*WARM) as running:
        yield running


def put(session: Session, conversation: int, durability: str = "none") -> None:
    put_conversation(session, conversation, BLOCKS, durability=durability)


def found(session: Session, conversation: int) -> int:
    return found_blocks(session, conversation, BLOCKS)


def push_out(session: Session, first: int, conversations: int = 120) -> None:
    """Other blocks, more than DRAM holds."""
    for conversation in range(first, first + conversations):
        session.put(
            tokens_of(conversation, BLOCKS), payloads=payloads_of(conversation, BLOCKS, session.fingerprint),
            durability="none",
        )  # fmt: skip


@contextmanager
def as_group(gid: int) -> Iterator[None]:
    before = os.getegid()
    os.setegid(gid)
    try:
        yield
    finally:
        os.setegid(before)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be two tenants")
def test_every_block_of_every_tenant_is_there(tmp_path_factory: pytest.TempPathFactory) -> None:
    config = tmp_path_factory.mktemp("config") / "kvstored.toml"
    config.write_text(TENANTS)
    with running_daemon(*WARM, "scrub.books_s=0.2", config=config) as daemon:
        before = {}
        for fingerprint, gid, first in ((MODEL, 0, 0), (OTHER, 0, 100), (MODEL, OTHER_GID, 200)):
            with as_group(gid), daemon.connect(fingerprint) as session:
                for conversation in range(first, first + 10):
                    put(session, conversation)
                before[first] = session.tenant
        assert before == {0: "uid-0", 100: "uid-0", 200: "second"}
        assert eventually(lambda: daemon.status().clients == 0)
        names = (b"second", b"other weights")
        assert eventually(lambda: all(state.files_with(daemon.state_dir, name) for name in names)), "for labels"
        host = daemon.tiers()["host"]
        blocks = {block.key: block for block in daemon.ask("Blocks", pb.BlocksRequest(limit=1000)).blocks}
        assert host.blocks == len(blocks) == 240
        daemon.kill9()
        daemon.restart()
        assert eventually(daemon.knows_its_state)
        again = daemon.tiers()["host"]
        assert (again.blocks, again.used_bytes, dict(again.used_by)) == (240, host.used_bytes, dict(host.used_by))
        listed = {block.key: block for block in daemon.ask("Blocks", pb.BlocksRequest(limit=1000)).blocks}
        for key, block in blocks.items():
            now = listed[key]
            assert (now.tenant, now.depth, now.payload_bytes, now.children, now.fingerprint) == (
                block.tenant, block.depth, block.payload_bytes, block.children, block.fingerprint,
            )  # fmt: skip
        status = daemon.status()
        assert status.counters["warm_blocks"] == 240 and status.limbo_bytes == 0 and status.leases == 0
        assert status.counters["warm_dropped_arenas"] == status.counters["warm_dropped_slots"] == 0
        for fingerprint, gid, first in ((MODEL, 0, 0), (OTHER, 0, 100), (MODEL, OTHER_GID, 200)):
            with as_group(gid), daemon.connect(fingerprint) as session:
                for conversation in range(first, first + 10):
                    assert found(session, conversation) == BLOCKS
        with as_group(OTHER_GID), daemon.connect(MODEL) as session:
            assert found(session, 0) == 0, "another tenant's"
            assert session.delete(tokens_of(200, 1)).continued == 1, "a block that others continue stays"
            push_out(session, 1000)
            assert found(session, 1119) == BLOCKS
        tiers = daemon.tiers()["host"]
        assert tiers.used_bytes <= tiers.capacity_bytes and daemon.status().counters["evicted_blocks"] > 0
        walks = daemon.status().books.walks
        assert eventually(lambda: daemon.status().books.walks > walks + 1)
        assert list(daemon.status().books.broken) == [], "the daemon's own books are in order"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be two tenants")
def test_what_a_tenant_is_owed_holds_before_its_first_client_is_back(tmp_path: Path) -> None:
    """The tenant's blocks are there again, so are others who want their room."""
    config = tmp_path / "kvstored.toml"
    config.write_text(TENANTS + 'host_min = "8MiB"\n')
    with running_daemon(*WARM, config=config) as daemon:
        with as_group(OTHER_GID), daemon.connect(MODEL) as session:
            for conversation in range(3):
                put(session, conversation)
        daemon.kill9()
        daemon.restart()
        with daemon.connect(MODEL) as session:
            push_out(session, 100)
        with as_group(OTHER_GID), daemon.connect(MODEL) as session:
            assert [found(session, conversation) for conversation in range(3)] == [BLOCKS] * 3


def test_a_lease_outlives_the_daemon(daemon: RunningDaemon) -> None:
    """The lease holds its bytes under eviction pressure, is valid again once the client is back, and is released as
    ever.
    """
    with daemon.connect(MODEL) as reader, daemon.connect(MODEL) as writer:
        put(writer, 1)
        expected = payloads_of(1, BLOCKS, MODEL)
        lease = reader.get(tokens_of(1, BLOCKS))
        views = [lease.payload(block) for block in range(BLOCKS)]
        assert lease.valid
        daemon.kill9()
        assert not lease.valid and holds(lease, expected), "no daemon vouches for it, the bytes are there"
        daemon.restart()
        assert eventually(lambda: reader.state == writer.state == "connected")
        assert lease.valid and lease.renew() and daemon.status().counters["warm_leases"] == 1
        push_out(writer, 100)
        assert all(np.array_equal(view, payload) for view, payload in zip(views, expected, strict=True))
        assert lease.valid and holds(lease, expected)
        with reader.get(tokens_of(1, BLOCKS)) as second:
            assert holds(second, expected)
            assert np.shares_memory(second.payload(0), views[0]), "an arena that is mapped is not mapped again"
        assert daemon.status().leases > 0
        lease.release()
        assert eventually(lambda: daemon.status().leases == 0)
        push_out(writer, 400)
        assert found(reader, 1) == 0, "its slots are reused"


def test_a_lease_released_while_there_is_no_daemon_is_released(daemon: RunningDaemon) -> None:
    with daemon.connect(MODEL) as session:
        put(session, 1)
        kept, lease = session.get(tokens_of(1, BLOCKS)), session.get(tokens_of(1, BLOCKS))
        daemon.kill9()
        lease.release()
        daemon.restart()
        assert eventually(lambda: session.state == "connected")
        assert eventually(lambda: daemon.status().leases == 1)
        assert kept.valid and not lease.valid
        kept.release()


CLIENT = """
import sys, time
sys.path.insert(0, '.')
from pathlib import Path
from tests.reference.conversations import model, tokens_of
from tests.reference.running_daemon import RunningDaemon
session = RunningDaemon(Path(sys.argv[1])).connect(model())
lease = session.get(tokens_of(1, 8))
print(len(lease), flush=True)
time.sleep(120)
"""


def test_slots_are_held_until_their_former_client_has_ended() -> None:
    """A client that is stopped cannot come back: its slots wait in limbo for it, and for nothing after its end."""
    with running_daemon(*WARM, "limits.lease_ttl_ms=200") as daemon:
        with daemon.connect(MODEL) as session:
            put(session, 1)
        command = [sys.executable, "-c", CLIENT, str(daemon.directory)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout is not None and client.stdout.readline() == "8\n"
            os.kill(client.pid, signal.SIGSTOP)
            try:
                for _ in range(2):  # a second crash does not forget it either
                    daemon.kill9()
                    daemon.restart()
                    # A restart keeps the lease. Only after its end may its blocks be evicted, and 120 conversations
                    # are put in about the time of a lease.
                    assert eventually(lambda: daemon.status().counters["expired_leases"] == 1)
                    with daemon.connect(MODEL) as session:
                        push_out(session, 100)
                    assert daemon.status().limbo_bytes == BLOCKS * (HEADER_BYTES + MODEL.payload_bytes())
            finally:
                client.kill()
        assert eventually(lambda: daemon.status().limbo_bytes == 0 and daemon.status().leases == 0)
        tiers = daemon.tiers()["host"]
        assert tiers.used_bytes <= tiers.capacity_bytes


def test_a_deleted_block_does_not_come_back_from_limbo() -> None:
    """The block's bytes are in a slot that a reader holds, under a header; it is gone all the same."""
    with running_daemon(*WARM, "limits.lease_ttl_ms=100") as daemon, daemon.connect(MODEL) as session:
        put(session, 1)
        lease = session.get(tokens_of(1, BLOCKS))
        assert eventually(lambda: not lease.valid)
        assert eventually(lambda: session.delete(tokens_of(1, BLOCKS)).blocks == BLOCKS)
        assert daemon.status().limbo_bytes > 0
        daemon.kill9()
        daemon.restart()
        assert eventually(lambda: session.state == "connected")
        assert found(session, 1) == 0 and daemon.status().limbo_bytes > 0
        assert holds(lease, payloads_of(1, BLOCKS, MODEL)), "the reader's bytes are there"
        lease.release()
        assert eventually(lambda: daemon.status().limbo_bytes == 0)


@pytest.mark.parametrize("failpoint", ["host.before-copy", "host.before-header"])
def test_killed_in_the_middle_of_a_copy(failpoint: str) -> None:
    """Every answered block is there, every other one is there whole or not at all."""
    with daemon_directory() as place:
        daemon = RunningDaemon(place, *WARM, failpoints=f"{failpoint}=kill@37")
        with ended_with(daemon):
            daemon.start()
            stored = 0
            with daemon.connect(MODEL, deadline_s=5.0) as session:
                while daemon.process is not None and daemon.process.poll() is None and stored < 40:
                    receipt = session.put(
                        tokens_of(stored, BLOCKS), payloads=payloads_of(stored, BLOCKS, MODEL), durability="none"
                    )
                    if receipt.visible_blocks < BLOCKS:
                        break
                    stored += 1
            daemon.wait_killed()
            assert 0 < stored < 40
            daemon.restart()
            with daemon.connect(MODEL) as session:
                assert [found(session, conversation) for conversation in range(stored)] == [BLOCKS] * stored
                assert found(session, stored) < BLOCKS
                put(session, stored)
            daemon.stop()


def test_killed_while_taking_over(daemon: RunningDaemon) -> None:
    with daemon.connect(MODEL) as session:
        for conversation in range(30):
            put(session, conversation)
    daemon.kill9()
    for nth in (1, 2):
        daemon.failpoints = f"warm.arena-taken-over=kill@{nth}"
        with pytest.raises(AssertionError):
            daemon.start()
    daemon.restart()
    with daemon.connect(MODEL) as session:
        assert [found(session, conversation) for conversation in range(30)] == [BLOCKS] * 30
    assert daemon.status().counters["warm_blocks"] == 30 * BLOCKS


def test_an_orderly_stop_keeps_blocks_and_leases(daemon: RunningDaemon) -> None:
    """The stop is the one of an upgrade: SIGTERM, then the next version starts."""
    with daemon.connect(MODEL) as session:
        put(session, 1)
        lease = session.get(tokens_of(1, BLOCKS))
        daemon.stop()
        assert not lease.valid
        daemon.restart()
        assert eventually(lambda: session.state == "connected")
        assert lease.valid and holds(lease, payloads_of(1, BLOCKS, MODEL))
        assert found(session, 1) == BLOCKS
        lease.release()


def test_blocks_join_their_copies_on_nvme() -> None:
    with running_daemon("host.warm_restart=holder", "host.capacity=24MiB", "host.staging=4MiB") as daemon:
        with daemon.connect(MODEL) as session:
            put(session, 1, durability="always")
            put(session, 2)
        daemon.kill9()
        daemon.restart()
        tiers = daemon.tiers()
        assert (tiers["host"].blocks, tiers["nvme"].blocks) == (2 * BLOCKS, BLOCKS)
        assert daemon.status().blocks == 2 * BLOCKS
        with daemon.connect(MODEL) as session:
            assert found(session, 1) == found(session, 2) == BLOCKS
            daemon.drop("host")
            assert found(session, 1) == found(session, 2) == BLOCKS, "from NVMe, both by now"


# A holder and its end


def test_an_interrupt_gives_the_memory_back(daemon: RunningDaemon) -> None:
    with daemon.connect(MODEL) as session:
        put(session, 1)
    holder = holder_pid(daemon.state_dir)
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGINT)
    assert daemon.process.wait(60) == 0
    assert eventually(lambda: not Path(f"/proc/{holder}").exists())
    daemon.restart()
    assert daemon.status().blocks == 0


@pytest.mark.slow
def test_a_holder_does_not_outlive_its_directory_or_its_patience() -> None:
    with running_daemon(*WARM) as daemon:
        first = holder_pid(daemon.state_dir)
        daemon.kill9()
    assert eventually(lambda: not Path(f"/proc/{first}").exists()), "its directory is gone"
    with running_daemon(*WARM, "host.warm_linger_s=0") as daemon:
        second = holder_pid(daemon.state_dir)
        daemon.kill9()
        assert eventually(lambda: not Path(f"/proc/{second}").exists()), "no daemon came"
        daemon.restart()
        assert daemon.status().blocks == 0


def test_a_holder_that_is_killed_is_replaced(daemon: RunningDaemon) -> None:
    with daemon.connect(MODEL) as session:
        put(session, 1)
        first = holder_pid(daemon.state_dir)
        os.kill(first, signal.SIGKILL)
        put(session, 2)
        assert eventually(lambda: holder_pid(daemon.state_dir) not in (0, first))
        assert eventually(lambda: len(held_memory(daemon.state_dir)) >= 1)
    daemon.kill9()
    daemon.restart()
    with daemon.connect(MODEL) as session:
        assert found(session, 1) == found(session, 2) == BLOCKS


# What cannot be taken over


def test_a_smaller_capacity_keeps_what_fits(daemon: RunningDaemon) -> None:
    with daemon.connect(MODEL) as session:
        for conversation in range(60):
            put(session, conversation)
    before = daemon.tiers()["host"].blocks
    daemon.kill9()
    daemon.settings = (*daemon.settings, "host.capacity=14MiB")
    daemon.restart()
    tiers = daemon.tiers()["host"]
    assert 0 < tiers.blocks < before and tiers.used_bytes <= tiers.capacity_bytes == 14 << 20
    assert daemon.status().counters["warm_dropped_arenas"] > 0
    with daemon.connect(MODEL) as session:
        kept = [found(session, conversation) for conversation in range(60)]
        assert sum(kept) > 0
        for conversation in range(100, 120):
            put(session, conversation)
    assert daemon.tiers()["host"].used_bytes <= 14 << 20


def test_sealed_arenas_are_not_kept(daemon: RunningDaemon) -> None:
    with daemon.connect(MODEL) as session:
        put(session, 1)
    holder = holder_pid(daemon.state_dir)
    daemon.kill9()
    daemon.settings = (*daemon.settings, "host.sealed=true")
    with pytest.raises(AssertionError, match=r"host\.sealed = true forbids"):
        daemon.start()
    daemon.settings = (*daemon.settings, "host.warm_restart=auto")
    daemon.restart()
    assert daemon.status().blocks == 0
    assert eventually(lambda: not Path(f"/proc/{holder}").exists()), "what was kept is given back"


def test_damaged_headers_and_foreign_memory_are_dropped_and_counted(daemon: RunningDaemon) -> None:
    with daemon.connect(MODEL) as session:
        for conversation in range(20):
            put(session, conversation)
    daemon.kill9()
    slot = HEADER_BYTES + MODEL.payload_bytes()
    arenas = held_memory(daemon.state_dir)
    first, *_, last = sorted(arenas)
    os.pwrite(arenas[first], b"\xff", 30)  # in the parent's key
    os.pwrite(arenas[first], b"\0\0", slot + 6 + 114)  # in the generation
    os.fchmod(arenas[last], 0o666)
    for descriptor in arenas.values():
        os.close(descriptor)
    daemon.restart()
    status = daemon.status()
    assert status.counters["warm_dropped_slots"] >= 1 and status.counters["warm_dropped_arenas"] == 1
    with daemon.connect(MODEL) as session:
        kept = sum(found(session, conversation) for conversation in range(20))
        assert 0 < kept < 20 * BLOCKS
        for conversation in range(20):
            put(session, conversation)
        assert [found(session, conversation) for conversation in range(20)] == [BLOCKS] * 20


def test_another_format_is_dropped_with_a_line(daemon: RunningDaemon) -> None:
    with daemon.connect(MODEL) as session:
        put(session, 1)
    daemon.kill9()
    ledger = held_memory(daemon.state_dir, "ledger")["ledger"]
    os.pwrite(ledger, b"\x63", 8)
    os.close(ledger)
    daemon.restart()
    assert daemon.status().blocks == 0 and "another format" in daemon.log
    assert "Traceback" not in daemon.log
    with daemon.connect(MODEL) as session:
        put(session, 1)
    daemon.kill9()
    daemon.restart()
    assert daemon.status().blocks == BLOCKS


@pytest.mark.slow
def test_killed_at_random_under_load() -> None:
    """Again and again, between puts, gets and evictions: what was there before, is there; never a wrong byte."""
    chosen = np.random.default_rng(4)
    with running_daemon(*WARM, "limits.lease_ttl_ms=500") as daemon:
        for life in range(12):
            with daemon.connect(MODEL) as writer, daemon.connect(MODEL, staging_bytes=0) as reader:
                deadline = time.monotonic() + float(chosen.uniform(0.1, 1.0))
                conversation = 1000 * life
                held = []
                while time.monotonic() < deadline:
                    put(writer, conversation)
                    held.append((conversation, reader.get(tokens_of(conversation, BLOCKS))))
                    conversation += 1
                    if len(held) > 5:
                        held.pop(int(chosen.integers(5)))[1].release()
                before = daemon.tiers()["host"].blocks
                daemon.kill9()
                daemon.restart()
                assert daemon.status().counters["warm_blocks"] == before
                assert eventually(lambda: reader.state == "connected")
                for number, lease in held:
                    expected = payloads_of(number, BLOCKS, MODEL)
                    right = holds(lease, expected)
                    assert right or not lease.valid
                for number in range(max(1000 * life, conversation - 3), conversation):
                    assert found(reader, number) == BLOCKS
                for _, lease in held:
                    lease.release()
            tiers = daemon.tiers()["host"]
            assert tiers.used_bytes <= tiers.capacity_bytes


@contextmanager
def kept_process(daemon: RunningDaemon, seconds: float) -> Iterator[subprocess.Popen[bytes]]:
    """A daemon was killed, and the process of its GPU, which is kept beside its memory, ends only `seconds` later."""
    with (
        subprocess.Popen(["sleep", str(seconds)]) as process,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as holder,
    ):
        pidfd = os.pidfd_open(process.pid)
        holder.connect(str(daemon.state_dir / HOLDER_SOCKET))
        send_packet(holder, b"Kw%d" % process.pid, [pidfd])
        os.close(pidfd)
        yield process
        process.kill()


@pytest.mark.slow
def test_nothing_is_taken_over_before_the_process_of_a_gpu_is_gone(daemon: RunningDaemon) -> None:
    with daemon.connect(MODEL) as session:
        put(session, 1)
    daemon.kill9()
    with kept_process(daemon, 3.0) as process:
        daemon.restart()
        assert process.poll() is not None
    with daemon.connect(MODEL) as session:
        assert found(session, 1) == BLOCKS
    daemon.kill9()
    with kept_process(daemon, 60.0) as process:
        daemon.restart()
        assert process.poll() is None and "since a process of its GPU may still write there" in daemon.log
    with daemon.connect(MODEL) as session:
        assert found(session, 1) == 0
        put(session, 1)
    daemon.kill9()
    daemon.restart()
    with daemon.connect(MODEL) as session:
        assert found(session, 1) == BLOCKS, "it is not kept any more"
