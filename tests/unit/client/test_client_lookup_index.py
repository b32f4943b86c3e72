"""The client's side of the lookup index: getting it, not getting it, damaged memory, and daemons that know none."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvstore_client
from kvstore_client import Fingerprint, LayerGroup
from kvstore_client.handshake import GrantedIndex, Handshake
from kvstore_client.lookup_index import FIRST_WAIT_S, RETRY_S, IndexSource, LookupIndex, map_index, probe
from kvstore_proto.identity import BlockKeys
from kvstore_proto.lookup_index import BUCKET_BYTES, HEADER_BYTES, LIVE, LIVE_OFFSET, IndexState
from kvstore_proto.v1 import handshake_pb2 as hs
from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstored.clients.lookup_index import IndexTable
from tests.reference.fake_daemon import FakeDaemon
from tests.reference.index_memory import image_of, index_over, key_of, reader_of, run_of, table_of

FULL, WINDOW = LayerGroup(0, "full", 0, (0, 1), 32), LayerGroup(1, "sliding", 128, (2,), 32)
FINGERPRINT = Fingerprint("m", "w", groups=(FULL, WINDOW))
HOST, NVME = pb.TIER_CODE_HOST, pb.TIER_CODE_NVME


@pytest.fixture
def table() -> Iterator[IndexTable]:
    """Keys 0 to 2 and 5 in DRAM, 3 on NVMe."""
    made = table_of(16)
    for number, code in ((0, HOST), (1, HOST), (2, HOST), (3, NVME), (5, HOST)):
        made.put([key_of(number)], code)
    yield made
    made.close()


def granted(table: IndexTable) -> GrantedIndex:
    return GrantedIndex(table.layout.size_bytes, table.readonly_fd())


# What a probe says


def test_a_probe_says_what_a_lookup_would(table: IndexTable) -> None:
    index = reader_of(table)
    probed = probe(index, run_of(*range(7)), FINGERPRINT, FULL)
    assert probed.tiers == ("host", "host", "host", "nvme", "absent", "host", "absent")
    assert (probed.blocks, probed.tokens, probed.reason, probed.estimated_load_s) == (4, 256, "absent", 0.0)
    assert probe(index, run_of(0, 3), FINGERPRINT, FULL).reason == ""
    assert probe(index, run_of(8, 2, 3, 8), FINGERPRINT, WINDOW).blocks == 3, "two blocks of a window are enough"
    assert probe(index, BlockKeys(), FINGERPRINT, FULL) == probe(None, BlockKeys(), FINGERPRINT, FULL)


def test_unknown_counts_only_where_it_matters(table: IndexTable) -> None:
    image = image_of(table)
    index = index_over(image, table)
    before = index.codes(run_of(*range(16)))
    image[HEADER_BYTES : HEADER_BYTES + BUCKET_BYTES] ^= 0xFF  # one bucket is damaged
    damaged = [number for number, code in enumerate(index.codes(run_of(*range(16)))) if code == 0xFF]
    kept = [number for number in range(16) if number not in damaged]
    assert [index.codes(run_of(number))[0] for number in kept] == [before[number] for number in kept]
    absent = next(number for number in kept if not before[number])
    present = next(number for number in kept if before[number])
    odd = damaged[0] if damaged else pytest.fail("the first bucket is empty: choose another seed")
    assert probe(index, run_of(present, absent, odd), FINGERPRINT, FULL).reason == "absent", "it ends before"
    assert probe(index, run_of(present, odd, absent), FINGERPRINT, FULL).reason == "unknown"
    assert probe(index, run_of(absent, odd, present), FINGERPRINT, WINDOW).reason == "unknown"


@pytest.mark.parametrize("state", [IndexState.CLOSED, 3, 1 << 60])
def test_a_table_without_a_writer_says_nothing(table: IndexTable, state: int) -> None:
    image = image_of(table)
    LIVE.pack_into(image.data, LIVE_OFFSET, state, 5, 0, 5)
    assert probe(index_over(image, table), run_of(0, 9), FINGERPRINT, FULL).tiers == ("unknown", "unknown")


def test_a_table_being_built_says_what_is_there_only(table: IndexTable) -> None:
    table.set_state(IndexState.BUILDING)
    assert probe(reader_of(table), run_of(0, 9), FINGERPRINT, FULL).tiers == ("host", "unknown")


def test_a_tier_of_a_later_release_is_unknown(table: IndexTable) -> None:
    table.put([key_of(0)], 77)
    probed = probe(reader_of(table), run_of(0), FINGERPRINT, FULL)
    assert probed.tiers == ("unknown",)


# Getting it


def test_memory_that_cannot_be_read_is_no_index(table: IndexTable) -> None:
    open_before = len(os.listdir("/proc/self/fd"))
    image = bytearray(image_of(table).tobytes())
    for place, byte in ((0, 0), (4, 2), (20, 99), (58, 1)):
        damaged = bytearray(image)
        damaged[place] = byte
        assert isinstance(map_index(_memory(bytes(damaged))), str)
    assert isinstance(map_index(_memory(bytes(image[:-64]))), str)
    assert isinstance(map_index(_memory(b"x" * 100)), str)
    assert isinstance(map_index(GrantedIndex(1 << 30, os.memfd_create("short"))), str)
    assert map_index(GrantedIndex(0, -1, "none today")) == "none today"
    assert isinstance(map_index(_memory(bytes(image))), LookupIndex)
    assert len(os.listdir("/proc/self/fd")) <= open_before + 1, "descriptors are closed, mapped or not"


def _memory(content: bytes) -> GrantedIndex:
    descriptor = os.memfd_create("index")
    os.write(descriptor, content)
    return GrantedIndex(len(content), descriptor)


def test_only_the_first_probe_waits(table: IndexTable) -> None:
    waits: list[float] = []
    answers: list[GrantedIndex | None] = [None, None, None, granted(table)]

    def request(timeout_s: float) -> GrantedIndex | None:
        waits.append(timeout_s)
        return answers[len(waits) - 1]

    source = IndexSource(request)
    assert source.get(may_wait=False) is None
    assert source.get(may_wait=True) is None
    assert source.get(may_wait=True) is None
    index = source.get(may_wait=True)
    assert index is not None and source.get(may_wait=True) is index
    assert waits == [0.0, FIRST_WAIT_S, 0.0, 0.0]


def test_after_a_refusal_it_is_asked_for_again_some_time(table: IndexTable) -> None:
    now = 100.0
    answers = [GrantedIndex(0, -1, "no memory"), granted(table)]
    source = IndexSource(lambda _: answers.pop(0), clock=lambda: now)
    assert source.get(may_wait=True) is None and source.reason == "no memory"
    assert source.get(may_wait=True) is None and len(answers) == 1
    now += RETRY_S + 0.1
    assert source.get(may_wait=False) is not None


def test_a_daemon_of_before_is_not_asked() -> None:
    source = IndexSource(None)
    assert source.get(may_wait=True) is None
    assert "offers no" in source.reason


@pytest.fixture
def ends() -> Iterator[tuple[Handshake, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    handshake = Handshake(ours, hs.Welcome(lookup_index=True), -1)
    yield handshake, theirs
    handshake.close()
    theirs.close()


def send(theirs: socket.socket, packet: hs.DaemonPacket, with_descriptor: bool = True) -> None:
    descriptors = [os.memfd_create("memory")] if with_descriptor else []
    socket.send_fds(theirs, [packet.SerializeToString()], descriptors)
    for descriptor in descriptors:
        os.close(descriptor)


def send_stream(theirs: socket.socket) -> socket.socket:
    """Hand over a direct stream; our end of it."""
    ours, far = socket.socketpair()
    with ours:
        grant = hs.DaemonPacket(direct_stream=hs.DirectStreamGrant())
        socket.send_fds(theirs, [grant.SerializeToString()], [ours.fileno()])
    return far


def test_what_is_handed_over_as_a_stream_and_is_none_is_closed(ends: tuple[Handshake, socket.socket]) -> None:
    handshake, theirs = ends
    send(theirs, hs.DaemonPacket(direct_stream=hs.DirectStreamGrant()))
    before = len(os.listdir("/proc/self/fd"))
    assert handshake.request_stream(60.0) is None
    assert len(os.listdir("/proc/self/fd")) == before


def drained(theirs: socket.socket) -> list[str | None]:
    """Return what was asked for and not looked at yet."""
    asked = []
    with contextlib.suppress(BlockingIOError):
        while True:
            asked.append(hs.ClientPacket.FromString(theirs.recv(1000, socket.MSG_DONTWAIT)).WhichOneof("packet"))
    return asked


def test_late_answers_and_answers_for_another_caller_reach_their_caller(
    ends: tuple[Handshake, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    handshake, theirs = ends
    with monkeypatch.context() as patch:
        patch.setattr("kvstore_client.handshake.NO_WAIT_S", 60.0)
        assert handshake.request_index(0.0) is None
    assert handshake.request_index(0.001) is None
    assert hs.ClientPacket.FromString(theirs.recv(1000)).WhichOneof("packet") == "lookup_index"
    with pytest.raises(BlockingIOError):
        theirs.recv(1000, socket.MSG_DONTWAIT)  # it was asked for once
    assert handshake.request_arena(3, 0.001) is None
    send(theirs, hs.DaemonPacket(lookup_index=hs.LookupIndexGrant(size_bytes=8192)))
    send(theirs, hs.DaemonPacket(arena=hs.ArenaGrant(arena_id=3, size_bytes=4096)))
    arena = handshake.request_arena(3, 60.0)
    assert arena is not None and arena.size_bytes == 4096
    sent_before = drained(theirs)
    grant = handshake.request_index(0.0)
    assert grant is not None and grant.size_bytes == 8192
    assert sent_before and not drained(theirs), "it had come already: nothing more was asked for"
    os.close(grant.descriptor)
    os.close(arena.descriptor)


def test_a_stream_that_came_late_is_the_one_that_is_taken_and_no_other_is_asked_for(
    ends: tuple[Handshake, socket.socket],
) -> None:
    handshake, theirs = ends
    assert handshake.request_stream(0.001) is None
    assert handshake.request_stream(0.001) is None
    assert drained(theirs) == ["direct_stream"]
    send_stream(theirs).close()
    send(theirs, hs.DaemonPacket(arena=hs.ArenaGrant(arena_id=3, size_bytes=4096)))
    arena = handshake.request_arena(3, 60.0)
    assert arena is not None
    os.close(arena.descriptor)
    assert drained(theirs) == ["arena"]
    stream = handshake.request_stream(0.001)
    assert stream is not None and drained(theirs) == []
    stream.close()
    assert handshake.request_stream(0.001) is None
    assert drained(theirs) == ["direct_stream"]


def test_of_two_streams_the_later_one_is_kept(ends: tuple[Handshake, socket.socket]) -> None:
    """The daemon has ended the other one."""
    handshake, theirs = ends
    send_stream(theirs).close()
    far = send_stream(theirs)
    send(theirs, hs.DaemonPacket(arena=hs.ArenaGrant(arena_id=3, size_bytes=4096)))
    arena = handshake.request_arena(3, 60.0)
    assert arena is not None
    os.close(arena.descriptor)
    stream = handshake.request_stream(0.001)
    assert stream is not None
    with stream, far:
        stream.send(b"x")
        assert far.recv(1) == b"x"


def test_an_index_that_there_was_no_time_to_ask_for_is_asked_for_later(
    ends: tuple[Handshake, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    handshake, theirs = ends
    send(theirs, hs.DaemonPacket(lookup_index=hs.LookupIndexGrant(reason="none")), with_descriptor=False)
    with monkeypatch.context() as patch:
        patch.setattr("kvstore_client.handshake.NO_WAIT_S", -1.0)  # we stood still for as long as it takes
        assert handshake.request_index(-1.0) is None
    with pytest.raises(BlockingIOError):
        theirs.recv(1000, socket.MSG_DONTWAIT)
    assert handshake.request_index(60.0) == GrantedIndex(0, -1, "none")
    asked = theirs.recv(1000, socket.MSG_DONTWAIT)
    assert hs.ClientPacket.FromString(asked).WhichOneof("packet") == "lookup_index"


def test_an_arena_that_comes_while_the_index_is_awaited_is_kept(ends: tuple[Handshake, socket.socket]) -> None:
    handshake, theirs = ends
    assert handshake.request_arena(3, 0.001) is None
    send(theirs, hs.DaemonPacket(arena=hs.ArenaGrant(arena_id=3, size_bytes=4096)))
    send(theirs, hs.DaemonPacket(lookup_index=hs.LookupIndexGrant(reason="none")), with_descriptor=False)
    assert handshake.request_index(60.0) == GrantedIndex(0, -1, "none")
    arena = handshake.request_arena(3, 60.0)
    assert arena is not None
    os.close(arena.descriptor)


def test_a_refusal_or_an_end_is_no_index(ends: tuple[Handshake, socket.socket]) -> None:
    handshake, theirs = ends
    send(theirs, hs.DaemonPacket(refused=pb.Error(kind=pb.ERROR_KIND_INVALID)), with_descriptor=False)
    assert handshake.request_index(60.0) is None
    theirs.close()
    assert handshake.request_index(60.0) is None
    handshake.close()
    assert handshake.request_index(60.0) is None


# Sessions


def test_with_a_daemon_of_before_a_probe_is_unknown_and_contains_asks(tmp_path: Path) -> None:
    """The double answers the handshake as daemons did before there was an index."""
    tokens = range(64 * 3)
    payloads = [bytes([block]) * FINGERPRINT.payload_bytes() for block in range(3)]
    with (
        FakeDaemon(tmp_path) as daemon,
        kvstore_client.connect(tmp_path, fingerprint=FINGERPRINT, deadline_s=20.0, connect_timeout_s=10.0) as session,
    ):
        session.put(list(tokens), payloads=payloads)
        probed = session.probe(list(tokens))
        assert (probed.blocks, probed.reason, probed.tiers) == (0, "unknown", ("unknown",) * 3)
        assert session.contains(list(tokens)) == 3
        statistics = session.statistics()
        assert (statistics.probes, statistics.probes_unknown, statistics.lookups) == (2, 2, 1)
        daemon.knobs.silent.add("lookup")
        assert session.contains(list(tokens), deadline_s=0.02) is None


def test_without_a_daemon_nothing_is_known(tmp_path: Path) -> None:
    with kvstore_client.connect(tmp_path / "none", fingerprint=FINGERPRINT) as session:
        assert session.probe([1] * 64).reason == "no_daemon"
        assert session.contains([1] * 64) is None
