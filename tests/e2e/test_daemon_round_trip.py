"""The main job against a real daemon: what one client puts, every client of the tenant gets, from any tier."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore_client import KVStoreError
from tests.reference import forked
from tests.reference.conversations import LAYERS, holds, model, payloads_of, put_conversation, tokens_of
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon

MODEL = model()


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    """Start a daemon as a user does."""
    with running_daemon(as_a_command=True) as running:
        yield running


def unleased(daemon: RunningDaemon) -> bool:
    """Clients give leases back a moment after they let go of them."""
    return eventually(lambda: daemon.status().leases == 0)


def test_64_blocks_of_one_process_are_there_for_another_at_once(daemon: RunningDaemon) -> None:
    tokens, payloads = tokens_of(1, 64), payloads_of(1, 64, MODEL)
    with daemon.connect() as session:
        receipt = session.put(tokens, payloads=payloads)
        assert receipt.statuses == ["stored"] * 64
        reader = f"""
import sys; sys.path.insert(0, '.')
import kvstore_client
from tests.reference.conversations import holds, model, payloads_of, tokens_of
with kvstore_client.connect({str(daemon.socket_dir)!r}, fingerprint=model(), required=True, deadline_s=20) as session:
    found = session.lookup(tokens_of(1, 64))
    with session.get(tokens_of(1, 64)) as lease:
        print(found.blocks, found.reason, holds(lease, payloads_of(1, 64, model())), lease.valid)
"""
        result = forked.run([sys.executable, "-c", reader])
        assert result.stdout.split() == ["64", "True", "True"], result.stderr


def test_views_are_read_only_and_layers_can_be_read_alone(daemon: RunningDaemon) -> None:
    tokens, payloads = tokens_of(2, 3), payloads_of(2, 3, MODEL)
    with daemon.connect() as session:
        session.put(tokens, payloads=payloads)
        with session.get(tokens) as lease:
            view = lease.payload(1)
            with pytest.raises(ValueError, match="read-only"):
                view[0] = 1
            with pytest.raises(ValueError, match="WRITEABLE"):
                view.flags.writeable = True
            for layer in range(LAYERS):
                size = len(payloads[1]) // LAYERS
                assert np.array_equal(lease.layer(1, layer), payloads[1][layer * size : (layer + 1) * size])
            assert lease.verify(tokens)
            assert not lease.verify(tokens_of(3, 3))
        with pytest.raises(KVStoreError):
            lease.payload(0)


def test_a_write_through_an_array_ends_the_writer_and_changes_nothing(daemon: RunningDaemon) -> None:
    """The write goes by the address, as a library that knows no read-only memory would write."""
    tokens, payloads = tokens_of(60, 2), payloads_of(60, 2, MODEL)
    with daemon.connect() as session:
        session.put(tokens, payloads=payloads)
        writer = f"""
import ctypes, sys; sys.path.insert(0, '.')
import kvstore_client
from tests.reference.conversations import model, tokens_of
with kvstore_client.connect({str(daemon.socket_dir)!r}, fingerprint=model(), required=True, deadline_s=20) as session:
    array = session.get(tokens_of(60, 2)).array(1, 2, kind="k")
    print(array.readonly, array.dtype, array.shape, flush=True)
    ctypes.memset(array.address, 1, 1)
