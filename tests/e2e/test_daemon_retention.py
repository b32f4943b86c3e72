"""How long blocks are kept, asked for by every kind of client, and shown to operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvstore_client
from kvstore_client import KVStoreError, Session
from kvstore_proto.v1 import kvstore_pb2 as pb
from tests.reference.clocked_daemon import clocked_daemon
from tests.reference.conversations import model, payloads_of, tokens_of
from tests.reference.kvctl import Kvctl
from tests.reference.raw_client import RawClient
from tests.reference.running_daemon import eventually, running_daemon
from tests.reference.unary_client import by_tokens, names, unary_client

MODEL = model()
S = 1_000_000_000


def put(session: Session, conversation: int, blocks: int = 2, **terms: Any) -> None:
    receipt = session.put(tokens_of(conversation, blocks), payloads=payloads_of(conversation, blocks, MODEL), **terms)
    assert receipt.visible_blocks == blocks


def test_a_put_and_a_touch_say_when_blocks_expire() -> None:
    with clocked_daemon("limits.lease_ttl_ms=1000000000") as daemon, daemon.connect() as session:
        put(session, 1, ttl=10)
        put(session, 2)
        put(session, 3, ttl=10)
        assert session.touch(tokens_of(3, 2), ttl=100) == 2
        with session.get(tokens_of(1, 2)) as lease:
            daemon.clock.advance(ns=10 * S)
            found = session.lookup(tokens_of(1, 2))
            assert (found.blocks, found.reason) == (0, "expired")
            assert session.get(tokens_of(1, 2)).blocks == 0
            assert bytes(lease.payload(1)) == bytes(payloads_of(1, 2, MODEL)[1]), "a reader keeps what it has"
        assert eventually(lambda: daemon.ask(lambda store: store.counters["expired_blocks"]) == 2)
        assert session.lookup(tokens_of(2, 2)).blocks == session.lookup(tokens_of(3, 2)).blocks == 2
        assert session.touch(tokens_of(1, 2), ttl=100) == 0, "gone is gone"
        daemon.clock.advance(ns=100 * S)
        assert session.lookup(tokens_of(3, 2)).reason == "expired"
        assert session.lookup(tokens_of(2, 2)).blocks == 2


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"ttl": 0.5}, "ttl must be from 1 to"),
        ({"ttl": float("nan")}, "ttl must be from 1 to"),
        ({"ttl": "1h"}, "ttl must be from 1 to"),
        ({"priority": 9}, "priority must be a whole number from -8 to 7"),
        ({"pin": 3}, "pin must be text"),
        ({"pin": "x" * 65}, "pin must name an owner"),
    ],
)
def test_wrong_terms_are_named_before_anything_is_sent(wrong: dict[str, Any], says: str, tmp_path: Path) -> None:
    with kvstore_client.connect(tmp_path, fingerprint=MODEL) as session:  # no daemon is there
        with pytest.raises(KVStoreError, match=says):
            session.touch(tokens_of(1, 1), **wrong)
        with pytest.raises(KVStoreError, match=says):
            session.put(tokens_of(1, 1), payloads=payloads_of(1, 1, MODEL), **wrong)


def test_pinned_blocks_outlive_a_flood_until_they_are_unpinned() -> None:
    settings = ("nvme.enabled=false", "host.capacity=8MiB", "host.staging=2MiB", "host.policy=lru")
    with clocked_daemon(*settings) as daemon, daemon.connect() as session:
        put(session, 1, pin="nightly")

        def flood(first: int) -> None:
            for conversation in range(first, first + 30):
                session.put(tokens_of(conversation, 16), payloads=payloads_of(conversation, 16, MODEL))

        flood(100)
        assert daemon.ask(lambda store: store.counters["evicted_blocks"]) > 0
        assert session.lookup(tokens_of(1, 2)).blocks == 2
        assert session.touch(tokens_of(1, 2), unpin="nightly") == 2
        flood(200)
        assert session.lookup(tokens_of(1, 2)).reason == "evicted"


def test_more_pins_than_the_daemon_allows_are_refused_and_nothing_is_stored() -> None:
    with clocked_daemon("limits.pinned_per_tenant=64KiB") as daemon, daemon.connect() as session:
        with pytest.raises(KVStoreError, match=r"limits\.pinned_per_tenant"):
            put(session, 1, 8, pin="greedy")
        assert session.lookup(tokens_of(1, 8)).blocks == 0


def test_calls_of_other_languages_carry_terms(capfdbinary: Any, tmp_path: Path) -> None:
    """The unary service, the gRPC stream, and what kvctl shows of it all."""
    with running_daemon() as daemon:
        kvctl = Kvctl(daemon, capfdbinary)
        assert "EXPIRES" not in kvctl("blocks").out
        with unary_client(f"unix:{daemon.socket_dir}/unary.sock") as unary:
            chain = by_tokens(MODEL, tokens_of(1, 2))
            payloads = [bytes(payload) for payload in payloads_of(1, 2, MODEL)]
            stored = unary.put(chain, payloads, terms=pb.Terms(ttl_s=3600, priority=-2))
            assert names(stored.statuses) == ["STORED"] * 2
        with RawClient(daemon.socket_dir, MODEL) as raw:
            keys = pb.KeySet(keys=raw.keys(tokens_of(1, 2)).packed)
            assert raw.ask(touch=pb.Touch(set=keys, terms=pb.Terms(pin="raw"))).touch.touched == 2
            wrong = raw.ask(touch=pb.Touch(set=keys, terms=pb.Terms(priority=99))).error
            assert wrong.kind == pb.ERROR_KIND_INVALID and "-8 to 7, got 99" in wrong.message
        listed = kvctl("blocks").out
        assert all(column in listed for column in ("EXPIRES", "PRIORITY", "PINNED BY")) and "KIND" not in listed
        for block in kvctl.json("blocks")["blocks"]:
            assert 0 < block["expires_in_s"] <= 3600
            assert (block["priority"], block["pinned_by"], block["leases"]) == (-2, ["raw"], 0)
            assert block["kind"] == "full"
        assert "raw" in kvctl(["explain", kvctl.json("blocks")["blocks"][0]["key"]]).out


def test_a_tenants_new_blocks_have_its_terms(tmp_path: Path, capfdbinary: Any) -> None:
    from os import geteuid

    settings = tmp_path / "settings.toml"
    settings.write_text(f"[[tenant]]\nname = 'chat'\nuids = [{geteuid()}]\nttl_s = 600\npriority = 3\n")
    with running_daemon(config=settings) as daemon:
        with daemon.connect() as session:
            put(session, 1)
            put(session, 2, ttl=0)
        shown = {block["priority"] for block in Kvctl(daemon, capfdbinary).json("blocks")["blocks"]}
        expiring = [block["expires_in_s"] > 0 for block in Kvctl(daemon, capfdbinary).json("blocks")["blocks"]]
        assert shown == {3} and sorted(expiring) == [False, False, True, True]
