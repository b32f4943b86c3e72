"""A client or the daemon dies in the middle of a Store: whole blocks or none, and every byte of staging comes back."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from kvstore_proto.arena import slot_bytes
from kvstore_proto.identity import BlockKeys
from kvstore_proto.v1 import kvstore_pb2 as pb
from tests.reference.conversations import holds, model, payloads_of, tokens_of
from tests.reference.examples import each_nth
from tests.reference.raw_client import RawClient
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon

MODEL = model(kib_a_block=64)
SLOT = slot_bytes(MODEL.payload_bytes())
BLOCKS = 8
SLOW = "host.before-copy=delay:0.1"  # each block takes that long


def granted_bytes(daemon: RunningDaemon) -> int:
    """Return the bytes that a new client gets of the staging pool, all of which one client may have."""
    with RawClient(daemon.socket_dir, MODEL, staging_bytes=1 << 30) as raw:
        return raw.welcome.staging_bytes


def test_a_client_killed_between_its_writing_and_its_store() -> None:
    """The client never sent the store: its keys are free, and its staging comes back."""
    with running_daemon("nvme.enabled=false") as daemon:
        before = granted_bytes(daemon)
        with RawClient(daemon.socket_dir, MODEL) as victim:  # the daemon sees the end of its connection, as of a kill
            assert victim.lend() == 1
            for block, payload in enumerate(payloads_of(1, BLOCKS, MODEL)):
                victim.stage(1 + block * SLOT // 4096, tokens_of(1, BLOCKS)[64 * block :][:64], payload)
            assert daemon.tiers()["host"].blocks == 0
        assert eventually(lambda: daemon.status().clients == 0)
        assert eventually(lambda: granted_bytes(daemon) == before)
        with daemon.connect(MODEL) as session:
            receipt = session.put(tokens_of(1, BLOCKS), payloads=payloads_of(1, BLOCKS, MODEL))
            assert receipt.statuses == ["stored"] * BLOCKS


def test_a_client_killed_in_the_middle_of_a_store() -> None:
    """The client's staging is copied from to the end, then given back; its blocks are there, whole."""
    script = """
import sys
sys.path.insert(0, '.')
from pathlib import Path
from tests.reference.conversations import model, payloads_of, tokens_of
from tests.reference.running_daemon import RunningDaemon
MODEL = model(kib_a_block=64)
session = RunningDaemon(Path(sys.argv[1])).connect(MODEL)
print('here', flush=True)
session.put(tokens_of(1, 8), payloads=payloads_of(1, 8, MODEL))
"""
    with running_daemon("nvme.enabled=false", "host.copy_threads=1", failpoints=SLOW) as daemon:
        before = granted_bytes(daemon)
        command = [sys.executable, "-c", script, str(daemon.directory)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None and child.stdout.readline() == "here\n"
            assert eventually(lambda: daemon.tiers()["host"].blocks > 0), "it has slots"
            child.kill()
        assert eventually(lambda: daemon.status().clients == 0)
        assert eventually(lambda: daemon.status().counters["stored_blocks"] == BLOCKS)
        assert eventually(lambda: granted_bytes(daemon) == before)
        with daemon.connect(MODEL) as session, session.get(tokens_of(1, BLOCKS)) as lease:
            assert holds(lease, payloads_of(1, BLOCKS, MODEL))


def test_clients_that_come_and_die_leave_no_staging_behind() -> None:
    with running_daemon("nvme.enabled=false", failpoints="host.before-copy=delay:0.01") as daemon:
        before = granted_bytes(daemon)
        for conversation in range(12):
            session = daemon.connect(MODEL)
            putting = threading.Thread(
                target=session.put,
                args=(tokens_of(conversation, BLOCKS),),
                kwargs={"payloads": payloads_of(conversation, BLOCKS, MODEL)},
            )
            putting.start()
            assert eventually(lambda so_far=conversation: daemon.tiers()["host"].blocks > so_far * BLOCKS)  # type: ignore[misc]
            session.close()  # the handshake's end, while the daemon copies
            putting.join()
            stored = (conversation + 1) * BLOCKS
            assert eventually(lambda stored=stored: daemon.status().counters["stored_blocks"] == stored)  # type: ignore[misc]
        assert eventually(lambda: granted_bytes(daemon) == before)


@pytest.mark.parametrize("hit", each_nth([5, 1, BLOCKS], 3))
def test_a_daemon_killed_in_the_middle_of_a_store(hit: int) -> None:
    with running_daemon(failpoints=f"host.before-header=kill@{hit}") as daemon, daemon.connect(MODEL) as session:
        receipt = session.put(tokens_of(1, BLOCKS), payloads=payloads_of(1, BLOCKS, MODEL))
        assert (receipt.statuses, receipt.reason) == (["failed"] * BLOCKS, "no_daemon")
        daemon.wait_killed()
        daemon.failpoints = ""
        daemon.restart()
        assert eventually(lambda: session.state == "connected")
        receipt = session.put(tokens_of(1, BLOCKS), payloads=payloads_of(1, BLOCKS, MODEL))
        assert receipt.visible_blocks == BLOCKS
        with session.get(tokens_of(1, BLOCKS)) as lease:
            assert holds(lease, payloads_of(1, BLOCKS, MODEL))


def test_an_abandoned_put_never_mixes_with_the_next_one() -> None:
    """The loan holds one put. While the daemon copies the first, whose client gave up, the second has to wait."""
    settings = ("nvme.enabled=false", "host.copy_threads=1", "limits.staging_per_client=1MiB")
    with running_daemon(*settings, failpoints="host.before-copy=delay:0.05") as daemon:
        blocks = (1 << 20) // SLOT
        with daemon.connect(MODEL) as session:
            assert session.put(tokens_of(3, 1), payloads=payloads_of(3, 1, MODEL)).stored_blocks == 1, "it has its loan"
            with daemon.frozen():
                session._clock = lambda: 0.0  # however slow this machine is, all of it is sent
                payloads = payloads_of(1, blocks, MODEL)
                given_up = session.put(tokens_of(1, blocks), payloads=payloads, deadline_s=0.05)
                assert given_up.statuses == ["failed"] * blocks
                session._clock = time.monotonic
            # A third would be one silence too many for its link.
            session.put(tokens_of(2, blocks), payloads=payloads_of(2, blocks, MODEL), deadline_s=0.05)
            receipt = session.put(tokens_of(9, blocks), payloads=payloads_of(9, blocks, MODEL), deadline_s=30)
            assert receipt.statuses == ["stored"] * blocks
            for conversation in (1, 2, 9):
                with session.get(tokens_of(conversation, blocks)) as lease:
                    assert holds(lease, payloads_of(conversation, len(lease), MODEL))
            with session.get(tokens_of(1, blocks)) as lease:
                assert len(lease) == blocks, "what was sent is stored, though no caller waited"


@pytest.mark.slow
def test_a_client_whose_streams_break_cannot_pile_up_stores() -> None:
    """The work that a broken stream left under way counts against the client until it has ended."""
    settings = ("nvme.enabled=false", "host.copy_threads=1", "limits.inflight_per_client=3")
    with (
        running_daemon(*settings, failpoints="host.before-copy=delay:3@1-1") as daemon,
        RawClient(daemon.socket_dir, MODEL) as raw,
    ):
        raw.lend()

        def store(block: int) -> pb.Store:
            key = BlockKeys(block.to_bytes(16, "little"))
            return raw.store_of(key, [1 + (block - 1) * SLOT // 4096], parents=bytes(16))

        for block in (1, 2, 3):
            raw.send(store=store(block))
        assert eventually(lambda: daemon.tiers()["host"].blocks == 3)
        raw.end_stream()
        refused = raw.ask(store=store(4))
        assert (refused.error.kind, refused.error.retry_after_ms > 0) == (pb.ERROR_KIND_THROTTLED, True), refused
        assert eventually(lambda: daemon.status().counters["stored_blocks"] == 3)
        assert eventually(lambda: raw.ask(store=store(4)).HasField("store"))
        assert "Traceback" not in daemon.log, daemon.log
