"""The lookup index of a real daemon: it follows what happens to blocks, is one tenant's, and only it writes there."""

from __future__ import annotations

import fcntl
import grp
import mmap
import os
import struct
from collections.abc import Iterator

import pytest

from kvstore_client import Session
from kvstore_proto.lookup_index import FIXED_BYTES, LIVE, LIVE_OFFSET, IndexLayout, IndexState, read_layout
from kvstore_proto.v1 import handshake_pb2 as hs
from kvstore_proto.v1 import kvstore_pb2 as pb
from tests.reference.conversations import model, payloads_of, tokens_of
from tests.reference.raw_client import RawClient, as_user, connect_seqpacket
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon

MODEL = model()
OTHER_UID = 65534
ASK = hs.ClientPacket(lookup_index=hs.LookupIndexRequest())
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users")


@pytest.fixture
def session(daemon: RunningDaemon) -> Iterator[Session]:
    with daemon.connect() as connected:
        yield connected


def has_index(session: Session) -> bool:
    return eventually(lambda: session.probe(tokens_of(99, 1)).reason == "absent")


def memory_of(descriptor: int) -> mmap.mmap:
    return mmap.mmap(descriptor, os.fstat(descriptor).st_size, prot=mmap.PROT_READ)


def test_a_block_is_in_the_index_when_its_put_is_answered_and_gone_with_it(
    daemon: RunningDaemon, session: Session
) -> None:
    tokens = tokens_of(1, 3)
    assert has_index(session)
    assert session.probe(tokens).tiers == ("absent",) * 3
    session.put(tokens, payloads=payloads_of(1, 3, MODEL), wait="settled")
    answer = session.probe(tokens_of(1, 4))
    assert (answer.blocks, answer.tokens, answer.tiers) == (3, 192, ("host", "host", "host", "absent"))
    assert (answer.reason, session.probe(tokens).reason) == ("absent", "")
    daemon.drop("host")
    assert session.probe(tokens).tiers == ("nvme",) * 3
    with session.get(tokens) as lease:
        assert len(lease) == 3
        assert session.probe(tokens).tiers == ("host",) * 3, "promoted"
    assert eventually(lambda: daemon.status().leases == 0)
    daemon.drop("host", discard=True)
    daemon.drop("nvme", discard=True)
    assert session.lookup(tokens).blocks == 0
    assert session.probe(tokens).tiers == ("absent",) * 3


def test_what_was_stored_before_is_entered_when_the_first_client_asks(daemon: RunningDaemon) -> None:
    with daemon.connect() as writer:
        for conversation in range(1, 7):
            writer.put(tokens_of(conversation, 60), payloads=payloads_of(conversation, 60, MODEL))
        found = [writer.lookup(tokens_of(conversation, 60)).tiers for conversation in range(1, 7)]
    with daemon.connect(staging_bytes=0) as reader:
        assert has_index(reader)
        assert [reader.probe(tokens_of(conversation, 60)).tiers for conversation in range(1, 7)] == found
    with daemon.connect(staging_bytes=0) as again:  # the table went with the last client, and is made anew
        assert has_index(again)
        assert again.probe(tokens_of(6, 60)).tiers == found[-1]


def test_two_sessions_of_a_tenant_share_one_index(daemon: RunningDaemon, session: Session) -> None:
    with daemon.connect() as other:
        assert has_index(session) and has_index(other)
        other.put(tokens_of(2, 2), payloads=payloads_of(2, 2, MODEL))
        assert session.probe(tokens_of(2, 2)).blocks == 2
    assert session.probe(tokens_of(2, 2)).blocks == 2, "it stays while one of them is there"


