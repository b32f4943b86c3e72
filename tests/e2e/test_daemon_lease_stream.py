"""A prefix handed out as its blocks become readable: order, bytes, reasons, and that nothing stays behind."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore_client import Session
from kvstore_proto.errors import KVStoreError
from kvstore_proto.v1 import admin_pb2
from tests.reference.conversations import model, payloads_of, tokens_of
from tests.reference.examples import quick_are
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon

MODEL = model()
BLOCKS = 24
TOKENS, PAYLOADS = tokens_of(1, BLOCKS), payloads_of(1, BLOCKS, MODEL)


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon("movement.in_flight=1") as running:
        yield running


@pytest.fixture
def session(daemon: RunningDaemon) -> Iterator[Session]:
    with daemon.connect(MODEL) as connected:
        yield connected


@pytest.fixture(params=["direct", "grpc"])
def slow_reads(request: pytest.FixtureRequest) -> Iterator[tuple[RunningDaemon, Session]]:
    """A daemon and a session over either stream; the prefix is on NVMe, where one read is made at a time, in 0.3 s:
    many times what it takes to leave a stream, also where the machine is busy."""
    with (
        running_daemon("movement.in_flight=1", failpoints="nvme.read=delay:0.3") as daemon,
        daemon.connect(MODEL, stream=request.param) as session,
    ):
        leave_in_dram(daemon, session, 0)
        yield daemon, session


def leave_in_dram(daemon: RunningDaemon, session: Session, blocks: int) -> None:
    """Store the prefix durably, with only its first blocks in DRAM."""
    session.put(TOKENS, payloads=PAYLOADS, wait="settled", durability="always")
    daemon.drop("host")
    if blocks:
        with session.get(TOKENS, max_blocks=blocks) as lease:
            assert lease.blocks == blocks


def leases(daemon: RunningDaemon) -> int:
    return daemon.status().leases


def promoted(daemon: RunningDaemon) -> int:
    return daemon.status().counters["promoted_blocks"]


def all_can_be_dropped(daemon: RunningDaemon) -> bool:
    return bool(daemon.ask("Drop", admin_pb2.DropRequest(all=True)).kept_blocks == 0)


@pytest.mark.parametrize("order", ["front", "back"])
@pytest.mark.parametrize("in_dram", quick_are([0, 5, BLOCKS], [False, True, False]))
def test_every_block_comes_once_with_its_bytes(
    daemon: RunningDaemon, session: Session, order: str, in_dram: int
) -> None:
    leave_in_dram(daemon, session, in_dram)
    came: list[int] = []
    with session.get_stream(TOKENS, order=order) as stream:  # type: ignore[arg-type]
        for first, lease in stream:
            for at in range(lease.blocks):
                assert bytes(lease.payload(at)) == bytes(PAYLOADS[first + at])
                came.append(first + at)
            assert lease.valid
        assert stream.tiers == ("host",) * in_dram + ("nvme",) * (BLOCKS - in_dram)
        assert len(stream.ready_s) == BLOCKS and list(stream.ready_s) == sorted(stream.ready_s)
        assert (stream.blocks, stream.reason) == (BLOCKS, "")
    assert sorted(came) == list(range(BLOCKS))
    assert came[:in_dram] == list(range(in_dram)), "what is in DRAM comes at once"
    loaded = came[in_dram:]
    if loaded and order == "back":
        assert loaded[0] > loaded[-1], "one transfer at a time: the last block is read first"
    elif loaded:
        assert loaded == sorted(loaded)
    assert eventually(lambda: leases(daemon) == 0)


def test_a_stream_that_is_left_early_holds_nothing(daemon: RunningDaemon, session: Session) -> None:
    leave_in_dram(daemon, session, 3)
    with session.get_stream(TOKENS) as stream:
        first, lease = next(iter(stream))
        assert (first, lease.blocks) == (0, 3)
    assert not lease.valid
    assert eventually(lambda: leases(daemon) == 0)
    assert eventually(lambda: all_can_be_dropped(daemon)), "nothing is pinned"


def test_what_a_stream_that_is_left_had_queued_is_not_read(slow_reads: tuple[RunningDaemon, Session]) -> None:
    """Most reads wait for their turn when the stream is left."""
    daemon, session = slow_reads
    for turn in range(1, 4):
        with session.get_stream(TOKENS) as stream:
            assert next(stream).first == 0
        assert eventually(lambda: leases(daemon) == 0)
        assert eventually(lambda: all_can_be_dropped(daemon)), "nothing is pinned"
        assert promoted(daemon) <= 2 * turn, "the block that came, and the one whose read was under way"
        leave_in_dram(daemon, session, 0)


def test_a_thread_that_waits_for_a_stream_goes_on_when_another_closes_it(
    slow_reads: tuple[RunningDaemon, Session],
) -> None:
    daemon, session = slow_reads
    stream = session.get_stream(TOKENS)
    assert next(stream).first == 0
    with ThreadPoolExecutor(1) as threads:
        rest = threads.submit(lambda: sum(lease.blocks for _, lease in stream))
        stream.close()
        assert rest.result() <= 1
    assert promoted(daemon) <= 3
    assert eventually(lambda: leases(daemon) == 0)


def test_a_client_that_dies_in_the_middle_holds_nothing(daemon: RunningDaemon) -> None:
    with daemon.connect(MODEL) as session:
        leave_in_dram(daemon, session, 3)
        stream = session.get_stream(TOKENS)
        next(iter(stream))
    assert eventually(lambda: leases(daemon) == 0)
    assert eventually(lambda: all_can_be_dropped(daemon))
    assert daemon.status().blocks == 0


def test_a_miss_says_why(daemon: RunningDaemon, session: Session) -> None:
    with session.get_stream(TOKENS) as stream:
        assert list(stream) == []
    assert stream.reason == "never_stored"
    leave_in_dram(daemon, session, 0)
    longer = tokens_of(1, BLOCKS + 4)
    with session.get_stream(longer) as stream:
        assert sum(lease.blocks for _, lease in stream) == BLOCKS
    assert stream.reason == "never_stored"


def test_a_lease_that_waited_to_be_taken_has_aged(daemon: RunningDaemon, session: Session) -> None:
    leave_in_dram(daemon, session, BLOCKS)
    now = 0.0
    late = Session(session._connection, clock=lambda: now)
    with late.get_stream(TOKENS, deadline_s=60.0) as stream:
        now = 31.0
        assert not next(stream).lease.valid, "the daemon's lease has 30 seconds"
    with late.get_stream(TOKENS, deadline_s=60.0) as stream:
        now += 28.0
        assert next(stream).lease.valid


def test_an_unknown_order_is_refused(session: Session) -> None:
    with pytest.raises(KVStoreError, match="order 'middle' is unknown; known: front, back"):
        session.get_stream(TOKENS, order="middle")  # type: ignore[arg-type]


def test_without_a_daemon_nothing_comes(daemon: RunningDaemon, session: Session) -> None:
    leave_in_dram(daemon, session, 1)
    daemon.kill9()
    assert eventually(lambda: session.lookup(TOKENS).reason == "no_daemon")
    with session.get_stream(TOKENS) as stream:
        assert list(stream) == []
    assert stream.reason == "no_daemon"
    daemon.restart()


def test_a_stream_counts_as_one_get_with_what_came(daemon: RunningDaemon, session: Session) -> None:
    leave_in_dram(daemon, session, 5)
    before = session.statistics()
    with session.get_stream(TOKENS) as stream:
        first = next(iter(stream))
        stream.close()
    with session.get_stream(tokens_of(2, BLOCKS)) as nothing:
        assert list(nothing) == []
    after = session.statistics()
    assert (after.gets - before.gets, after.hits - before.hits, after.misses - before.misses) == (2, 1, 1)
    assert after.blocks_restored - before.blocks_restored == 5 and first.first == 0
    assert after.bytes_restored - before.bytes_restored == 5 * MODEL.payload_bytes()
