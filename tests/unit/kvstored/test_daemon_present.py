"""Blocks that a put finds stored: what it asks for holds for them too, and no answer calls durable what is not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore_proto.identity import NO_PARENT
from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstore_tiers.base import ERRORS_IN_A_ROW
from kvstore_tiers.testing.faulty import Fault, gone
from kvstored.store.degraded.modes import Mode
from kvstored.store.endurance.budget import WriteVerdict
from kvstored.store.operations.durability import settle_present
from kvstored.store.transfer import group_commit
from kvstored.store.transfer.gate import Refusal
from tests.reference.small_store import FAR_S, small_store
from tests.reference.tiers import HOST, NVME
from tests.unit.kvstored.test_daemon_intake import BLOCKS, KEYS, PAYLOAD_BYTES, SLOT, Store

NONE, BATCH, ALWAYS = pb.DURABILITY_MODE_NONE, pb.DURABILITY_MODE_BATCH, pb.DURABILITY_MODE_ALWAYS
VOLATILE, PENDING, DURABLE = pb.DURABILITY_VOLATILE, pb.DURABILITY_PENDING, pb.DURABILITY_DURABLE
GATHERS = "durability.batch_ms=3600000"  # a batch begins when a client requests it, and never by itself

Answers = AsyncIterator[pb.StoreReply]


class Client:
    """One that stores the chain of KEYS, or parts of it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.small = store.small

    def put(self, mode: int, first: int = 0, end: int = BLOCKS, *, named: bool = True) -> Answers:
        """The answers to a put of blocks `first` to `end`; `named`: believed present, and so not written."""
        parents = [NO_PARENT, *KEYS]
        pages = [0 if named else 1 + place * SLOT // 4096 for place in range(end - first)]
        request = pb.Store(
            loan=self.store.session.loan, keys=b"".join(KEYS[first:end]), parents=b"".join(parents[first:end]),
            pages=pages, payload_bytes=PAYLOAD_BYTES, durability=mode,  # type: ignore[arg-type]  # a mode's number
        )  # fmt: skip
        return self.store.lending.store(self.store.session, pb.Request(store=request))

    async def said(self, mode: int, first: int = 0, end: int = BLOCKS, *, named: bool = True) -> list[list[int]]:
        """The durability of each block, in each answer; the last one is final."""
        async with asyncio.timeout(FAR_S):
            answers = [answer.store async for answer in self.put(mode, first, end, named=named)]
        assert [answer.final for answer in answers] == [False] * (len(answers) - 1) + [True]
        return [list(answer.durability) for answer in answers]

    async def store_volatile(self, blocks: int = BLOCKS) -> None:
        assert await self.said(NONE, 0, blocks, named=False) == [[VOLATILE] * blocks]

    def row(self, block: int) -> int:
        return self.small.residency.find(self.store.session.tenant_id, KEYS[block])

    def on_nvme(self) -> list[bool]:
        return [self.row(block) >= 0 and self.small.residency.has(self.row(block), NVME) for block in range(BLOCKS)]


def over_a_client(*settings: str) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[..., None]]:
    def decorate(scenario: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
            async def inside() -> None:
                async with small_store(tmp_path, *settings) as small:
                    store = Store(small)
                    await store.lending.lend(store.session)
                    client = Client(store)
                    await scenario(client, monkeypatch)
                    await small.writeback.flush(FAR_S)
                    assert not small.residency.pins, "what was handed over is let go of"

            asyncio.run(inside())

        run.__name__, run.__doc__ = scenario.__name__, scenario.__doc__
        return run

    return decorate


@pytest.mark.parametrize("named", [True, False])
def test_always_makes_durable_what_is_only_in_dram_and_waits_for_it(tmp_path: Path, named: bool) -> None:
    """Also where the client believes by the lookup index that the blocks are there, and only names them."""

    @over_a_client()
    async def scenario(client: Client, _: pytest.MonkeyPatch) -> None:
        await client.store_volatile()
        assert not any(client.on_nvme())
        assert await client.said(ALWAYS, named=named) == [[DURABLE] * BLOCKS]
        assert all(client.small.writeback.is_durable(client.row(block)) for block in range(BLOCKS))
        assert client.small.store.counters["stored_blocks"] == BLOCKS, "nothing is stored twice"
        written = client.small.store.counters["written_back_blocks"]
        assert written == BLOCKS
        assert await client.said(ALWAYS, named=named) == [[DURABLE] * BLOCKS]
        assert client.small.store.counters["written_back_blocks"] == written, "nor written twice"

    with pytest.MonkeyPatch.context() as patch:
        scenario(tmp_path, patch)


@over_a_client()
async def test_its_ancestors_go_with_it(client: Client, _: pytest.MonkeyPatch) -> None:
    await client.store_volatile()
    assert await client.said(ALWAYS, BLOCKS - 2, BLOCKS - 1) == [[DURABLE]]
    assert client.on_nvme() == [True] * (BLOCKS - 1) + [False]


@over_a_client()
async def test_a_head_that_is_there_goes_with_the_tail_that_is_new(client: Client, _: pytest.MonkeyPatch) -> None:
    await client.store_volatile(3)
    assert await client.said(ALWAYS, named=False) == [[DURABLE] * BLOCKS]


@over_a_client(GATHERS)
async def test_batch_answers_pending_and_then_how_it_ended(client: Client, _: pytest.MonkeyPatch) -> None:
    await client.store_volatile()
    answers = client.put(BATCH)
    first = (await anext(answers)).store
    assert (list(first.statuses), first.final) == ([pb.STORE_STATUS_PRESENT] * BLOCKS, False)
    assert list(first.durability) == [PENDING] * BLOCKS
    await client.small.writeback.flush(FAR_S)
    last = (await anext(answers)).store
    assert (list(last.statuses), last.final) == (list(first.statuses), True)
    assert list(last.durability) == [DURABLE] * BLOCKS


@over_a_client(GATHERS)
async def test_none_writes_nothing_and_says_what_is_on_its_way(client: Client, _: pytest.MonkeyPatch) -> None:
    await client.store_volatile()
    assert await client.said(NONE) == [[VOLATILE] * BLOCKS]
    assert client.small.writeback.pending() == 0
    batch = client.put(BATCH, 0, 2)
    await anext(batch)
    answers = client.put(NONE)
    assert list((await anext(answers)).store.durability) == [PENDING] * 2 + [VOLATILE] * (BLOCKS - 2)
    assert client.small.writeback.pending() == 2, "nothing more, and nothing sooner"
    await client.small.writeback.flush(FAR_S)
    assert list((await anext(answers)).store.durability) == [DURABLE] * 2 + [VOLATILE] * (BLOCKS - 2)
    assert await client.said(NONE) == [[DURABLE] * 2 + [VOLATILE] * (BLOCKS - 2)]


@over_a_client(GATHERS)
async def test_always_hurries_what_gathers_for_a_batch(client: Client, _: pytest.MonkeyPatch) -> None:
    answers = client.put(BATCH, named=False)
    assert list((await anext(answers)).store.durability) == [PENDING] * BLOCKS
    assert await client.said(ALWAYS) == [[DURABLE] * BLOCKS]
    assert list((await anext(answers)).store.durability) == [DURABLE] * BLOCKS


@over_a_client("nvme.admission=second-touch")
async def test_batch_leaves_what_is_not_admitted_and_always_insists(client: Client, _: pytest.MonkeyPatch) -> None:
    await client.store_volatile()
    assert await client.said(BATCH) == [[VOLATILE] * BLOCKS]
    assert client.small.writeback.gate.refusal_of(client.row(0)) is Refusal.ADMISSION
    assert await client.said(ALWAYS) == [[DURABLE] * BLOCKS]


@over_a_client("nvme.endurance_bytes_per_day=1MiB", "nvme.endurance_wait_ms=0")
async def test_what_the_budget_has_no_room_for_stays_volatile(client: Client, _: pytest.MonkeyPatch) -> None:
    charge, verdict = client.small.store.endurance.charge, WriteVerdict.GRANTED
    while verdict in (WriteVerdict.GRANTED, WriteVerdict.SAVING):
        verdict = charge(client.store.session.tenant_id, 4096)
        if verdict is WriteVerdict.SAVING:
            await client.small.settle()
    await client.store_volatile()
    for mode in (BATCH, ALWAYS):
        assert (await client.said(mode))[-1] == [VOLATILE] * BLOCKS
    assert not any(client.on_nvme())


@over_a_client(GATHERS)
async def test_written_is_not_durable_before_a_sync_went_well(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one sync is enough for all that lack it."""
    monkeypatch.setattr(group_commit, "RETRY_S", 3600.0)
    small = client.small
    small.disk.plan(Fault("sync", "fail", until=1))
    answers = client.put(BATCH, named=False)
    await anext(answers)
    await small.writeback.flush(FAR_S)
    assert list((await anext(answers)).store.durability) == [VOLATILE] * BLOCKS
    await small.settle()  # the sync may fail before the writes that it follows have ended
    assert all(client.on_nvme())
    for mode in (NONE, BATCH):
        assert await client.said(mode) == [[VOLATILE] * BLOCKS]
    syncs: list[int] = []
    sync = small.disk.sync
    monkeypatch.setattr(small.disk, "sync", lambda done: (syncs.append(1), sync(done)))
    assert await client.said(ALWAYS) == [[DURABLE] * BLOCKS]
    assert len(syncs) == 1
    assert await client.said(NONE) == [[DURABLE] * BLOCKS]


@over_a_client()
async def test_of_a_medium_that_is_gone_nothing_is_promised(client: Client, _: pytest.MonkeyPatch) -> None:
    small = client.small
    assert await client.said(ALWAYS, named=False) == [[DURABLE] * BLOCKS]
    for number in range(1, ERRORS_IN_A_ROW + 1):
        assert await small.is_durable(number)
        small.drop_from_dram(number)
    small.disk.plan(*gone())
    for number in range(1, ERRORS_IN_A_ROW + 1):
        assert not await small.fetch(number)
    assert small.breaker.mode is Mode.FAILED
    assert small.residency.has(client.row(0), HOST)
    for mode in (NONE, BATCH, ALWAYS):
        assert await client.said(mode) == [[VOLATILE] * BLOCKS]
    small.disk.plan()


def test_without_nvme_everything_is_volatile() -> None:
    residency: Any = None
    durability, found = bytearray(2), [(0, 7), (1, 8)]
    assert settle_present(residency, None, found, ALWAYS, durability) == {}
    assert durability == bytes([VOLATILE] * 2)


class Word:
    """Write-back as one who asks knows it: what is durable, and what will be; it notes what it is asked to write."""

    def __init__(self, durable: Sequence[int], coming: Sequence[int], refused: Sequence[int]) -> None:
        self.durable, self.refused = set(durable), set(refused)
        self.coming = {row: asyncio.get_running_loop().create_future() for row in coming}
        self.asked: list[tuple[int, bool]] = []
        self.gate = self

    def are_durable(self, rows: Sequence[int]) -> list[bool]:
        return [row in self.durable for row in rows]

    def settled(self, row: int) -> asyncio.Future[bool] | None:
        return self.coming.get(row)

    def admits(self, row: int) -> bool:
        return row not in self.refused

    def write_through(self, row: int, *, at_once: bool = False) -> asyncio.Future[bool]:
        self.asked.append((row, at_once))
        return self.coming.setdefault(row, asyncio.get_running_loop().create_future())


class NothingOnNvme:
    durable = 1

    def has(self, row: int, tier: int) -> bool:
        return False


@pytest.mark.parametrize(
    ("mode", "asked"),
    [(NONE, []), (BATCH, [(13, False)]), (ALWAYS, [(11, True), (12, True), (13, True)])],
)
def test_who_is_asked_to_write_what(mode: int, asked: list[tuple[int, bool]]) -> None:
    """The answers are for a durable block, one on its way, one that is not admitted, and one that is."""

    async def run() -> None:
        word: Any = Word(durable=[10], coming=[11], refused=[12])
        nothing: Any = NothingOnNvme()
        durability = bytearray(5)
        found = [(0, 10), (2, 11), (3, 12), (4, 13)]
        settling = settle_present(nothing, word, found, mode, durability)
        assert list(durability) == [DURABLE, VOLATILE, VOLATILE, VOLATILE, VOLATILE]
        assert word.asked == asked
        assert set(settling) == {2} | {row - 9 for row, _ in asked}
        assert settling[2] is word.coming[11]

    asyncio.run(run())