"""
        ended = forked.run([sys.executable, "-c", writer])
        assert (ended.returncode, ended.stdout) == (-signal.SIGSEGV, "True float16 (64, 16)\n"), ended.stderr
        with session.get(tokens) as lease:
            assert holds(lease, payloads)


def test_an_array_of_a_released_lease_keeps_its_bytes_while_others_need_the_room() -> None:
    large = model(kib_a_block=256)
    with running_daemon("host.capacity=48MiB", "nvme.enabled=false") as small, small.connect(large) as session:
        put_conversation(session, 1, 8)
        with session.get(tokens_of(1, 8)) as lease:
            kept = [np.from_dlpack(lease.array(block, kind="bytes")) for block in range(8)]
        for number in range(2, 30):
            put_conversation(session, number, 8)
        assert small.status().leases == 1
        assert all(map(np.array_equal, kept, payloads_of(1, 8, large)))
        del kept, lease
        session.ping()
        assert unleased(small)


def test_a_prefix_ends_where_the_tokens_part(daemon: RunningDaemon) -> None:
    tokens = tokens_of(4, 6)
    with daemon.connect() as session:
        session.put(tokens, payloads=payloads_of(4, 6, MODEL))
        other = tokens.copy()
        other[64 * 4 + 5] += 1
        found = session.lookup(other)
        assert (found.blocks, found.reason) == (4, "never_stored")
        with session.get(other) as lease:
            assert holds(lease, payloads_of(4, 4, MODEL))
        assert session.lookup(tokens[: 64 * 2 + 63]).blocks == 2, "a partial tail is not a block"


def test_a_block_that_two_clients_put_is_stored_once(daemon: RunningDaemon) -> None:
    tokens, payloads = tokens_of(5, 8), payloads_of(5, 8, MODEL)
    before = daemon.status().counters
    with daemon.connect() as first, daemon.connect() as second:
        assert first.put(tokens, payloads=payloads).stored_blocks == 8
        again = second.put(tokens, payloads=payloads_of(6, 8, MODEL))
        assert again.statuses == ["present"] * 8 and again.visible_blocks == 8
        with second.get(tokens) as lease:
            assert holds(lease, payloads), "the first one's bytes stand"
    after = daemon.status().counters
    assert after["stored_blocks"] - before["stored_blocks"] == 8
    assert after["present_blocks"] - before["present_blocks"] == 8


def test_another_models_blocks_are_a_miss_with_a_reason(daemon: RunningDaemon) -> None:
    tokens = tokens_of(7, 2)
    with daemon.connect() as session, daemon.connect(model("other weights")) as other:
        session.put(tokens, payloads=payloads_of(7, 2, MODEL))
        assert other.lookup(tokens).reason == "other_fingerprint"
        with other.get(tokens) as lease:
            assert (len(lease), lease.reason) == (0, "other_fingerprint")


def test_dropped_from_dram_it_comes_from_nvme_and_prefetch_moves_it_ahead(daemon: RunningDaemon) -> None:
    tokens, payloads = tokens_of(8, 16), payloads_of(8, 16, MODEL)
    with daemon.connect() as session:
        session.put(tokens, payloads=payloads, durability="none")
        assert unleased(daemon)
        dropped = daemon.drop("host")
        assert dropped.kept_blocks == 0 and dropped.written_back_blocks >= 16
        assert session.lookup(tokens).tiers == ("nvme",) * 16
        read_before = daemon.tiers()["nvme"].bytes_read
        with session.get(tokens) as lease:
            assert holds(lease, payloads) and lease.promoted_bytes >= sum(map(len, payloads))
        assert daemon.tiers()["nvme"].bytes_read - read_before >= sum(map(len, payloads))
        assert unleased(daemon)
        daemon.drop("host")
        assert session.prefetch(tokens).scheduled_blocks == 16
        assert eventually(lambda: set(session.lookup(tokens).tiers) == {"host"})
        assert session.prefetch(tokens).resident_blocks == 16
        read_before = daemon.tiers()["nvme"].bytes_read
        with session.get(tokens) as lease:
            assert holds(lease, payloads) and lease.promoted_bytes == 0
        assert daemon.tiers()["nvme"].bytes_read == read_before
        assert daemon.status().counters["prefetched_blocks"] >= 16


def test_without_promotion_a_get_leases_what_is_mapped_and_reports_the_rest(daemon: RunningDaemon) -> None:
    tokens, payloads = tokens_of(12, 8), payloads_of(12, 8, MODEL)
    with daemon.connect() as session:
        assert session.get(tokens, promote=False).reason == "never_stored"
        session.put(tokens, payloads=payloads, durability="none")
        with session.get(tokens, promote=False) as lease:
            assert holds(lease, payloads) and lease.resident_blocks == 8
        assert unleased(daemon)
        daemon.drop("host")
        read_before = daemon.tiers()["nvme"].bytes_read
        with session.get(tokens, promote=False) as lease:
            assert (len(lease), lease.resident_blocks, lease.reason) == (0, 8, "")
            assert lease.estimated_load_s > 0
        with session.get(tokens[: 3 * 64]) as lease:
            assert holds(lease, payloads[:3])
            read_after = daemon.tiers()["nvme"].bytes_read
            assert read_after - read_before < sum(map(len, payloads)), "nothing else was promoted"
            with session.get(tokens, promote=False) as mapped:
                assert holds(mapped, payloads[:3]) and mapped.resident_blocks == 8
        assert daemon.tiers()["nvme"].bytes_read == read_after
        assert unleased(daemon)


def test_waking_the_daemon_waits_for_nothing_and_leaves_nothing_behind(daemon: RunningDaemon) -> None:
    with daemon.connect() as session:
        before = daemon.status().counters
        with daemon.frozen():
            session.wake()  # the daemon does not answer, and the call returns
        assert session.ping(20.0) is not None
        assert session.state == "connected"
        assert daemon.status().counters["acquires"] == before["acquires"]


def test_a_prefetch_keeps_to_its_budget(daemon: RunningDaemon) -> None:
    tokens = tokens_of(9, 8)
    with daemon.connect() as session:
        session.put(tokens, payloads=payloads_of(9, 8, MODEL))
        assert unleased(daemon)
        daemon.drop("host")
        assert session.prefetch(tokens, budget_bytes=3 * MODEL.payload_bytes()).scheduled_blocks == 3


@pytest.mark.parametrize("mode", ["none", "batch", "always"])
def test_a_receipt_says_what_was_promised(daemon: RunningDaemon, mode: str) -> None:
    conversation = 20 + len(mode)
    tokens, payloads = tokens_of(conversation, 4), payloads_of(conversation, 4, MODEL)
    with daemon.connect() as session:
        receipt = session.put(tokens, payloads=payloads, durability=mode)
        assert receipt.stored_blocks == 4
        if mode == "none":
            assert receipt.durability == ["volatile"] * 4
        elif mode == "always":
            assert receipt.durability == ["durable"] * 4 and receipt.is_settled
        else:
            assert receipt.settle(20) and receipt.durability == ["durable"] * 4


def test_no_payload_travels_inside_grpc(daemon: RunningDaemon) -> None:
    with daemon.connect() as session:
        session.put(tokens_of(30, 4), payloads=payloads_of(30, 4, MODEL))
        with session.get(tokens_of(30, 4)) as lease:
            assert len(lease) == 4
        statistics = session.statistics()
        assert statistics.grpc_payload_bytes == 0
        assert statistics.grpc_message_bytes < MODEL.payload_bytes()
    assert daemon.status().counters["grpc_payload_bytes"] == 0


def test_the_estimates_of_a_run_add_up_to_about_what_loading_it_takes(daemon: RunningDaemon) -> None:
    """The estimates are shares, not times since the start: their sum over 32 blocks is near the estimate of a lookup
    for the last of them alone."""
    tokens, payloads = tokens_of(13, 32), payloads_of(13, 32, MODEL)
    with daemon.connect() as session:
        session.put(tokens, payloads=payloads, durability="none")
        assert unleased(daemon)
        daemon.drop("host")
        whole, half = session.lookup(tokens).estimated_load_s, session.lookup(tokens[: 16 * 64]).estimated_load_s
        assert 0 < half < whole < 2.5 * half, "twice the blocks take about twice as long, not four times"
        assert session.get(tokens, promote=False).estimated_load_s == pytest.approx(whole, rel=0.2)


def test_what_a_hint_says_is_due_is_in_dram_before_the_get() -> None:
    with running_daemon("prefetch.enabled=true") as daemon, daemon.connect() as session:
        tokens, payloads = tokens_of(9, 16), payloads_of(9, 16, MODEL)
        session.put(tokens, payloads=payloads, durability="always")
        assert eventually(lambda: daemon.status().leases == 0)
        daemon.drop("host")
        assert session.lookup(tokens).tiers == ("nvme",) * 16
        session.hint(tokens, due_in_s=3.0)
        assert eventually(lambda: set(session.lookup(tokens).tiers) == {"host"})
        with session.get(tokens) as lease:
            assert holds(lease, payloads) and lease.promoted_bytes == 0
        assert eventually(lambda: daemon.status().counters["predicted_used_blocks"] == 16)
