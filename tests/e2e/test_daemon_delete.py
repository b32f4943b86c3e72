"""Delete on the wire: what a client may take away, in how many requests, and what a malformed request gets."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvstore_client
from kvstore_client import KVStoreError, aio
from kvstore_client.session import Session
from kvstore_proto.v1 import kvstore_pb2 as pb
from tests.reference.conversations import model, payloads_of, put_conversation, tokens_of
from tests.reference.raw_client import RawClient
from tests.reference.running_daemon import RunningDaemon, running_daemon

MODEL = model()


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon("limits.max_keys=16") as running:
        yield running


def put(session: Session, conversation: int, blocks: int) -> None:
    receipt = put_conversation(session, conversation, blocks, wait="settled")
    assert receipt.stored_blocks == blocks, receipt


def test_a_chain_over_the_limit_of_keys_goes_from_its_end(daemon: RunningDaemon) -> None:
    with daemon.connect(MODEL) as session:
        put(session, 1, 40)
        deleted = session.delete(tokens_of(1, 40))
        assert (deleted.blocks, deleted.missing, deleted.continued) == (40, 0, 0)
        assert daemon.status().blocks == 0
        assert all(tier.used_by["blocks"] == 0 for tier in daemon.tiers().values())


def test_a_branch_keeps_what_another_branch_continues(daemon: RunningDaemon) -> None:
    """Two conversations under one system prompt: deleting one leaves the other whole."""
    one, other = tokens_of(1, 4), tokens_of(1, 4)
    other[3 * 64 :] += 1
    with daemon.connect(MODEL) as session:
        put(session, 1, 4)
        assert session.put(other, payloads=payloads_of(2, 1, MODEL), first_block=3).stored_blocks == 1
        deleted = session.delete(one)
        assert (deleted.blocks, deleted.continued, deleted.leased) == (1, 3, 0)
        assert session.lookup(other).blocks == 4 and session.lookup(one).blocks == 3
        assert session.delete(other).blocks == 4


def test_a_lease_of_another_session_keeps_its_blocks(daemon: RunningDaemon) -> None:
    with daemon.connect(MODEL) as session, daemon.connect(MODEL) as reader:
        put(session, 1, 3)
        with reader.get(tokens_of(1, 2)) as lease:
            deleted = session.delete(tokens_of(1, 3))
            assert (deleted.blocks, deleted.leased) == (1, 2)
            assert lease.valid and len(lease) == 2
        assert reader.delete(tokens_of(1, 3)).blocks == 2, "its own released lease does not stand in the way"


def test_what_is_not_there_is_missing_and_no_error(daemon: RunningDaemon) -> None:
    with daemon.connect(MODEL) as session:
        assert session.delete(tokens_of(77, 3)).missing == 3
        assert session.delete([1, 2, 3]).missing == 0, "no full block"
        with pytest.raises(KVStoreError, match="not both and not neither"):
            session.delete()


def test_malformed_requests_get_an_error_and_the_stream_goes_on(daemon: RunningDaemon) -> None:
    with RawClient(daemon.socket_dir, MODEL) as client:
        for key_set, kind in [
            (pb.KeySet(keys=b"x" * 17), pb.ERROR_KIND_INVALID),
            (pb.KeySet(keys=b"x" * 16 * 17), pb.ERROR_KIND_TOO_LARGE),
            (pb.KeySet(group=9, keys=b"x" * 16), pb.ERROR_KIND_INVALID),
        ]:
            assert client.ask(delete=pb.Delete(set=key_set)).error.kind == kind
        assert client.ask(delete=pb.Delete()).delete == pb.DeleteReply()
        assert client.ask(delete=pb.Delete(set=pb.KeySet(keys=b"x" * 32))).delete.missing == 2
        assert client.ask(ping=pb.Ping(payload=b"still here")).ping.payload == b"still here"


def test_without_a_daemon_the_reason_says_so(tmp_path: Path) -> None:
    with kvstore_client.connect(tmp_path, fingerprint=MODEL) as session:
        deleted = session.delete(tokens_of(1, 2))
        assert (deleted.blocks, deleted.reason, session.tenant) == (0, "no_daemon", "")


def test_a_session_for_asyncio_deletes_too(daemon: RunningDaemon) -> None:
    async def run() -> int:
        connecting = aio.connect(daemon.socket_dir, fingerprint=MODEL, required=True, deadline_s=20)
        async with await connecting as session:
            await session.put(tokens_of(5, 2), payloads=payloads_of(5, 2, MODEL), wait="settled")
            return (await session.delete(tokens_of(5, 2))).blocks

    assert asyncio.run(run()) == 2


def test_a_delete_is_in_the_log_with_its_user() -> None:
    with running_daemon() as daemon:
        with daemon.connect(MODEL) as session:
            put(session, 9, 3)
            assert session.delete(tokens_of(9, 3)).blocks == 3
        daemon.stop()
        assert f"delete of uid-{os.getuid()}: 3 blocks (48.0 KiB) in 1 call, by uid {os.getuid()}, " in daemon.log
        assert f"(pid {os.getpid()})" in daemon.log
