"""An operator acts on a live daemon: list, drop, flush, invalidate, drain, shut down."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from kvstore_proto.v1 import admin_pb2 as pb
from tests.reference.conversations import holds, model, payloads_of, put_conversation, serves_whole, tokens_of
from tests.reference.raw_client import RawClient
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon

MODEL = model()


def put(daemon: RunningDaemon, conversation: int, blocks: int, **options: str) -> None:
    with daemon.connect() as session:
        assert put_conversation(session, conversation, blocks, wait="settled", **options).stored_blocks == blocks


def error_of(daemon: RunningDaemon, method: str, request: object) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        daemon.ask(method, request)
    return caught.value.code(), caught.value.details()


def test_blocks_are_listed_in_pages_each_once(daemon: RunningDaemon) -> None:
    put(daemon, 1, 25)
    put(daemon, 2, 5, durability="none")
    seen, after, pages = [], 0, 0
    while True:
        page = daemon.ask("Blocks", pb.BlocksRequest(limit=7, after=after))
        seen += list(page.blocks)
        pages += 1
        after = page.next
        if not after:
            break
    assert page.total == 30 and len(seen) == 30 and len({block.key for block in seen}) == 30
    assert 5 <= pages <= 6
    by_depth = sorted((block for block in seen if block.durability == "durable"), key=lambda block: block.depth)
    assert [block.depth for block in by_depth] == list(range(25))
    for parent, child in itertools.pairwise(by_depth):
        assert (child.parent, parent.children) == (parent.key, 1)
    first = by_depth[0]
    assert (list(first.tiers), first.tenant[:4], first.state) == (["host", "nvme"], "uid-", "resident")
    assert first.payload_bytes == MODEL.payload_bytes() and first.fingerprint.startswith("test model:")
    assert {block.durability for block in seen} == {"durable", "volatile"}
    some = daemon.ask("Blocks", pb.BlocksRequest(key_prefix=first.key[:6].upper()))
    assert [block.key for block in some.blocks] == [first.key]
    assert len(daemon.ask("Blocks", pb.BlocksRequest(tier="nvme")).blocks) == 25
    assert not daemon.ask("Blocks", pb.BlocksRequest(after=10**9)).blocks


def test_a_question_about_what_is_not_there_is_answered_with_what_is(daemon: RunningDaemon) -> None:
    put(daemon, 1, 1)
    code, details = error_of(daemon, "Blocks", pb.BlocksRequest(tier="gpu"))
    assert (code, "this daemon has: host, nvme" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    code, details = error_of(daemon, "Blocks", pb.BlocksRequest(tenant="nobody-here"))
    assert (code, "known: uid-" in details) == (grpc.StatusCode.NOT_FOUND, True)
    assert error_of(daemon, "Drop", pb.DropRequest())[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert error_of(daemon, "Drop", pb.DropRequest(tier="remote"))[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert (
        error_of(daemon, "Invalidate", pb.InvalidateRequest(fingerprint="abc"))[0] is grpc.StatusCode.INVALID_ARGUMENT
    )
    assert error_of(daemon, "Invalidate", pb.InvalidateRequest(fingerprint="0" * 8))[0] is grpc.StatusCode.NOT_FOUND


def test_flush_makes_durable_what_was_put_for_dram_only(daemon: RunningDaemon) -> None:
    put(daemon, 1, 20, durability="none")
    flushed = daemon.ask("Flush", pb.FlushRequest())
    assert (flushed.written_blocks, flushed.pending_blocks) == (20, 0)
    assert daemon.ask("Flush", pb.FlushRequest()).written_blocks == 0
    daemon.kill9()
    daemon.restart()
    assert serves_whole(daemon, 1, 20)


def test_leased_blocks_stay_and_are_counted(daemon: RunningDaemon) -> None:
    put(daemon, 1, 4)
    put(daemon, 2, 4)
    with daemon.connect() as session:
        with session.get(tokens_of(1, 4)) as lease:
            dropped = daemon.ask("Drop", pb.DropRequest(all=True))
            assert dropped.kept_blocks >= 4
            assert holds(lease, payloads_of(1, 4, MODEL)) and lease.valid
            assert session.lookup(tokens_of(2, 4)).reason == "dropped"
        assert eventually(lambda: daemon.status().leases == 0)
        daemon.ask("Drop", pb.DropRequest(all=True))
        assert session.lookup(tokens_of(1, 4)).reason == "dropped"
        assert daemon.status().blocks == 0
        assert all(tier.used_by["blocks"] == 0 for tier in daemon.tiers().values())


@pytest.mark.parametrize("method", ["invalidate", "drop"])
def test_what_was_taken_away_does_not_come_back_after_a_crash(daemon: RunningDaemon, method: str) -> None:
    put(daemon, 1, 6)
    if method == "drop":
        assert daemon.ask("Drop", pb.DropRequest(all=True)).dropped_blocks >= 6
    else:
        prefix = MODEL.digest().hex()[:12]
        reply = daemon.ask("Invalidate", pb.InvalidateRequest(fingerprint=prefix.upper()))
        assert (reply.blocks, list(reply.fingerprints)) == (6, [MODEL.digest().hex()])
        with daemon.connect() as session:
            assert session.lookup(tokens_of(1, 6)).reason == "invalidated"
    daemon.kill9()
    daemon.restart()
    assert daemon.status().blocks == 0
    with daemon.connect() as session:
        assert session.lookup(tokens_of(1, 6)).blocks == 0


def test_invalidate_takes_one_model_only(daemon: RunningDaemon) -> None:
    other = model("other weights")
    put(daemon, 1, 3)
    with daemon.connect(other) as session:
        session.put(tokens_of(1, 2), payloads=payloads_of(1, 2, other))
        daemon.ask("Invalidate", pb.InvalidateRequest(fingerprint=MODEL.digest().hex()))
        assert session.lookup(tokens_of(1, 2)).blocks == 2
    with daemon.connect() as session:
        assert session.lookup(tokens_of(1, 3)).blocks == 0


def test_a_tier_without_discard_keeps_what_it_cannot_save() -> None:
    with running_daemon("nvme.enabled=false") as daemon:
        put(daemon, 1, 5)
        assert daemon.drop("host").kept_blocks == 5
        assert daemon.drop("host", discard=True).dropped_blocks == 5


def test_draining_refuses_new_clients_serves_old_ones_and_can_be_undone(daemon: RunningDaemon) -> None:
    with daemon.connect() as session:
        session.put(tokens_of(1, 2), payloads=payloads_of(1, 2, MODEL))
        drained = daemon.ask("Drain", pb.DrainRequest(timeout_ms=50))
        assert (drained.clients_left, drained.state) == (1, "draining")
        with RawClient(daemon.socket_dir, MODEL) as newcomer:
            assert newcomer.refused is not None and "draining" in newcomer.refused.message
        with session.get(tokens_of(1, 2)) as lease:
            assert holds(lease, payloads_of(1, 2, MODEL))
        assert daemon.ask("Drain", pb.DrainRequest(undo=True)).state == "serving"
        with daemon.connect() as other:
            assert other.lookup(tokens_of(1, 2)).blocks == 2


def test_an_orderly_shutdown_keeps_what_was_pending(daemon: RunningDaemon) -> None:
    with daemon.connect() as session:
        session.put(tokens_of(1, 30), payloads=payloads_of(1, 30, MODEL), durability="batch")
        assert daemon.ask("Shutdown", pb.ShutdownRequest(now=True)).pid == daemon.pid
        assert daemon.process is not None and daemon.process.wait(60) == 0
    daemon.stop()  # checks what it left
    daemon.restart()
    assert eventually(lambda: serves_whole(daemon, 1, 30))  # a get waits only while that pays


def test_a_shutdown_that_is_not_urgent_lets_clients_leave_first(daemon: RunningDaemon) -> None:
    with daemon.connect() as session:
        daemon.ask("Shutdown", pb.ShutdownRequest())
        assert eventually(lambda: daemon.status().state == "draining")
        assert session.put(tokens_of(1, 1), payloads=payloads_of(1, 1, MODEL)).stored_blocks == 1
    assert daemon.process is not None and daemon.process.wait(60) == 0


def test_signals_until_the_last_moment_do_not_spoil_the_exit_status(daemon: RunningDaemon) -> None:
    """A service manager and an operator may both ask, and go on asking until the process is gone."""
    process = daemon.process
    assert process is not None
    daemon.ask("Shutdown", pb.ShutdownRequest())
    while process.returncode is None:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.005)  # it needs some of the processor to end
    assert process.returncode == 0


def test_a_terminals_signals_reach_the_daemon_alone(daemon: RunningDaemon) -> None:
    processes = Path(f"/proc/{daemon.process.pid}/task/{daemon.process.pid}/children").read_text().split()
    assert processes
    assert os.getpgid(daemon.process.pid) not in {os.getpgid(int(each)) for each in processes}


def test_stopping_under_load_is_orderly(daemon: RunningDaemon) -> None:
    """Puts, gets and promotions are under way when SIGTERM comes; what was called durable is there afterwards."""
    durable: list[int] = []
    stop = threading.Event()

    def work(number: int) -> None:
        with daemon.connect() as session:
            for turn in range(1000):
                conversation = 100 * number + turn
                payloads = payloads_of(conversation, 8, MODEL)
                mode = ("always", "batch", "none")[turn % 3]
                receipt = session.put(tokens_of(conversation, 8), payloads=payloads, durability=mode, deadline_s=20.0)
                if receipt.durability == ["durable"] * 8:
                    durable.append(conversation)
                session.get(tokens_of(conversation - 1, 8)).release()
                if stop.is_set() or session.state != "connected":
                    return

    workers = [threading.Thread(target=work, args=(number,)) for number in (1, 2)]
    for worker in workers:
        worker.start()
    assert eventually(lambda: len(durable) >= 4)
    daemon.drop("host")
    daemon.stop()
    stop.set()
    for worker in workers:
        worker.join()
    daemon.restart()
    with daemon.connect() as session:
        for conversation in durable:
            with session.get(tokens_of(conversation, 8)) as lease:
                assert holds(lease, payloads_of(conversation, 8, MODEL))
