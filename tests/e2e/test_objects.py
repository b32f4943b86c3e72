"""One scheme of names for objects: what kvctl or Python puts is got by unary calls, and the other way round."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvctl.output import FAILED, MISS
from kvstore_client.objects.named import get_head
from kvstore_client.objects.named import payloads_of as without_copy
from kvstore_proto.objects import OBJECTS, ChecksumKind, content_of, head_of, object_tokens, payloads_of
from kvstore_proto.v1 import unary_pb2 as pb
from tests.reference.kvctl import Kvctl
from tests.reference.running_daemon import RunningDaemon, running_daemon
from tests.reference.unary_client import UnaryClient, names, unary_client

CONTENT = np.random.default_rng(5).integers(0, 256, 150_000, np.uint8).tobytes()
BLOCK_BYTES = 64 << 10
BLOCKS = 3
OTHERS_TOKEN = "another tenant's"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    place = tmp_path_factory.mktemp("objects")
    (place / "kvstored.toml").write_text('[[tenant]]\nname = "other"\n')
    tokens = place / "tokens"
    tokens.touch(0o600)
    tokens.write_text(f"other {hashlib.sha256(OTHERS_TOKEN.encode()).hexdigest()}\n")
    with running_daemon(f"unary.tokens_file={tokens}", config=place / "kvstored.toml") as running:
        yield running


@pytest.fixture
def kvctl(daemon: RunningDaemon, capfdbinary: Any) -> Kvctl:
    return Kvctl(daemon, capfdbinary)


@pytest.fixture
def client(daemon: RunningDaemon) -> Iterator[UnaryClient]:
    """Return a client of the user who runs the daemon and kvctl."""
    with unary_client(f"unix:{daemon.socket_dir}/unary.sock") as unary:
        yield unary


@pytest.fixture
def others_client(daemon: RunningDaemon) -> Iterator[UnaryClient]:
    with unary_client(f"unix:{daemon.socket_dir}/unary.sock", OTHERS_TOKEN) as unary:
        yield unary


def chain(name: str) -> pb.Chain:
    return pb.Chain(object=name, object_blocks=BLOCKS)


def test_what_kvctl_put_is_got_by_a_unary_call_of_its_tenant_alone(
    kvctl: Kvctl, client: UnaryClient, others_client: UnaryClient, tmp_path: Path
) -> None:
    (tmp_path / "in").write_bytes(CONTENT)
    kvctl(["put", "--name", "by kvctl", "--block-size", "64KiB", str(tmp_path / "in")])
    got = client.get(chain("by kvctl"))
    assert names(got.statuses) == ["SENT"] * BLOCKS and content_of(got.payloads) == CONTENT
    assert names(others_client.lookup(chain("by kvctl")).statuses) == ["MISS"] * BLOCKS
    assert names(others_client.delete(chain("by kvctl")).statuses) == ["MISS"] * BLOCKS
    assert names(client.delete(chain("by kvctl")).statuses) == ["DELETED"] * BLOCKS
    kvctl("get --name by_kvctl", exit_code=MISS)


@pytest.mark.parametrize("kind", ChecksumKind)
def test_what_a_unary_call_put_is_got_by_kvctl(kvctl: Kvctl, client: UnaryClient, kind: ChecksumKind) -> None:
    name = f"by-unary-{kind.name}"
    payloads = payloads_of(CONTENT, head_of(CONTENT, BLOCK_BYTES, kind))
    assert names(client.put(chain(name), payloads).statuses) == ["STORED"] * BLOCKS
    assert kvctl(f"get --name {name}").bytes == CONTENT
    assert f"deleted {BLOCKS} blocks" in kvctl(f"delete --name {name}").out
    assert names(client.lookup(chain(name)).statuses) == ["MISS"] * BLOCKS


def test_kvctl_knows_the_same_bytes_by_either_checksum(kvctl: Kvctl, client: UnaryClient, tmp_path: Path) -> None:
    client.put(pb.Chain(object="same"), payloads_of(b"bytes", head_of(b"bytes", kind=ChecksumKind.SHA256)))
    (tmp_path / "same").write_bytes(b"bytes")
    (tmp_path / "other").write_bytes(b"other")
    assert "stored already" in kvctl(["put", "--name", "same", str(tmp_path / "same")]).out
    assert "other content" in kvctl(["put", "--name", "same", str(tmp_path / "other")], exit_code=FAILED).err


def test_what_another_tenant_put_under_a_name_is_another_object(
    kvctl: Kvctl, client: UnaryClient, others_client: UnaryClient, tmp_path: Path
) -> None:
    theirs = b"theirs, under the same name"
    others_client.put(pb.Chain(object="shared"), payloads_of(theirs, head_of(theirs)))
    kvctl("get --name shared", exit_code=MISS)
    assert names(client.lookup(pb.Chain(object="shared")).statuses) == ["MISS"]
    (tmp_path / "ours").write_bytes(b"ours")
    kvctl(["put", "--name", "shared", str(tmp_path / "ours")])
    assert content_of(client.get(pb.Chain(object="shared")).payloads) == b"ours"
    assert content_of(others_client.get(pb.Chain(object="shared")).payloads) == theirs


def test_a_python_session_shares_objects_with_unary_calls(daemon: RunningDaemon, client: UnaryClient) -> None:
    data = np.frombuffer(CONTENT[:1000], np.uint8)
    head = head_of(data.data)
    with daemon.connect(OBJECTS) as session:
        session.put(object_tokens("by python", 1), payloads=without_copy(head, data), payload_bytes=head.block_bytes)
        assert content_of(client.get(pb.Chain(object="by python")).payloads) == data.tobytes()
        client.put(pb.Chain(object="for python"), payloads_of(b"x", head_of(b"x")))
        assert get_head(session, "for python", 10.0) == (head_of(b"x"), "")
