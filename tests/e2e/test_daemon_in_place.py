"""Reserve and Store on the wire: blocks written in place are served, and nothing that was not stored ever is."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore_proto.arena import HEADER_BYTES, TOKEN_COUNT_OFFSET, TOKENS_OFFSET, slot_bytes
from kvstore_proto.identity import pack_tokens
from kvstore_proto.v1 import admin_pb2
from kvstore_proto.v1 import handshake_pb2 as hs
from kvstore_proto.v1 import kvstore_pb2 as pb
from tests.reference.conversations import holds, model, payloads_of, tokens_of
from tests.reference.raw_client import RawClient
from tests.reference.running_daemon import MIB, RunningDaemon, eventually, running_daemon
from tests.reference.stopped_client import stopped_client

MODEL = model()
PAYLOAD_BYTES = MODEL.payload_bytes()
SLOT = slot_bytes(PAYLOAD_BYTES)
STORED, PRESENT, WANTED = pb.STORE_STATUS_STORED, pb.STORE_STATUS_PRESENT, pb.STORE_STATUS_WANTED
AGAIN, MISMATCH = pb.STORE_STATUS_AGAIN, pb.STORE_STATUS_KEY_MISMATCH
LEASE_MS = 400
IN_PLACE = ("put.in_place=true", "host.capacity=48MiB", f"limits.lease_ttl_ms={LEASE_MS}")


class InPlace:
    """A raw client that puts in place."""

    def __init__(self, raw: RawClient) -> None:
        self.raw = raw

    def reserve(self, blocks: int, **fields: object) -> pb.ReserveSlotsReply:
        response = self.answer(blocks, **fields)
        assert response.HasField("reserve_slots"), response
        return response.reserve_slots

    def answer(self, blocks: int, **fields: object) -> pb.Response:
        asked = {"payload_bytes": PAYLOAD_BYTES, "blocks": blocks} | fields
        return self.raw.ask(reserve_slots=pb.ReserveSlots(**asked))  # type: ignore[arg-type]

    @contextmanager
    def arena(self, number: int) -> Iterator[mmap.mmap]:
        request = hs.ArenaRequest(arena_id=number, writable=True)
        reply, descriptor = self.raw.shake(hs.ClientPacket(arena=request))
        assert reply.arena.writable, reply
        try:
            with mmap.mmap(descriptor, reply.arena.size_bytes) as memory:
                yield memory
        finally:
            os.close(descriptor)

    def write(self, granted: pb.ReserveSlotsReply, conversation: int) -> None:
        """The first blocks of a conversation into the slots granted."""
        blocks = len(granted.offsets)
        payloads = payloads_of(conversation, blocks, MODEL)
        for block, (number, offset) in enumerate(zip(granted.arena_ids, granted.offsets, strict=True)):
            packed = pack_tokens(tokens_of(conversation, block + 1)[block * 64 :])
            with self.arena(number) as memory:
                at = offset + TOKEN_COUNT_OFFSET
                memory[at : at + 4] = (len(packed) // 4).to_bytes(4, "little")
                memory[offset + TOKENS_OFFSET : offset + TOKENS_OFFSET + len(packed)] = packed
                memory[offset + HEADER_BYTES : offset + HEADER_BYTES + PAYLOAD_BYTES] = payloads[block].tobytes()

    def store(self, conversation: int, reservation: int, pages: list[int]) -> list[int]:
        keys = self.raw.keys(tokens_of(conversation, len(pages)))
        return self.raw.store(keys, pages, loan=0, reservation=reservation)

    def put(self, conversation: int, blocks: int) -> pb.ReserveSlotsReply:
        granted = self.reserve(blocks)
        self.write(granted, conversation)
        assert self.store(conversation, granted.reservation, list(range(1, blocks + 1))) == [STORED] * blocks
        return granted


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(*IN_PLACE, "nvme.enabled=false") as running:
        yield running


@pytest.fixture
def client(daemon: RunningDaemon) -> Iterator[InPlace]:
    with RawClient(daemon.socket_dir, MODEL) as raw:
        yield InPlace(raw)
    assert eventually(lambda: daemon.status().clients == 0 == reserved(daemon))
    assert "Traceback" not in daemon.log, daemon.log


def test_blocks_written_in_place_are_served_to_others(daemon: RunningDaemon, client: InPlace) -> None:
    granted = client.put(1, 3)
    assert client.raw.welcome.put_in_place and set(granted.arena_ids) <= set(client.raw.welcome.writable_arena_ids)
    assert 0 < granted.expires_in_ms <= LEASE_MS
    with daemon.connect(MODEL) as session, session.get(tokens_of(1, 3)) as lease:
        assert holds(lease, payloads_of(1, 3, MODEL))


def test_a_reserved_block_is_found_by_no_lookup(daemon: RunningDaemon, client: InPlace) -> None:
    client.write(client.reserve(2), 2)
    with daemon.connect(MODEL) as session:
        assert session.lookup(tokens_of(2, 2)).reason == "never_stored"
        assert len(session.get(tokens_of(2, 2))) == 0


def test_a_slot_is_stored_from_once(client: InPlace) -> None:
    granted = client.reserve(2)
    client.write(granted, 3)
    assert client.store(3, granted.reservation, [1]) == [STORED]
    keys = client.raw.keys(tokens_of(3, 2))
    for pages in ([1, 2], [2, 2], [0, 3]):
        request = client.raw.store_of(keys, pages, loan=0, reservation=granted.reservation)
        response = client.raw.ask(store=request)
        assert (response.error.kind, "slot" in response.error.message) == (pb.ERROR_KIND_INVALID, True), response
    assert client.store(3, granted.reservation, [0, 2]) == [PRESENT, STORED]
    assert client.store(3, granted.reservation, [0, 2]) == [AGAIN, AGAIN], "the reservation is over"


def test_a_block_that_is_there_already_costs_nothing(daemon: RunningDaemon, client: InPlace) -> None:
    client.put(4, 2)
    granted = client.reserve(2)
    assert reserved(daemon) == 2
    client.write(granted, 4)
    assert client.store(4, granted.reservation, [1, 2]) == [PRESENT, PRESENT]
    assert reserved(daemon) == 0


def test_tokens_that_do_not_hash_to_the_key_are_not_stored(daemon: RunningDaemon, client: InPlace) -> None:
    granted = client.reserve(1)
    client.write(granted, 5)
    assert client.store(6, granted.reservation, [1]) == [MISMATCH]
    assert eventually(lambda: reserved(daemon) == 0)


@pytest.mark.parametrize("place", [HEADER_BYTES, HEADER_BYTES + PAYLOAD_BYTES - 1, 20])
def test_a_write_after_the_store_is_found_before_anybody_reads(
    daemon: RunningDaemon, client: InPlace, place: int
) -> None:
    conversation = 1000 + place
    granted = client.put(conversation, 3)
    with client.arena(granted.arena_ids[1]) as memory:
        memory[granted.offsets[1] + place] ^= 1
    with daemon.connect(MODEL) as session:
        lease = session.get(tokens_of(conversation, 3))
        assert (len(lease), lease.reason) == (1, "corrupt")
        assert holds(lease, payloads_of(conversation, 1, MODEL))
        lease.release()


def test_a_reservation_that_expires_stores_nothing_and_keeps_its_slots(daemon: RunningDaemon, client: InPlace) -> None:
    granted = client.reserve(2)
    client.write(granted, 7)
    time.sleep(LEASE_MS / 1000 + 0.1)
    assert client.store(7, granted.reservation, [1, 2]) == [AGAIN, AGAIN]
    assert reserved(daemon) == 2, "the client may still be writing"
    client.reserve(0, give_back=granted.reservation)
    assert reserved(daemon) == 0


def test_what_a_client_holds_is_bounded(daemon: RunningDaemon, client: InPlace) -> None:
    most = 2 * MIB // SLOT
    assert len(client.reserve(1000).offsets) == most
    assert client.reserve(1) == pb.ReserveSlotsReply()
    assert client.answer(5000).error.kind == pb.ERROR_KIND_TOO_LARGE
    assert client.answer(1, group=9).error.kind == pb.ERROR_KIND_INVALID
    assert client.answer(1, payload_bytes=5).error.kind == pb.ERROR_KIND_INVALID


def test_another_session_cannot_store_from_it(daemon: RunningDaemon, client: InPlace) -> None:
    granted = client.reserve(1)
    client.write(granted, 8)
    with RawClient(daemon.socket_dir, MODEL) as raw:
        other = InPlace(raw)
        assert other.store(8, granted.reservation, [1]) == [AGAIN]
        other.reserve(0, give_back=granted.reservation)
    assert client.store(8, granted.reservation, [1]) == [STORED]


def test_the_slots_of_a_session_that_ends_are_free_when_it_must_be_done(daemon: RunningDaemon) -> None:
    with RawClient(daemon.socket_dir, MODEL) as raw:
        InPlace(raw).reserve(3)
    assert eventually(lambda: daemon.status().clients == 0)
    assert reserved(daemon) == 3, "this process lives, and might be writing"
    assert eventually(lambda: reserved(daemon) == 0)


def reserved(daemon: RunningDaemon) -> int:
    """Slots in DRAM that no block has."""
    (tenant,) = daemon.ask("Tenants", admin_pb2.TenantsRequest()).tenants
    return int(tenant.host_bytes // SLOT) - daemon.tiers()["host"].blocks


def test_where_the_setting_is_off_nothing_is_reserved_nor_handed_out_writable() -> None:
    with running_daemon("nvme.enabled=false") as daemon, RawClient(daemon.socket_dir, MODEL) as raw:
        client = InPlace(raw)
        assert not raw.welcome.put_in_place and not raw.welcome.writable_arena_ids
        error = client.answer(1).error
        assert (error.kind, "put.in_place is off" in error.message) == (pb.ERROR_KIND_FORBIDDEN, True)
        request = hs.ArenaRequest(arena_id=raw.welcome.arena_ids[0], writable=True)
        reply, descriptor = raw.shake(hs.ClientPacket(arena=request))
        assert (reply.refused.kind, descriptor) == (pb.ERROR_KIND_NOT_FOUND, -1)


def test_the_slots_of_a_client_that_is_killed_are_free() -> None:
    with running_daemon("put.in_place=true", "nvme.enabled=false") as daemon:
        with stopped_client(daemon.socket_dir, 16, 9, "reserve"):
            assert reserved(daemon) == 3
        assert eventually(lambda: reserved(daemon) == 0, 5.0), "long before the reservation expires"
        with daemon.connect(MODEL) as session:
            assert session.lookup(tokens_of(9, 3)).reason == "never_stored"


@pytest.mark.slow
def test_blocks_put_in_place_make_room_and_reach_nvme_like_others() -> None:
    """A tier full of ordinary blocks gives way to blocks in place, and both are served, from DRAM and from NVMe."""
    settings = ("put.in_place=true", "host.capacity=16MiB", "durability.mode=none")
    with running_daemon(*settings) as daemon, RawClient(daemon.socket_dir, MODEL) as raw:
        client = InPlace(raw)
        with daemon.connect(MODEL) as session:
            for conversation in range(100, 140):
                assert session.put(
                    tokens_of(conversation, 16), payloads=payloads_of(conversation, 16, MODEL), wait="settled"
                )
            for conversation in range(200, 240):
                client.put(conversation, 16)
            for conversation in (*range(100, 140), *range(200, 240)):
                with session.get(tokens_of(conversation, 16)) as lease:
                    assert holds(lease, payloads_of(conversation, 16, MODEL)), conversation


def test_what_is_reserved_counts_against_the_tenants_maximum(tmp_path: Path) -> None:
    config = tmp_path / "kvstored.toml"
    config.write_text(
        f'[put]\nin_place = true\n[[tenant]]\nname = "small"\nuids = [{os.getuid()}]\nhost_max = {20 * SLOT}\n'
    )
    with running_daemon("nvme.enabled=false", config=config) as daemon, RawClient(daemon.socket_dir, MODEL) as raw:
        client = InPlace(raw)
        client.put(1, 8)
        granted = client.reserve(12)
        assert len(granted.offsets) == 12
        with daemon.connect(MODEL) as session:
            payloads = payloads_of(2, 8, MODEL)
            assert session.put(tokens_of(2, 8), payloads=payloads).stored_blocks == 8
            assert daemon.tiers()["host"].blocks == 8, "the eight of before made room"
            assert len(client.reserve(16).offsets) == 8, "so do those, and no more can"
            assert daemon.tiers()["host"].blocks == 0


def test_blocks_in_place_do_not_outlive_the_daemon_but_on_nvme() -> None:
    """Memory that clients wrote is not believed by a next process: it is given back, however it is kept."""
    with running_daemon(*IN_PLACE, "host.warm_restart=holder", "durability.mode=always") as daemon:
        with RawClient(daemon.socket_dir, MODEL) as raw:
            client = InPlace(raw)
            client.put(1, 3)
            granted = client.reserve(2)
            client.write(granted, 2)
            keys = raw.keys(tokens_of(2, 2))
            request = raw.store_of(
                keys, [1, 2], loan=0, reservation=granted.reservation, durability=pb.DURABILITY_MODE_NONE
            )
            assert list(raw.ask(store=request).store.statuses) == [STORED, STORED]
            with daemon.connect(MODEL) as session:
                assert (
                    session.put(tokens_of(3, 2), payloads=payloads_of(3, 2, MODEL), durability="none").stored_blocks
                    == 2
                )
            daemon.kill9()
        daemon.restart()
        with daemon.connect(MODEL) as session:
            for conversation, blocks in ((1, 3), (2, 0), (3, 2)):
                with session.get(tokens_of(conversation, 3)) as lease:
                    assert holds(lease, payloads_of(conversation, 3, MODEL)[:blocks]), conversation
        assert "Traceback" not in daemon.log
