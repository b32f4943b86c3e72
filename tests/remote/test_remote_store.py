"""A remote tier over a real server: the contract of tiers, workers that die or hang, servers that lie or are full."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
import redis

from kvstore_proto.arena import slot_bytes
from kvstore_tiers.base import OutcomeKind, Slot, Tier
from kvstore_tiers.keyed import KeyedTier
from kvstore_tiers.objects import object_name
from kvstore_tiers.remote.encryption import Sealer
from kvstore_tiers.remote.store import RemoteStore
from kvstore_tiers.segments import segment_of
from kvstore_tiers.testing import TierContract
from kvstore_tiers.testing.transfers import block, finish, get, put
from tests.reference.examples import each_nth
from tests.reference.remote_servers import RedisServer, redis_server
from tests.reference.running_daemon import eventually
from tests.reference.stored_blocks import stored_slot

SECRET = bytes(range(32))
MIB = 1 << 20
PAYLOAD_BYTES = 20_000
TENANT = block(0, 1)[0].tenant


def open_store(url: str, *, plain: bool = False, timeout_s: float = 2.0, secret: bytes = SECRET) -> RemoteStore:
    return RemoteStore(
        "remote", url, secret=secret, is_plain=lambda _digest: plain, timeout_s=timeout_s,
        exchange_bytes=16 * MIB, credentials={},
    )  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    with closing(redis.Redis.from_url(server.url)) as connection:
        connection.flushall()
        yield connection


def contents(client: redis.Redis) -> dict[bytes, bytes]:
    return {key: client.get(key) for key in client.scan_iter()}  # type: ignore[misc]


@contextmanager
def opened(server: RedisServer, **options: bool | float | bytes) -> Iterator[tuple[KeyedTier, RemoteStore]]:
    store = open_store(server.url, **options)  # type: ignore[arg-type]
    with closing(KeyedTier(store, 64 * MIB)) as tier:
        yield tier, store


class _OverRedis(TierContract):
    plain: bool

    @pytest.fixture(autouse=True)
    def store(self, server: RedisServer, client: redis.Redis) -> None:
        self.url = server.url

    def make_tier(self, capacity_bytes: int) -> Tier:
        return KeyedTier(open_store(self.url, plain=self.plain), capacity_bytes)


@pytest.mark.slow
class TestEncryptedTier(_OverRedis):
    plain = False


@pytest.mark.slow
class TestPlainTier(_OverRedis):
    plain = True


def slot_for(tier: KeyedTier, key: bytes, payload_bytes: int = PAYLOAD_BYTES) -> Slot:
    """A slot of a block that another process stored."""
    slot = tier.allocate(slot_bytes(payload_bytes))
    assert slot is not None
    tier.adopt(slot, TENANT, key)
    return slot


@pytest.mark.parametrize("plain", [False, True])
def test_another_process_of_the_same_secret_reads_what_was_written(
    server: RedisServer, client: redis.Redis, plain: bool
) -> None:
    header, payload = block(1, PAYLOAD_BYTES)
    with opened(server, plain=plain) as (ours, _):
        assert put(ours, header, payload) is not None
    with opened(server, plain=plain) as (theirs, _):
        outcome, copy = get(theirs, slot_for(theirs, header.key), header.key, PAYLOAD_BYTES)
        assert outcome.ok and np.array_equal(copy, payload)
    with opened(server, plain=plain, secret=bytes(32)) as (stranger, _):
        outcome, _ = get(stranger, slot_for(stranger, header.key), header.key, PAYLOAD_BYTES)
        assert outcome.kind is OutcomeKind.MISSING


def test_the_server_has_nothing_that_can_be_read(server: RedisServer, client: redis.Redis) -> None:
    header, payload = block(7, PAYLOAD_BYTES, tokens=64)
    with opened(server) as (tier, _):
        assert put(tier, header, payload) is not None
        dump = b"".join(key + value for key, value in contents(client).items())
        for secret in (header.key, header.tenant, header.tokens, header.tokens[:16], payload.tobytes()[:32]):
            assert secret not in dump and secret.hex().encode() not in dump


def test_a_tenant_that_demands_encryption_gets_no_plain_value(server: RedisServer, client: redis.Redis) -> None:
    header, payload = block(1, PAYLOAD_BYTES)
    with opened(server, plain=True) as (tier, _):
        assert put(tier, header, payload) is not None
    with opened(server) as (tier, _):
        outcome, _ = get(tier, slot_for(tier, header.key), header.key, PAYLOAD_BYTES)
        assert outcome.kind is OutcomeKind.CORRUPT and "not encrypted" in outcome.message


@pytest.mark.parametrize("kind", ["encrypted", pytest.param("plain", marks=pytest.mark.slow)])
def test_no_corruption_of_a_value_is_served(server: RedisServer, client: redis.Redis, kind: str) -> None:
    """Bit flips, values of other blocks and tenants, truncation, old versions."""
    sealer, draw = Sealer(SECRET), random.Random(5)
    blocks = [block(number, PAYLOAD_BYTES) for number in range(1, 9)]
    with opened(server, plain=kind == "plain") as (tier, _):
        slots = [put(tier, header, payload) for header, payload in blocks]
        names = [sealer.value_name(object_name(TENANT, header.key)).encode() for header, _ in blocks]
        stored = contents(client)
        keys = [next(key for key in stored if key.endswith(name)) for name in names]
        for attempt in range(300):
            at = draw.randrange(8)
            value = bytearray(stored[keys[at]])
            match attempt % 4:
                case 0:
                    position = draw.randrange(len(value))
                    if kind == "plain" and 304 <= position < 4144:
                        continue  # after the token ids the header page is padding, of which no byte means anything
                    if kind == "plain" and (6 <= position < 8 or 16 <= position < 48 or position >= len(value) - 16):
                        continue  # what the envelope has for the other kind
                    value[position] ^= 1 << draw.randrange(8)
                case 1:
                    value = bytearray(stored[keys[(at + 1) % 8]])
                case 2:
                    del value[draw.randrange(len(value)) :]
                case 3:
                    value[4] = 0
            client.set(keys[at], bytes(value))
            slot = slots[at]
            assert slot is not None
            outcome, _ = get(tier, slot, blocks[at][0].key, PAYLOAD_BYTES)
            assert outcome.kind in (OutcomeKind.CORRUPT, OutcomeKind.MISSING), attempt
            client.set(keys[at], stored[keys[at]])
        for slot, (header, payload) in zip(slots, blocks, strict=True):
            assert slot is not None
            outcome, copy = get(tier, slot, header.key, PAYLOAD_BYTES)
            assert outcome.ok and np.array_equal(copy, payload)


def test_a_damaged_value_is_removed_and_can_be_stored_again(server: RedisServer, client: redis.Redis) -> None:
    header, payload = block(1, PAYLOAD_BYTES)
    with opened(server) as (tier, _):
        slot = stored_slot(tier, header, payload)
        (key,) = contents(client)
        client.set(key, b"garbage" * 100)
        assert get(tier, slot, header.key, PAYLOAD_BYTES)[0].kind is OutcomeKind.CORRUPT
        tier.quarantine(slot, "it is damaged")
        slot = stored_slot(tier, header, payload)
        outcome, copy = get(tier, slot, header.key, PAYLOAD_BYTES)
        assert outcome.ok and np.array_equal(copy, payload)


def test_a_block_leaves_this_node_and_not_the_store_until_it_is_removed_by_order(tmp_path: Path) -> None:
    """A server that makes room by itself serves other nodes, too."""
    header, payload = block(1, PAYLOAD_BYTES)
    with (
        redis_server(tmp_path, maxmemory="64mb", maxmemory_policy="allkeys-lru") as server,
        opened(server) as (tier, _),
    ):
        slot = stored_slot(tier, header, payload)
        tier.free(slot)
        assert finish(tier.sync).ok and server.ask("DBSIZE") == ":1\r\n"
        tier.remove(TENANT, [header.key])
        assert finish(tier.sync).ok and server.ask("DBSIZE") == ":0\r\n"


def test_a_worker_that_dies_costs_what_was_under_way(server: RedisServer, client: redis.Redis) -> None:
    header, payload = block(1, PAYLOAD_BYTES)
    with opened(server) as (tier, store):
        slot = stored_slot(tier, header, payload)
        former = store.worker_pid
        assert former is not None
        os.kill(former, signal.SIGKILL)
        assert eventually(lambda: get(tier, slot, header.key, PAYLOAD_BYTES)[0].ok)
        assert store.restarts >= 1 and store.worker_pid != former
        assert finish(tier.probe).ok


def test_a_worker_that_hangs_is_replaced(
    server: RedisServer, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore_tiers.remote.process.SPARE_S", 0.2)
    header, payload = block(1, PAYLOAD_BYTES)
    with opened(server, timeout_s=0.5) as (tier, store):
        slot = put(tier, header, payload)
        assert slot is not None and store.worker_pid is not None
        os.kill(store.worker_pid, signal.SIGSTOP)
        assert get(tier, slot, header.key, PAYLOAD_BYTES)[0].kind is OutcomeKind.FAILED
        assert eventually(lambda: get(tier, slot, header.key, PAYLOAD_BYTES)[0].ok)


def test_a_server_that_is_full_says_so(tmp_path: Path) -> None:
    with redis_server(tmp_path, maxmemory="4mb", maxmemory_policy="noeviction") as server, opened(server) as (tier, _):
        kinds = []
        for number in range(1, 400):
            header, payload = block(number, PAYLOAD_BYTES)
            slot = tier.allocate(slot_bytes(PAYLOAD_BYTES))
            assert slot is not None
            outcome = finish(lambda done, h=header, p=payload, s=slot: tier.write(s, h, [segment_of(p)], done))  # type: ignore[misc]
            kinds.append((outcome.kind, outcome.errno))
            if not outcome.ok:
                break
        assert kinds[0][0] is OutcomeKind.DONE and kinds[-1] == (OutcomeKind.FAILED, 28)


def test_a_server_that_is_away_fails_within_the_bound_and_is_used_when_it_is_back(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server, opened(server, timeout_s=0.5) as (tier, store):
        header, payload = block(1, PAYLOAD_BYTES)
        server.freeze()
        assert finish(tier.probe).kind is OutcomeKind.FAILED
        server.thaw()
        assert eventually(lambda: finish(tier.probe).ok)
        server.kill()
        assert finish(tier.probe).kind is OutcomeKind.FAILED
        server.start()
        assert eventually(lambda: finish(tier.probe).ok)
        assert put(tier, header, payload) is not None and store.restarts == 0


@pytest.mark.parametrize("url", each_nth(["redis://127.0.0.1:1", "unix:///nowhere"], 2))
def test_a_store_that_cannot_be_reached_is_a_failed_probe(url: str) -> None:
    with closing(KeyedTier(open_store(url, timeout_s=0.5), MIB)) as tier:
        assert finish(tier.probe).kind is OutcomeKind.FAILED


def test_a_driver_that_cannot_be_opened_says_why(caplog: pytest.LogCaptureFixture) -> None:
    store = open_store("redis://host?nonsense=1", timeout_s=0.5)
    with closing(KeyedTier(store, MIB)) as tier:
        outcome = finish(tier.probe)
        assert outcome.kind is OutcomeKind.FAILED and "nonsense" in outcome.message


def test_a_store_that_hangs_does_not_keep_a_tier_from_closing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore_tiers.keyed.CLOSE_S", 0.1)
    with redis_server(tmp_path) as server:
        tier = KeyedTier(open_store(server.url, timeout_s=30.0), 64 * MIB)
        assert finish(tier.probe).ok
        server.freeze()
        ended: list[OutcomeKind] = []
        for number in range(1, 41):
            header, payload = block(number, PAYLOAD_BYTES)
            slot = tier.allocate(slot_bytes(PAYLOAD_BYTES))
            assert slot is not None
            tier.write(slot, header, [segment_of(payload)], lambda outcome: ended.append(outcome.kind))
        tier.close()
        server.thaw()
        assert len(ended) == 40 and OutcomeKind.DONE not in ended