def test_contains_is_sure_by_the_index_and_asks_where_it_is_not(daemon: RunningDaemon, session: Session) -> None:
    session.put(tokens_of(3, 2), payloads=payloads_of(3, 2, MODEL))
    assert session.contains(tokens_of(3, 4)) == 2, "by a lookup, unless the index was there at once"
    asked = session.statistics().lookups
    assert has_index(session)
    assert session.contains(tokens_of(3, 4)) == session.contains(keys=session.keys(tokens_of(3, 4))) == 2
    assert session.contains(tokens_of(4, 1)) == 0
    assert session.contains([]) == 0
    assert session.statistics().lookups == asked <= 1, "the daemon got no further lookup"


def test_contains_asks_where_there_is_no_index() -> None:
    with running_daemon("index.slots=0") as daemon, daemon.connect() as session:
        session.put(tokens_of(3, 2), payloads=payloads_of(3, 2, MODEL))
        assert session.contains(tokens_of(3, 4)) == 2
        assert session.statistics().lookups == 1


def test_an_overflowing_index_is_unsure_and_contains_is_not() -> None:
    with running_daemon("index.slots=6") as daemon, daemon.connect() as session:
        assert has_index(session)
        session.put(tokens_of(5, 12), payloads=payloads_of(5, 12, MODEL))
        answer = session.probe(tokens_of(5, 12))
        assert answer.tiers.count("host") == 6 and answer.tiers.count("unknown") == 6
        assert answer.reason == "unknown"
        assert session.probe(tokens_of(99, 1)).reason == "unknown", "it may be one of those that found no room"
        assert session.contains(tokens_of(5, 14)) == 12


@pytest.mark.parametrize(("setting", "offered"), [("index.slots=0", False), ("host.staging=1MiB", True)])
def test_without_an_index_a_probe_is_unknown_and_contains_asks(setting: str, offered: bool) -> None:
    """Switched off; or no memory for it: a sixteenth of 1 MiB, and a quarter of that, holds a small one."""
    with running_daemon(setting, "host.arena=1MiB") as daemon:
        with RawClient(daemon.socket_dir, MODEL) as client:
            assert client.welcome.lookup_index is offered
            reply, descriptor = client.shake(ASK)
            assert (descriptor >= 0) is offered and (reply.lookup_index.size_bytes > 0) is offered
            assert bool(reply.lookup_index.reason) is not offered
            if descriptor >= 0:
                assert reply.lookup_index.size_bytes <= (1 << 20) // 64
                os.close(descriptor)
        with daemon.connect() as session:
            session.put(tokens_of(1, 2), payloads=payloads_of(1, 2, MODEL))
            assert session.contains(tokens_of(1, 3)) == 2
            if not offered:
                assert (session.probe(tokens_of(1, 2)).reason, session.probe([]).reason) == ("unknown", "")


def test_its_memory_is_within_what_is_set_aside(daemon: RunningDaemon, session: Session) -> None:
    before = daemon.tiers()["host"].used_bytes
    assert has_index(session)
    assert daemon.tiers()["host"].used_bytes == before, "counted from the start"
    with RawClient(daemon.socket_dir, MODEL) as client:
        reply, descriptor = client.shake(ASK)
        assert reply.lookup_index.size_bytes == os.fstat(descriptor).st_size <= (8 << 20) // 16 // 4
        os.close(descriptor)


def test_only_the_daemon_writes_it(daemon: RunningDaemon) -> None:
    """Not even its own user or root, who could reopen an arena: the index is sealed against future writers."""
    with RawClient(daemon.socket_dir, MODEL) as client:
        reply, descriptor = client.shake(ASK)
        size = reply.lookup_index.size_bytes
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, size)
        with pytest.raises(OSError):
            os.pwrite(descriptor, b"x", 0)
        with pytest.raises(OSError):
            fcntl.fcntl(descriptor, 1033, 0x8)  # F_ADD_SEALS
        try:
            again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
        except PermissionError:
            again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
        for action in (
            lambda: mmap.mmap(again, size),
            lambda: os.pwrite(again, b"x", 4096),
            lambda: os.ftruncate(again, 0),
            lambda: os.ftruncate(again, 2 * size),
        ):
            with pytest.raises(OSError):
                action()
        os.close(again)
        os.close(descriptor)


