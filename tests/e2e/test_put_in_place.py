"""A session of a tenant with put.in_place: what it puts is written once, and served as any other block."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvstore_client import Session, Slot, by_arrays, in_place, slot_requests
from kvstore_client.call import Call
from kvstore_client.daemon_session import DaemonSession
from kvstore_client.memory import Bytes
from kvstore_client.payload import FillSlot
from kvstore_proto.arena import HEADER_BYTES, slot_bytes
from kvstore_proto.v1 import admin_pb2
from kvstore_proto.v1 import kvstore_pb2 as wire
from tests.reference.conversations import holds, model, payloads_of, tokens_of
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon
from tests.reference.stopped_client import stopped_client

MODEL = model(kib_a_block=256)
SLOT = slot_bytes(MODEL.payload_bytes())
BLOCKS = 6
SETTINGS = ("host.capacity=80MiB", "limits.staging_per_client=8MiB", "nvme.enabled=false")


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon("put.in_place=true", *SETTINGS) as running:
        yield running


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots that are held ahead are soon given back."""
    monkeypatch.setattr(slot_requests, "IDLE_S", 0.2)


@pytest.fixture
def session(daemon: RunningDaemon) -> Iterator[Session]:
    with daemon.connect(MODEL) as opened:
        yield opened
    assert eventually(lambda: daemon.status().clients == 0)
    assert "Traceback" not in daemon.log, daemon.log


def connection_of(session: Session) -> DaemonSession:
    connection = session._connection.current()
    assert connection is not None
    return connection


def uses_staging(session: Session) -> bool:
    staging = connection_of(session).staging
    return staging is not None and staging.loan > 0


