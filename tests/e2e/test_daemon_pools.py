"""Shared pools: a tenant publishes, listed tenants read and can change nothing, nobody else learns of it."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from kvstore_client import KVStoreError, Session
from kvstore_proto.lookup_index import IndexState, read_state
from kvstore_proto.v1 import admin_pb2
from kvstore_proto.v1 import handshake_pb2 as hs
from kvstore_proto.v1 import kvstore_pb2 as kv
from kvstore_proto.v1 import unary_pb2 as pb
from kvstore_proto.v1.explain_pb2 import ExplainRequest
from tests.reference.conversations import found_blocks, holds, model, payloads_of, put_conversation, tokens_of
from tests.reference.examples import quick_are
from tests.reference.kvctl import Kvctl
from tests.reference.raw_client import RawClient
from tests.reference.running_daemon import RunningDaemon, running_daemon
from tests.reference.unary_client import by_tokens, names, unary_client

MODEL = model()
BLOCK_BYTES = MODEL.payload_bytes() + 4096
MOST = 12  # blocks of the publisher and its pool together
NAMES = ("author", "reader", "stranger")
POOL = '[[tenant]]\nname = "prompts"\npublisher = "author"\nreaders = ["reader"]\n'


def listing(pool: str = POOL) -> str:
    tenants = [f'[[tenant]]\nname = "{name}"\nsocket = true\n' for name in NAMES]
    return tenants[0] + f"host_max = {MOST * BLOCK_BYTES}\n" + "".join(tenants[1:]) + pool


@pytest.fixture
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    place = tmp_path_factory.mktemp("pools")
    (place / "kvstored.toml").write_text(listing())
    (place / "tokens").touch(0o600)
    (place / "tokens").write_text("".join(f"{name} {hashlib.sha256(name.encode()).hexdigest()}\n" for name in NAMES))
    settings = (f"unary.tokens_file={place / 'tokens'}", "put.in_place=true", "nvme.enabled=false", "host.policy=lru")
    with running_daemon(*settings, config=place / "kvstored.toml") as running:
        yield running


def pool_of(daemon: RunningDaemon, tenant: str) -> Session:
    return daemon.connect(MODEL, own=tenant, pool="prompts")


def test_a_tenant_publishes_and_a_listed_one_reads(daemon: RunningDaemon) -> None:
    with pool_of(daemon, "author") as author, pool_of(daemon, "reader") as reader:
        assert author.tenant == reader.tenant == "prompts"
        put_conversation(author, 1, 3)
        assert found_blocks(reader, 1, 3) == 3
        assert reader.lookup(tokens_of(1, 4)).blocks == 3
    for tenant in NAMES:
        with daemon.connect(MODEL, own=tenant) as private:
            assert found_blocks(private, 1, 3) == 0, "the pool is apart from everybody's own blocks"
    status = {tenant.name: tenant for tenant in daemon.ask("Tenants", admin_pb2.TenantsRequest()).tenants}
    assert status["prompts"].blocks == 3 and list(status["prompts"].recognised_by) == [
        "shared pool: author puts, reader reads"
    ]


def test_explain_names_the_pool_and_no_other_reader(daemon: RunningDaemon) -> None:
    with pool_of(daemon, "author") as author:
        put_conversation(author, 1, 1)
        with RawClient(daemon.own_socket("reader"), MODEL, pool="prompts") as reader:
            reader.socket_dir = daemon.socket_dir  # of the gRPC stream
            key = reader.keys(tokens_of(1, 1)).packed.hex()
            explained = reader.ask(explain=ExplainRequest(keys=[key])).explain
            assert [block.block.tenant for block in explained.blocks] == ["prompts"]
            assert reader.ask(explain=ExplainRequest(recent_misses=5)).error.kind == kv.ERROR_KIND_FORBIDDEN
            with pool_of(daemon, "reader") as other, other.get(tokens_of(1, 1)):
                (told,) = reader.ask(explain=ExplainRequest(keys=[key])).explain.blocks
            shown = {field.name for field, _ in told.block.ListFields()}
            assert not shown & {"leases", "accesses", "idle_s", "residency"}, "how others use it is not its business"


def test_a_reader_makes_no_weights_the_newest(daemon: RunningDaemon) -> None:
    first, later = (replace(MODEL, weights="policy", weights_version=number) for number in (1, 9))
    with daemon.connect(first, own="author", pool="prompts") as author:
        put_conversation(author, 1, 3)
        with RawClient(daemon.own_socket("reader"), later, pool="prompts") as reader:
            reader.socket_dir = daemon.socket_dir
            answer = reader.ask(bump_weights=kv.BumpWeights(weights="policy", version=9))
            assert answer.error.kind == kv.ERROR_KIND_FORBIDDEN
        chain = by_tokens(later, tokens_of(1, 3))
        chain.pool = "prompts"
        with unary_client(f"unix:{daemon.socket_dir}/unary.sock", "reader") as unary:
            assert not unary.lookup(chain).usable_blocks
        assert found_blocks(author, 1, 3) == 3
    with daemon.connect(first, own="author", pool="prompts", required=True) as again:
        assert found_blocks(again, 1, 3) == 3


def test_a_reader_changes_nothing(daemon: RunningDaemon) -> None:
    with pool_of(daemon, "author") as author:
        put_conversation(author, 1, 3)
        with RawClient(daemon.own_socket("reader"), MODEL, pool="prompts") as reader:
            reader.socket_dir = daemon.socket_dir  # of the gRPC stream
            assert reader.staging_fd < 0 and not reader.welcome.put_in_place
            keys = reader.keys(tokens_of(1, 3))
            own = kv.KeySet(keys=keys.packed)
            refused: list[dict[str, Any]] = [
                {"lend": kv.Lend()},
                {"store": reader.store_of(keys, [1, 2, 3])},
                {"store": reader.store_of(keys, [1, 2, 3], reservation=1)},
                {"reserve_slots": kv.ReserveSlots(payload_bytes=MODEL.payload_bytes(), blocks=1)},
                {"delete": kv.Delete(set=own)},
                {"touch": kv.Touch(set=own, terms=kv.Terms(pin="us"))},
                {"touch": kv.Touch(set=own, terms=kv.Terms(ttl_s=1))},
            ]
            for request in refused:
                answer = reader.ask(**request)
                assert answer.error.kind == kv.ERROR_KIND_FORBIDDEN, answer
                assert "shared pool prompts" in answer.error.message
            assert reader.ask(touch=kv.Touch(set=own)).touch.touched == 3
            for arena in reader.welcome.arena_ids:
                reply, _ = reader.shake(hs.ClientPacket(arena=hs.ArenaRequest(arena_id=arena, writable=True)))
                assert reply.HasField("refused"), "no arena is writable for a reader"
                reply, descriptor = reader.shake(hs.ClientPacket(arena=hs.ArenaRequest(arena_id=arena)))
                with pytest.raises(PermissionError):
                    mmap.mmap(descriptor, reply.arena.size_bytes, prot=mmap.PROT_READ | mmap.PROT_WRITE)
                os.close(descriptor)
        assert found_blocks(author, 1, 3) == 3


def test_nobody_else_learns_of_a_pool(daemon: RunningDaemon) -> None:
    with pool_of(daemon, "author") as author:
        put_conversation(author, 1, 3)
    said = set()
    for pool in ("prompts", "no-such-pool", "author", "uid-0"):
        with pytest.raises(KVStoreError) as refused:
            daemon.connect(MODEL, own="stranger", pool=pool)
        said.add(str(refused.value))
    assert len(said) == 1 and "has no shared pool of this name" in said.pop()


def test_a_publisher_s_quota_is_its_and_its_pool_s(daemon: RunningDaemon) -> None:
    with pool_of(daemon, "author") as pool, daemon.connect(MODEL, own="author") as own:
        put_conversation(pool, 1, MOST - 4)
        for conversation in range(2, 6):
            put_conversation(own, conversation, 4)
            status = {tenant.name: tenant for tenant in daemon.ask("Tenants", admin_pb2.TenantsRequest()).tenants}
            assert status["author"].host_bytes + status["prompts"].host_bytes <= MOST * BLOCK_BYTES
        assert pool.lookup(tokens_of(1, MOST - 4)).blocks == MOST - 4, "its own blocks made room for its own"
        for conversation in range(6, 9):
            put_conversation(pool, conversation, 4)
            status = {tenant.name: tenant for tenant in daemon.ask("Tenants", admin_pb2.TenantsRequest()).tenants}
            assert status["author"].host_bytes + status["prompts"].host_bytes <= MOST * BLOCK_BYTES


def test_an_operator_who_sets_a_pool_is_told_whom_to_set(daemon: RunningDaemon, capfdbinary: Any) -> None:
    for command in (["set", "prompts", "--max", "4MiB"], ["reset", "prompts"]):
        refused = Kvctl(daemon, capfdbinary)(["tenants", *command], exit_code=1).err
        assert "'prompts' is a shared pool" in refused and "set tenant 'author'" in refused


def test_who_is_listed_no_more_reads_no_more(daemon: RunningDaemon) -> None:
    with pool_of(daemon, "author") as author, RawClient(daemon.own_socket("reader"), MODEL, pool="prompts") as reader:
        put_conversation(author, 1, 3)
        assert daemon.config is not None
        daemon.config.write_text(listing(POOL.replace('["reader"]', '["stranger"]')))
        daemon.ask("Reload", admin_pb2.ReloadRequest())
        with pytest.raises((EOFError, ConnectionError)):
            reader.shake(hs.ClientPacket(direct_stream=hs.DirectStreamRequest()))
        assert found_blocks(author, 1, 3) == 3, "a publisher stays connected"
        with pool_of(daemon, "stranger") as now:
            assert found_blocks(now, 1, 3) == 3


@pytest.mark.parametrize("way", quick_are(["reload", "restart", "kill"], [True, False, True]))
def test_who_is_listed_no_more_sees_no_later_block_in_what_it_has_mapped(daemon: RunningDaemon, way: str) -> None:
    """Nor in what a process keeps whose connection has ended long before; the others lose nothing."""
    before, after = payloads_of(1, 3, MODEL)[0].tobytes(), payloads_of(2, 1, MODEL)[0].tobytes()
    if way != "reload":
        daemon.stop()
        daemon.settings += ("host.warm_restart=holder",)
        daemon.restart()
    with pool_of(daemon, "author") as author:
        put_conversation(author, 1, 3)
    with RawClient(daemon.own_socket("reader"), MODEL, pool="prompts") as reader:
        arenas, table = [], reader.shake(hs.ClientPacket(lookup_index=hs.LookupIndexRequest()))[1]
        for number in reader.welcome.arena_ids:
            grant, descriptor = reader.shake(hs.ClientPacket(arena=hs.ArenaRequest(arena_id=number)))
            arenas.append(mmap.mmap(descriptor, grant.arena.size_bytes, prot=mmap.PROT_READ))
            os.close(descriptor)
    assert any(arena.find(before) >= 0 for arena in arenas)
    assert daemon.config is not None
    daemon.config.write_text(listing(POOL.replace('["reader"]', '["stranger"]')))
    if way == "reload":
        daemon.ask("Reload", admin_pb2.ReloadRequest())
    else:
        daemon.stop() if way == "restart" else daemon.kill9()
        daemon.restart()
    with pool_of(daemon, "author") as author, pool_of(daemon, "stranger") as now:
        assert found_blocks(now, 1, 3) == 3
        put_conversation(author, 2, 1)
        assert found_blocks(now, 2, 1) == 1
        with now.get(tokens_of(1, 3)) as lease:
            assert holds(lease, payloads_of(1, 3, MODEL))
    assert all(arena.find(after) < 0 for arena in arenas)
    assert way == "kill" or read_state(os.pread(table, 4096, 0)) != IndexState.SERVING
    for arena in arenas:
        arena.close()
    os.close(table)


def test_a_listing_that_grows_over_a_restart_leaves_arenas_their_room(daemon: RunningDaemon) -> None:
    def used_bytes() -> int:
        return int(daemon.ask("Tiers", admin_pb2.TiersRequest()).tiers[0].used_bytes)

    daemon.stop()
    daemon.settings += ("host.warm_restart=holder",)
    daemon.restart()
    with pool_of(daemon, "author") as author:
        put_conversation(author, 1, 3)
    before = used_bytes()
    assert daemon.config is not None
    daemon.config.write_text(listing(POOL.replace('["reader"]', '["reader", "stranger"]')))
    daemon.kill9()
    daemon.restart()
    with pool_of(daemon, "author") as author, pool_of(daemon, "stranger") as stranger:
        put_conversation(author, 2, 1)
        assert (found_blocks(stranger, 1, 3), found_blocks(stranger, 2, 1)) == (3, 1)
    assert used_bytes() == before


def test_pins_of_a_publisher_and_its_pool_leave_another_tenant_its_minimum(daemon: RunningDaemon) -> None:
    """Both count together, and nothing that is pinned takes the room that is guaranteed to a tenant."""
    assert daemon.config is not None
    least = listing().replace(f"host_max = {MOST * BLOCK_BYTES}\n", "")
    daemon.config.write_text(least.replace('"stranger"\n', '"stranger"\nhost_min = "8MiB"\n'))
    daemon.ask("Reload", admin_pb2.ReloadRequest())
    pinned, blocks = 0, 32
    for own, pool in (("author", "prompts"), ("author", ""), ("reader", "")):
        with daemon.connect(MODEL, own=own, pool=pool) as session, pytest.raises(KVStoreError, match="unpin some"):
            for number in range(1000):
                put_conversation(session, 1 + number, blocks, pin="x")
                pinned += blocks
    with daemon.connect(MODEL, own="stranger") as stranger:
        for number in range(16):
            put_conversation(stranger, 1 + number, blocks)
        room = (8 << 20) // BLOCK_BYTES // blocks
        assert sum(found_blocks(stranger, 16 - number, blocks) for number in range(room)) == room * blocks
    assert 0 < pinned * BLOCK_BYTES <= 12 << 20  # three quarters of 32 - 8 of staging - 8 MiB


def test_unary_calls_name_a_pool(daemon: RunningDaemon) -> None:
    target = f"unix:{daemon.socket_dir}/unary.sock"
    chain, payloads = by_tokens(MODEL, tokens_of(1, 2)), payloads_of(1, 2, MODEL)
    chain.pool = "prompts"
    with unary_client(target, "author") as author, unary_client(target, "reader") as reader:
        assert names(author.put(chain, payloads).statuses) == ["STORED"] * 2
        assert list(reader.get(chain).payloads) == [payload.tobytes() for payload in payloads]
        for change in (
            lambda: reader.put(chain, payloads),
            lambda: reader.delete(chain),
            lambda: reader.touch(chain, terms=kv.Terms(ttl_s=5)),
            lambda: reader.put(pb.Chain(object="x", pool="prompts"), [b"x"]),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                change()
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    with unary_client(target, "stranger") as stranger, pytest.raises(grpc.RpcError) as refused:
        stranger.lookup(chain)
    assert "has no shared pool of this name" in str(refused.value.details())
