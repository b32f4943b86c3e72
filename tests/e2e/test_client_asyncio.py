"""The asyncio session against a real daemon: the same answers, many at once, and nothing kept by the cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvstore_client import KVStoreError, aio
from kvstore_proto.v1 import admin_pb2
from kvstore_proto.v1.explain_pb2 import ExplainRequest
from tests.reference.conversations import holds, model, payloads_of, tokens_of
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon

MODEL = model()
BLOCKS = 24


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon() as running:
        yield running


async def connected(daemon: RunningDaemon, threads: int = 4) -> aio.AsyncSession:
    return await aio.connect(daemon.socket_dir, fingerprint=MODEL, required=True, deadline_s=20.0, threads=threads)


@asynccontextmanager
async def stored(
    daemon: RunningDaemon, conversation: int
) -> AsyncIterator[tuple[aio.AsyncSession, npt.NDArray[np.int32], list[npt.NDArray[np.uint8]]]]:
    """A session that has put four blocks of a conversation, their tokens and payloads."""
    tokens, payloads = tokens_of(conversation, 4), payloads_of(conversation, 4, MODEL)
    async with await connected(daemon) as session:
        await session.put(tokens, payloads=payloads)
        yield session, tokens, payloads


async def leave_in_dram(
    daemon: RunningDaemon,
    session: aio.AsyncSession,
    tokens: npt.NDArray[np.int32],
    payloads: list[npt.NDArray[np.uint8]],
    blocks: int,
) -> None:
    """Store a prefix durably, with only its first blocks in DRAM."""
    await session.put(tokens, payloads=payloads, wait="settled", durability="always")
    await asyncio.to_thread(daemon.drop, "host")
    with await session.get(tokens, max_blocks=blocks) as lease:
        assert lease.blocks == blocks


def all_can_be_dropped(daemon: RunningDaemon) -> bool:
    return bool(daemon.ask("Drop", admin_pb2.DropRequest(all=True)).kept_blocks == 0)


def test_conversations_side_by_side_each_get_their_own_bytes(daemon: RunningDaemon) -> None:
    async def conversation(session: aio.AsyncSession, number: int) -> bool:
        tokens, payloads = tokens_of(number, 4), payloads_of(number, 4, MODEL)
        receipt = await session.put(tokens, payloads=payloads)
        assert receipt.statuses == ["stored"] * 4
        assert (await session.lookup(tokens)).blocks == 4
        assert (await session.prefetch(tokens)).resident_blocks == 4
        assert await session.touch(tokens) == 4
        assert await session.contains(tokens) == 4
        assert (await session.probe(tokens)).blocks in (0, 4), "unknown or all of it"
        with await session.get(tokens) as lease:
            return holds(lease, payloads) and lease.valid

    async def all_of_them() -> list[bool]:
        async with await connected(daemon) as session:
            assert session.keys(tokens_of(1, 4)) is not None
            assert await session.ping() is not None
            explained = await session.explain(ExplainRequest(recent_misses=1))
            assert explained is not None and not explained.blocks
            session.wake()
            return await asyncio.gather(*(conversation(session, number) for number in range(100, 120)))

    assert asyncio.run(all_of_them()) == [True] * 20


def test_the_loop_turns_while_a_call_waits(daemon: RunningDaemon) -> None:
    async def turns() -> int:
        count = 0
        async with await connected(daemon) as session:
            with daemon.frozen():
                waiting = asyncio.create_task(session.lookup(tokens_of(1, 1), deadline_s=60.0))
                while not waiting.done() and count < 20:
                    count += 1
                    await asyncio.sleep(0.001)
                assert not waiting.done(), "the daemon cannot have answered"
            assert (await waiting).reason != "deadline"
        return count

    assert asyncio.run(turns()) == 20


def test_a_cancelled_get_leaves_no_lease(daemon: RunningDaemon) -> None:
    async def cancel() -> None:
        async with stored(daemon, 130) as (session, tokens, payloads):
            with daemon.frozen():
                asked = [asyncio.create_task(session.get(tokens)) for _ in range(8)]  # half of them only queue
                await asyncio.sleep(0.05)
                for task in asked:
                    task.cancel()
                ended = await asyncio.gather(*asked, return_exceptions=True)
                assert all(isinstance(end, asyncio.CancelledError) for end in ended)
            assert await session.ping() is not None
            assert await asyncio.to_thread(eventually, lambda: daemon.status().leases == 0)
            with await session.get(tokens) as lease:
                assert holds(lease, payloads)

    asyncio.run(cancel())


@pytest.mark.parametrize("order", ["front", "back"])
def test_a_stream_hands_out_every_block_once_while_the_loop_turns(daemon: RunningDaemon, order: str) -> None:
    tokens, payloads = tokens_of(140, BLOCKS), payloads_of(140, BLOCKS, MODEL)

    async def stream() -> list[int]:
        came: list[int] = []
        async with await connected(daemon, threads=1) as session:
            await leave_in_dram(daemon, session, tokens, payloads, 5)
            with await session.get_stream(tokens, order=order) as stream:
                async for first, lease in stream:
                    came += range(first, first + lease.blocks)
                    assert lease.valid
                    assert all(bytes(lease.payload(at)) == bytes(payloads[first + at]) for at in range(lease.blocks))
                assert stream.tiers == ("host",) * 5 + ("nvme",) * (BLOCKS - 5)
                assert len(stream.ready_s) == BLOCKS
                assert (stream.blocks, stream.reason) == (BLOCKS, "")
                assert stream.payload_bytes == BLOCKS * MODEL.payload_bytes()
            assert not lease.valid
            assert await asyncio.to_thread(eventually, lambda: daemon.status().leases == 0)
        return came

    came = asyncio.run(stream())
    assert sorted(came) == list(range(BLOCKS))
    assert came[:5] == list(range(5)), "what is in DRAM comes at once"


@pytest.mark.parametrize("how", ["left", "cancelled"])
def test_a_stream_that_is_left_early_holds_nothing(daemon: RunningDaemon, how: str) -> None:
    tokens, payloads = tokens_of(150, BLOCKS), payloads_of(150, BLOCKS, MODEL)

    async def read(session: aio.AsyncSession, has_first: asyncio.Event, until: asyncio.Event) -> None:
        with await session.get_stream(tokens) as stream:
            async for first, lease in stream:
                assert (first, lease.blocks) == (0, 3)
                has_first.set()
                if how == "left":
                    break
                await until.wait()

    async def leave() -> None:
        async with await connected(daemon) as session:
            await leave_in_dram(daemon, session, tokens, payloads, 3)
            has_first = asyncio.Event()
            reading = asyncio.create_task(read(session, has_first, asyncio.Event()))
            await has_first.wait()
            if how == "cancelled":
                reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            assert reading.cancelled() == (how == "cancelled")
            assert await asyncio.to_thread(eventually, lambda: daemon.status().leases == 0)
            assert await asyncio.to_thread(eventually, lambda: all_can_be_dropped(daemon)), "nothing is pinned"

    asyncio.run(leave())


def test_a_run_that_a_cancelled_task_waited_for_comes_to_the_next_one(daemon: RunningDaemon) -> None:
    async def again() -> None:
        async with stored(daemon, 160) as (session, tokens, payloads):
            with daemon.frozen():
                stream = await session.get_stream(tokens)
                waiting = asyncio.ensure_future(anext(stream))
                await asyncio.wait([waiting], timeout=0.05)
                waiting.cancel()
                assert isinstance((await asyncio.gather(waiting, return_exceptions=True))[0], asyncio.CancelledError)
            with stream:
                first, lease = await anext(stream)
                assert first == 0 and holds(lease, payloads)
                assert [run async for run in stream] == []

    asyncio.run(again())


def test_a_stream_that_is_closed_while_it_is_waited_for_ends(daemon: RunningDaemon) -> None:
    async def close() -> None:
        async with stored(daemon, 170) as (session, tokens, _):
            with daemon.frozen():
                stream = await session.get_stream(tokens, deadline_s=60.0)
                waiting = asyncio.ensure_future(anext(stream, None))
                await asyncio.wait([waiting], timeout=0.05)
                stream.close()
            assert await asyncio.wait_for(waiting, 30.0) is None
            assert await asyncio.to_thread(eventually, lambda: daemon.status().leases == 0)
            assert session.statistics().misses == 1

    asyncio.run(close())


def test_after_close_calls_say_that_the_session_is_closed(daemon: RunningDaemon) -> None:
    async def close() -> None:
        session = await connected(daemon, threads=1)
        with daemon.frozen():
            asked = [asyncio.create_task(session.lookup(tokens_of(1, 1), deadline_s=60.0)) for _ in range(4)]
            await asyncio.sleep(0.05)
            await session.close()
        ended = await asyncio.gather(*asked, return_exceptions=True)
        assert not any(isinstance(end, asyncio.CancelledError) for end in ended)
        assert all(isinstance(end, KVStoreError) for end in ended[1:]), ended
        with pytest.raises(KVStoreError, match="closed"):
            await session.lookup(tokens_of(1, 1))

    asyncio.run(close())


def test_mistakes_are_raised_and_an_absent_daemon_is_a_miss(daemon: RunningDaemon, tmp_path: Path) -> None:
    async def mistakes() -> None:
        async with await connected(daemon) as session:
            with pytest.raises(KVStoreError, match="either tokens or keys"):
                await session.lookup()
            with pytest.raises(RuntimeError, match="from the function"):
                await session.put(tokens_of(131, 1), payloads=[_fails])
        async with await aio.connect(tmp_path, fingerprint=MODEL) as without_daemon:
            assert without_daemon.state == "degraded"
            assert (await without_daemon.lookup(tokens_of(1, 1))).reason == "no_daemon"
            assert len(await without_daemon.get(tokens_of(1, 1))) == 0

    asyncio.run(mistakes())


def _fails(destination: np.ndarray) -> None:
    raise RuntimeError("from the function")