def reserved(daemon: RunningDaemon) -> int:
    (tenant,) = daemon.ask("Tenants", admin_pb2.TenantsRequest()).tenants
    return int(tenant.host_bytes // SLOT) - daemon.tiers()["host"].blocks


def put(session: Session, conversation: int, **options: Any) -> list[str]:
    payloads = payloads_of(conversation, BLOCKS, MODEL)
    return session.put(tokens_of(conversation, BLOCKS), payloads=payloads, **options).statuses


def test_a_put_by_arrays_goes_in_place_and_is_read_by_arrays(daemon: RunningDaemon) -> None:
    group = replace(MODEL.groups[0], heads=4)
    heads, layers, width = replace(MODEL, kv_dtype="bf16", groups=(group,)), len(group.layers), 16 * 1024 // 64 // 4
    numbers = np.random.default_rng(5).integers(0, 1 << 16, (BLOCKS, layers, 2, 64, 4, width), dtype=np.uint16)

    def write(block: int, slot: Slot) -> None:
        np.asarray(slot.array(kind="k")).view(np.uint16)[...] = numbers[block, :, 0]
        for layer in range(layers):
            np.asarray(slot.array(layer, kind="v")).view(np.uint16)[...] = numbers[block, layer, 1]

    payloads = [by_arrays(heads, partial(write, block)) for block in range(BLOCKS)]
    with daemon.connect(heads) as session, daemon.connect(heads) as other:
        receipt = session.put(tokens_of(21, BLOCKS), payloads=payloads)
        assert receipt.statuses == ["stored"] * BLOCKS and not uses_staging(session)
        with other.get(tokens_of(21, BLOCKS)) as lease:
            kept = [np.asarray(lease.array(block, kind="v")) for block in range(BLOCKS)]
        assert all(np.array_equal(each.view(np.uint16), numbers[at, :, 1]) for at, each in enumerate(kept))


def test_a_put_goes_in_place_and_another_client_gets_it(daemon: RunningDaemon, session: Session) -> None:
    assert put(session, 1) == ["stored"] * BLOCKS
    assert not uses_staging(session)
    with daemon.connect(MODEL) as other, other.get(tokens_of(1, BLOCKS)) as lease:
        assert holds(lease, payloads_of(1, BLOCKS, MODEL))
    with session.get(tokens_of(1, BLOCKS)) as lease:
        assert holds(lease, payloads_of(1, BLOCKS, MODEL))
        with pytest.raises(ValueError, match="read-only"):
            lease.payload(0)[0] = 1
    assert eventually(lambda: reserved(daemon) == 0)


def test_payloads_in_place_that_are_begun_are_there_before_they_are_sent(
    daemon: RunningDaemon, session: Session
) -> None:
    expected = payloads_of(21, BLOCKS, MODEL)

    def payload(block: int) -> FillSlot:
        return lambda destination: lambda: np.copyto(destination, expected[block])

    receipt = session.put(tokens_of(21, BLOCKS), payloads=[payload(block) for block in range(BLOCKS)])
    assert receipt.statuses == ["stored"] * BLOCKS and not uses_staging(session)
    with daemon.connect(MODEL) as other, other.get(tokens_of(21, BLOCKS)) as lease:
        assert holds(lease, expected)


def test_the_next_put_writes_into_slots_that_are_held_ahead(
    daemon: RunningDaemon, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_requests, "IDLE_S", 60.0)
    size = slot_requests.SlotSize(0, MODEL.payload_bytes())
    slots, writable = connection_of(session).slots, connection_of(session).writable
    assert put(session, 7) == ["stored"] * BLOCKS
    assert eventually(lambda: reserved(daemon) == 2), "one part in 128 of 80 MiB"
    held: list[slot_requests.Granted] = []
    assert eventually(lambda: held.extend(filter(None, [slots.take_ahead(size, 0.0)])) or bool(held))
    slots.hold(held[0])
    payloads, addresses = payloads_of(8, BLOCKS, MODEL), []

    def fill(block: int, destination: Bytes) -> None:
        addresses.append(destination.ctypes.data - HEADER_BYTES)
        np.copyto(destination, payloads[block])

    functions = [lambda destination, block=block: fill(block, destination) for block in range(BLOCKS)]
    assert session.put(tokens_of(8, BLOCKS), payloads=functions).stored_blocks == BLOCKS  # type: ignore[arg-type]
    reply = held[0].reply
    granted = zip(reply.arena_ids, reply.offsets, strict=True)
    assert addresses[:2] == [writable.mapped[arena_id].ctypes.data + offset for arena_id, offset in granted]
    with daemon.connect(MODEL) as other, other.get(tokens_of(8, BLOCKS)) as lease:
        assert holds(lease, payloads)


def test_the_last_message_of_a_put_is_short(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written while the daemon checksums it."""
    monkeypatch.setattr(in_place, "LAST_BYTES", 2 * SLOT)
    sent, begin = list[int](), DaemonSession.begin

    def begun(self: DaemonSession, request: wire.Request, deadline_s: float) -> Call:
        sent.append(len(request.store.pages))
        return begin(self, request, deadline_s)

    monkeypatch.setattr(DaemonSession, "begin", begun)
    assert put(session, 31) == ["stored"] * BLOCKS
    messages = [blocks for blocks in sent if blocks]
    assert sum(messages) == BLOCKS and messages[-1] <= 2


def test_payload_functions_write_straight_into_the_slots(daemon: RunningDaemon, session: Session) -> None:
    payloads = payloads_of(2, BLOCKS, MODEL)
    destinations: list[Bytes] = []

    def fill(block: int, destination: Bytes) -> None:
        destinations.append(destination)
        np.copyto(destination, payloads[block])

    functions = [lambda destination, block=block: fill(block, destination) for block in range(BLOCKS)]
    receipt = session.put(tokens_of(2, BLOCKS), payloads=functions)  # type: ignore[arg-type]
    assert receipt.stored_blocks == BLOCKS
    destinations[2][5] ^= 1  # long after the put
    with daemon.connect(MODEL) as other:
        lease = other.get(tokens_of(2, BLOCKS))
        assert (len(lease), lease.reason) == (2, "corrupt")


def test_blocks_that_are_there_are_not_written(daemon: RunningDaemon, session: Session) -> None:
    tokens, payloads = tokens_of(3, 2 * BLOCKS), payloads_of(3, 2 * BLOCKS, MODEL)
    assert session.put(tokens, payloads=payloads[:BLOCKS]).stored_blocks == BLOCKS
    receipt = session.put(tokens, payloads=payloads)
    assert receipt.statuses == ["present"] * BLOCKS + ["stored"] * BLOCKS
    receipt = session.put(tokens, payloads=payloads, first_block=0)
    assert receipt.statuses == ["present"] * 2 * BLOCKS
    with daemon.connect(MODEL) as other, other.get(tokens) as lease:
        assert holds(lease, payloads)
    assert eventually(lambda: reserved(daemon) == 0)


def test_a_small_put_takes_the_way_with_fewer_messages(session: Session) -> None:
    receipt = session.put(tokens_of(4, 1), payloads=payloads_of(4, 1, MODEL))
    assert receipt.stored_blocks == 1 and uses_staging(session)


def test_blocks_that_are_written_in_time_go_in_one_message(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_place.InPlacePut, "send_every_s", 60.0)
    begin, stores = DaemonSession.begin, list[int]()

    def counted(daemon: DaemonSession, request: wire.Request, deadline_s: float) -> Call:
        if request.HasField("store"):
            stores.append(len(request.store.pages))
        return begin(daemon, request, deadline_s)

    monkeypatch.setattr(DaemonSession, "begin", counted)
    blocks = BLOCKS + 2
    receipt = session.put(tokens_of(14, blocks), payloads=payloads_of(14, blocks, MODEL))
    assert receipt.stored_blocks == blocks and stores == [blocks]


def test_a_payload_function_that_raises_leaves_nothing_reserved(daemon: RunningDaemon, session: Session) -> None:
    payloads: list[Any] = [*payloads_of(5, BLOCKS, MODEL)]

    def fail(destination: Bytes) -> None:
        raise RuntimeError("no more")

    payloads[3] = fail
    with pytest.raises(RuntimeError, match="no more"):
        session.put(tokens_of(5, BLOCKS), payloads=payloads)
    assert eventually(lambda: reserved(daemon) == 0)
    assert put(session, 5) == ["stored"] * BLOCKS or session.lookup(tokens_of(5, BLOCKS)).blocks == BLOCKS


def test_slots_of_a_message_that_comes_too_late_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client believes that it may write for longer than the daemon does."""
    monkeypatch.setattr(slot_requests, "USABLE_SHARE", 100.0)
    payloads: list[Any] = [*payloads_of(5, BLOCKS, MODEL)]
    last = payloads[-1]

    def fill(destination: Bytes) -> None:
        time.sleep(0.5 if not uses_staging(session) else 0.0)
        np.copyto(destination, last)

    payloads[-1] = fill
    settings = ("put.in_place=true", "limits.lease_ttl_ms=400", *SETTINGS)
    with running_daemon(*settings) as daemon, daemon.connect(MODEL) as session:
        receipt = session.put(tokens_of(5, BLOCKS), payloads=payloads)
        assert receipt.statuses == ["stored"] * BLOCKS and uses_staging(session)
        assert eventually(lambda: reserved(daemon) == 0)


def test_a_put_larger_than_a_client_may_hold_goes_piece_by_piece(daemon: RunningDaemon, session: Session) -> None:
    blocks = 3 * (8 << 20) // SLOT + 5
    tokens, payloads = tokens_of(6, blocks), payloads_of(6, blocks, MODEL)
    assert session.put(tokens, payloads=payloads).stored_blocks == blocks
    assert not uses_staging(session)
    with daemon.connect(MODEL) as other, other.get(tokens) as lease:
        assert holds(lease, payloads)


def test_two_clients_that_put_the_same_blocks_end_with_one_of_each(daemon: RunningDaemon, session: Session) -> None:
    with daemon.connect(MODEL) as other:
        for conversation in range(10, 20):
            found: list[list[str]] = []
            threads = [
                threading.Thread(target=lambda each=each: found.append(put(each, conversation)))  # type: ignore[misc]  # noqa: B023
                for each in (session, other)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert {status for statuses in found for status in statuses} <= {"stored", "present"}
            with session.get(tokens_of(conversation, BLOCKS)) as lease:
                assert holds(lease, payloads_of(conversation, BLOCKS, MODEL))
    assert eventually(lambda: reserved(daemon) == 0)


def test_without_room_the_put_goes_by_way_of_staging(
    daemon: RunningDaemon, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_place, "MIN_BYTES", 1 << 40)
    assert put(session, 30) == ["stored"] * BLOCKS and uses_staging(session)


def test_a_tier_full_of_others_makes_room_for_puts_in_place(daemon: RunningDaemon, session: Session) -> None:
    for conversation in range(40, 90):
        assert put(session, conversation) == ["stored"] * BLOCKS
    assert not uses_staging(session)
    assert daemon.status().counters["evicted_blocks"] > 0


def test_where_the_setting_is_off_the_client_puts_by_way_of_staging() -> None:
    with running_daemon(*SETTINGS) as daemon, daemon.connect(MODEL) as session:
        connection_of(session).writable.is_offered = True  # as of before a change of the setting
        assert put(session, 1) == ["stored"] * BLOCKS
        assert uses_staging(session) and not connection_of(session).writable.is_offered
        with session.get(tokens_of(1, BLOCKS)) as lease:
            assert holds(lease, payloads_of(1, BLOCKS, MODEL))


def test_a_client_killed_while_it_writes_leaves_nothing(daemon: RunningDaemon) -> None:
    with stopped_client(daemon.socket_dir, 256, 95, "put"):
        assert eventually(lambda: reserved(daemon) > 0)
    assert eventually(lambda: reserved(daemon) == 0, 5.0)
    with daemon.connect(MODEL) as session:
        there = session.lookup(tokens_of(95, BLOCKS)).blocks
        assert there <= 4, "what it had sent, if anything"
        assert put(session, 95)[there:] == ["stored"] * (BLOCKS - there)
        with session.get(tokens_of(95, BLOCKS)) as lease:
            assert holds(lease, payloads_of(95, BLOCKS, MODEL))


@pytest.mark.slow
def test_a_client_goes_on_in_place_after_a_restart_of_the_daemon() -> None:
    settings = ("put.in_place=true", *SETTINGS, "host.warm_restart=holder")
    with running_daemon(*settings) as daemon, daemon.connect(MODEL) as session:
        assert put(session, 1) == ["stored"] * BLOCKS
        daemon.kill9()
        daemon.restart()
        assert eventually(lambda: session.state == "connected" and session.ping() is not None)
        assert session.lookup(tokens_of(1, BLOCKS)).blocks == 0, "memory that a client wrote is not believed"
        assert put(session, 1) == ["stored"] * BLOCKS
        assert not uses_staging(session)
        with daemon.connect(MODEL) as other, other.get(tokens_of(1, BLOCKS)) as lease:
            assert holds(lease, payloads_of(1, BLOCKS, MODEL))
