"""Intake when something in it is wrong: nothing of a request that failed is left behind, and the next one works."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore_proto.arena import slot_bytes
from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.fingerprint import Fingerprint, LayerGroup
from kvstore_proto.identity import NO_PARENT
from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstored.clients.sessions import ClientSession
from kvstored.clients.staging import StagingMemory
from kvstored.clients.tenants import Peer, Tenant
from kvstored.config.schema import TenantSection
from kvstored.rpc.verbs.put import SLICE_SLOTS, PutVerb
from kvstored.store.blocks.check import check
from kvstored.store.operations import Operations, put
from kvstored.telemetry import DeletionLog
from tests.reference.small_store import SmallStore, small_store
from tests.reference.tiers import HOST

PAYLOAD_BYTES = 5000
SLOT = slot_bytes(PAYLOAD_BYTES)
BLOCKS = 6
INFLIGHT_LIMIT = 3
STORED = pb.STORE_STATUS_STORED
SIZES_LEFT_OPEN = Fingerprint("m", "w", groups=(LayerGroup(0), LayerGroup(1, "sliding", 64)))


class Store:
    """The verbs of a put over a small store, and one client, whose blocks have no tokens: any key is theirs."""

    def __init__(self, small: SmallStore) -> None:
        self.small = small
        limits = replace(small.config.limits, max_keys=64, max_block_bytes=1 << 20, inflight_per_client=INFLIGHT_LIMIT)
        durability = replace(small.config.durability, mode="none")
        small.store.config = replace(small.config, limits=limits, durability=durability)
        self.puts = Operations(small.store, DeletionLog(small.clock)).put
        self.finish = self.puts.finish
        self.lending = PutVerb(self.puts, small.store)
        self.session = self.client()

    def client(self) -> ClientSession:
        tenant = Tenant("t", bytes(16), b"", TenantSection("t"))
        fingerprint = SIZES_LEFT_OPEN
        return ClientSession(
            session_id=1, token=bytes(16), peer=Peer(1, 1, 1), client_name="client", tenant=tenant,
            tenant_id=self.small.residency.tenant("tenant"), fingerprint=fingerprint,
            fingerprint_digest=fingerprint.digest(), fingerprint_id=1, roots={}, staging=StagingMemory(1 << 20, "test"),
            give_back_staging=lambda _: None,
        )  # fmt: skip

    async def store(self, keys: Sequence[bytes]) -> list[int]:
        """The statuses of a chain of blocks."""
        replies = [reply async for reply in self.begin(keys)]
        return list(replies[0].store.statuses)

    def begin(self, keys: Sequence[bytes], session: ClientSession | None = None) -> Any:
        session = session or self.session
        pages = [1 + place * SLOT // 4096 for place in range(len(keys))]
        parents = b"".join([NO_PARENT, *keys[:-1]])
        request = pb.Store(
            loan=session.loan, keys=b"".join(keys), parents=parents, pages=pages, payload_bytes=PAYLOAD_BYTES
        )
        return self.lending.store(session, pb.Request(store=request))

    def assert_nothing_left(self, blocks: int = 0) -> None:
        session, host = self.session, self.small.store.host
        assert not self.puts.being_written and not session.copying
        assert (session.beginning, session.turn.locked(), self.small.completions.outstanding) == (0, False, 0)
        assert host.statistics().blocks == blocks
        assert not self.small.residency.tenants[session.tenant_id].unreadable
        assert check(self.small.residency) == []


def key_of(name: str) -> bytes:
    return name.encode().ljust(16, b".")


KEYS = [key_of(f"block{number}") for number in range(BLOCKS)]


def run(tmp_path: Path, test: Callable[[Store], Any]) -> None:
    async def with_store() -> None:
        async with small_store(tmp_path) as small:
            store = Store(small)
            await store.lending.lend(store.session)
            await test(store)

    asyncio.run(with_store())


def fail_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at: int) -> None:
    """Let the `at`-th call of a method be a mistake."""
    method, calls = getattr(owner, name), [0]

    def failing(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == at:
            raise RuntimeError("a mistake of ours")
        return method(*arguments, **options)

    monkeypatch.setattr(owner, name, failing)


@pytest.mark.parametrize(
    ("place", "name", "at", "part_blocks"),
    [
        *(
            (place, name, 1, part_blocks)
            for part_blocks in (32, 2)
            for place, name in (
                ("residency", "store_run"), ("room", "announce"), ("room", "allocate_run"), ("host", "write_many"),
                ("staging", "tokens_of"),
            )
        ),
        ("staging", "tokens_of", 3, 2),
        ("host", "write_many", 2, 2),
    ],
)  # fmt: skip
def test_a_mistake_while_blocks_begin_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, name: str, at: int, part_blocks: int
) -> None:
    """The mistake is in the first part, and in one that begins while others are being copied."""
    monkeypatch.setattr(put, "PART_BLOCKS", part_blocks)

    async def test(store: Store) -> None:
        small = store.small
        owners: dict[str, object] = {
            "residency": small.residency, "room": small.store.rooms[HOST], "host": small.store.host,
            "staging": store.session.staging,
        }  # fmt: skip
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="a mistake of ours"):
            fail_once(patch, owners[place], name, at)
            await store.store(KEYS)
        store.assert_nothing_left()
        assert await store.store(KEYS) == [STORED] * BLOCKS
        store.assert_nothing_left(BLOCKS)
        assert (await store.lending.lend(store.session)).loan == 2

    run(tmp_path, test)


def test_copies_start_with_the_first_few_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies run while the others get their slots, which wait for nothing but their turn on the loop."""
    monkeypatch.setattr(put, "PART_BYTES", 2 * PAYLOAD_BYTES)

    async def test(store: Store) -> None:
        host, started = store.small.store.host, []
        write_many = host.write_many

        def writing(writes: Any, done: Any) -> None:
            started.append(len(writes))
            write_many(writes, done)

        monkeypatch.setattr(host, "write_many", writing)
        replies = store.begin(KEYS)
        assert started == [2], "before anybody waits for an answer"
        assert [list(reply.store.statuses) async for reply in replies] == [[STORED] * BLOCKS]
        assert started == [2] * (BLOCKS // 2)

    run(tmp_path, test)


def test_what_is_published_already_stays_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistake is in the publication of the last part."""
    monkeypatch.setattr(put, "PART_BLOCKS", 4)

    async def test(store: Store) -> None:
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="a mistake of ours"):
            fail_once(patch, store.small.residency, "publish_run", 2)
            await store.store(KEYS)
        store.assert_nothing_left(blocks=4)
        assert await store.store(KEYS) == [pb.STORE_STATUS_PRESENT] * 4 + [STORED] * 2

    run(tmp_path, test)


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_key_is_written_by_one_client_at_a_time(tmp_path: Path, is_gone: bool) -> None:
    """Also when the first client is gone: what has begun ends."""

    async def test(store: Store) -> None:
        other = store.client()
        await store.lending.lend(other)
        first = store.begin(KEYS)
        if is_gone:
            await first.aclose()
        replies = [reply async for reply in store.begin(KEYS, other)]
        assert list(replies[0].store.statuses) == [pb.STORE_STATUS_AGAIN] * BLOCKS
        await store.finish()
        await asyncio.sleep(0)
        store.assert_nothing_left(BLOCKS)
        replies = [reply async for reply in store.begin(KEYS, other)]
        assert list(replies[0].store.statuses) == [pb.STORE_STATUS_PRESENT] * BLOCKS
        await first.aclose()

    run(tmp_path, test)


def test_stores_under_way_are_bounded_though_no_caller_waits_for_them(tmp_path: Path) -> None:
    """Their answers are never asked for, as after a stream that broke."""

    async def test(store: Store) -> None:
        unanswered = [store.begin(KEYS[block : block + 1]) for block in range(INFLIGHT_LIMIT)]
        with pytest.raises(KVStoreError, match="3 puts of this client") as caught:
            store.begin(KEYS[4:5])
        assert (caught.value.kind, caught.value.retry_after_ms > 0) == (ErrorKind.THROTTLED, True)
        await store.finish()
        await asyncio.sleep(0)
        store.assert_nothing_left(blocks=INFLIGHT_LIMIT)
        assert await store.store(KEYS[4:5]) == [STORED]
        for replies in unanswered:
            await replies.aclose()

    run(tmp_path, test)


@pytest.mark.parametrize("is_full", [False, True])
def test_requests_for_slots_at_the_same_time_get_no_more_than_one_client_may_hold(
    tmp_path: Path, is_full: bool
) -> None:
    most = SLICE_SLOTS + 8

    async def test(store: Store) -> None:
        lending, small = store.lending, store.small
        lending._limits = replace(lending._limits, staging_per_client_bytes=most * SLOT, max_keys=most)
        lending._in_place = replace(lending._in_place, in_place=True)
        for number in range(small.config.host.capacity_bytes // SLOT if is_full else 0):
            await small.store_in(HOST, number + 1, payload_bytes=PAYLOAD_BYTES)
        asked = pb.ReserveSlots(payload_bytes=PAYLOAD_BYTES, blocks=most)
        requests = [asyncio.create_task(lending.reserve(store.session, asked)) for _ in range(3)]
        granted = [len((await request).offsets) for request in requests]
        assert sum(granted) == most, granted
        assert small.store.reservations.held_bytes(store.session.session_id) == most * SLOT
        small.store.reservations.end_session(store.session.session_id)
        assert small.store.host.statistics().blocks == small.residency.tier_blocks(HOST)

    run(tmp_path, test)