def test_it_says_closed_when_no_client_follows_it_any_more(daemon: RunningDaemon) -> None:
    with RawClient(daemon.socket_dir, MODEL) as client:
        _, descriptor = client.shake(ASK)
        memory = memory_of(descriptor)
        assert eventually(lambda: LIVE.unpack_from(memory, LIVE_OFFSET)[0] == IndexState.SERVING)
    assert eventually(lambda: LIVE.unpack_from(memory, LIVE_OFFSET)[0] == IndexState.CLOSED)
    memory.close()
    os.close(descriptor)


@pytest.mark.parametrize("greeted", [False, True])
def test_asking_before_hello_or_twice(daemon: RunningDaemon, greeted: bool) -> None:
    with RawClient(daemon.socket_dir, MODEL) as client:
        if greeted:
            inodes = set()
            for _ in range(3):
                reply, descriptor = client.shake(ASK)
                inodes.add(os.fstat(descriptor).st_ino)
                os.close(descriptor)
            assert len(inodes) == 1, "one table, however often it is asked for"
        else:
            client.connection.close()
            client.connection = connect_seqpacket(daemon.socket_dir / "handshake.sock")
            reply, _ = client.shake(ASK)
            assert reply.refused.kind == pb.ERROR_KIND_UNAUTHENTICATED


@needs_root
def test_another_tenant_gets_its_own_index_and_nothing_of_ours() -> None:
    group = grp.getgrgid(OTHER_UID).gr_name
    with running_daemon(f"daemon.socket_group={group}") as daemon:
        daemon.directory.chmod(0o755)
        with RawClient(daemon.socket_dir, MODEL) as ours, daemon.connect() as session:
            assert has_index(session)
            session.put(tokens_of(1, 3), payloads=payloads_of(1, 3, MODEL))
            _, descriptor = ours.shake(ASK)
            memory = memory_of(descriptor)
            mine, path = read_layout(memory), f"/proc/{os.getpid()}/fd/{descriptor}"
            assert isinstance(mine, IndexLayout)

            def attack() -> tuple[bytes, int, list[str]]:
                theirs = RawClient(daemon.socket_dir, MODEL)
                _, given = theirs.shake(ASK)
                raw = memory_of(given)
                layout = read_layout(raw)
                assert isinstance(layout, IndexLayout)
                routes = []
                for name, place in (("ours by path", path), ("theirs for writing", f"/proc/self/fd/{given}")):
                    try:
                        os.close(os.open(place, os.O_RDWR if "writing" in name else os.O_RDONLY))
                        routes.append(name)
                    except PermissionError:
                        pass
                return layout.tenant, LIVE.unpack_from(raw, LIVE_OFFSET)[1], routes

            tenant, keys, routes = as_user(OTHER_UID, attack)
            assert tenant != mine.tenant
            assert keys == 0, "three blocks are stored, none of them theirs"
            assert routes == []
            assert LIVE.unpack_from(memory, LIVE_OFFSET)[1] == 3
            memory.close()
            os.close(descriptor)


def test_the_header_is_what_the_documents_say(daemon: RunningDaemon) -> None:
    """Read without our code, as another language would."""
    with RawClient(daemon.socket_dir, MODEL) as client:
        _, descriptor = client.shake(ASK)
        raw = os.pread(descriptor, 4096, 0)
        magic, version, bucket_bytes, header_bytes, buckets = struct.unpack_from("<4sHHII", raw)
        assert (magic, version, bucket_bytes, header_bytes) == (b"KVI1", 1, 64, 4096)
        assert os.fstat(descriptor).st_size == header_bytes + buckets * bucket_bytes
        assert not any(raw[FIXED_BYTES + LIVE.size :])
        os.close(descriptor)
