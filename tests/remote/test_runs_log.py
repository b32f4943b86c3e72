"""The log of changes against a dictionary: several nodes, checkpoints, lost and damaged objects."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine
from datetime import timedelta
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_tiers.remote.drivers.runs.log import GARBAGE_AFTER, KEEP_FOR, STALE_S, Log
from kvstore_tiers.remote.drivers.runs.values import NAME_BYTES, AddedRun, RunChange, rows_of
from tests.remote.memory_objects import MemoryObjects

NAMES = [bytes([number]) * NAME_BYTES for number in range(12)]


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


class Node:
    """A node that adds and drops names as the driver does, without the values' bytes."""

    def __init__(self, objects: MemoryObjects, checkpoint_every: int = 4) -> None:
        self.objects = objects
        self.now = 0.0
        self.log = Log(objects, checkpoint_every=checkpoint_every, clock=lambda: self.now)

    async def add(self, names: list[bytes], length: int) -> list[bytes]:
        """The names that this node stored."""
        run_id = secrets.token_hex(16)
        await self.objects.put(f"runs/{run_id}", b"")

        def change() -> RunChange | None:
            new = [name for name in names if name not in self.log.values]
            return RunChange((), [AddedRun(run_id, rows_of(new, [length] * len(new)))]) if new else None

        await self.log.append(change)
        return [name for name in names if (place := self.log.values.find(name)) and place.run_id == run_id]

    async def drop(self, names: list[bytes]) -> None:
        def change() -> RunChange | None:
            known = [name for name in names if name in self.log.values]
            return RunChange(known) if known else None

        await self.log.append(change)

    async def read(self) -> None:
        self.now += 1
        await self.log.refresh(0)

    async def lengths(self) -> dict[bytes, int]:
        await self.read()
        return {name: place.length for name in NAMES if (place := self.log.values.find(name))}


STEPS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(["add", "drop", "look", "restart"]),
        st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=150)
@given(STEPS)
def test_nodes_agree_with_a_dictionary(steps: list[tuple[int, str, list[bytes]]]) -> None:
    async def play() -> None:
        objects, model = MemoryObjects(), dict[bytes, int]()
        nodes = [Node(objects) for _ in range(3)]
        for length, (at, verb, names) in enumerate(steps, start=1):
            objects.pass_time(KEEP_FOR)
            if verb == "restart":
                nodes[at] = Node(objects)
            elif verb == "add":
                await nodes[at].read()
                assert await nodes[at].add(names, length) == [name for name in names if name not in model]
                model = {**dict.fromkeys(names, length), **model}
            elif verb == "drop":
                await nodes[at].read()
                await nodes[at].drop(names)
                model = {name: stored for name, stored in model.items() if name not in names}
            for node in nodes:
                await node.log.tidied()
            assert await nodes[at].lengths() == model
        for node in [*nodes, Node(objects)]:
            assert await node.lengths() == model

    run(play())


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 1 << 32), st.integers(2, 5))
def test_of_nodes_that_add_at_once_one_stores_each_name(seed: int, node_count: int) -> None:
    async def play() -> None:
        objects, random = MemoryObjects(), Random(seed)
        nodes = [Node(objects) for _ in range(node_count)]
        for _ in range(4):
            tasks = [node.add(random.sample(NAMES, random.randint(1, 6)), 1 + at) for at, node in enumerate(nodes)]
            for names in await asyncio.gather(*tasks):
                assert len(names) == len(set(names))
            views = [await node.lengths() for node in nodes]
            assert all(view == views[0] for view in views)
            gone = random.sample(NAMES, 3)
            await asyncio.gather(*(node.drop(gone) for node in nodes))
        for node in nodes:
            await node.log.tidied()

    run(play())


def test_each_name_is_stored_by_exactly_one_of_many() -> None:
    async def play() -> None:
        objects = MemoryObjects()
        nodes = [Node(objects) for _ in range(6)]
        stored = await asyncio.gather(*(node.add(NAMES, 1 + at) for at, node in enumerate(nodes)))
        assert sorted(name for names in stored for name in names) == NAMES

    run(play())


async def filled(objects: MemoryObjects, changes: int) -> Node:
    node = Node(objects)
    for number in range(changes):
        await node.add([NAMES[number % len(NAMES)]], 1 + number)
        await node.log.tidied()
        objects.pass_time(timedelta(minutes=20))
        if number < changes - 1 and number >= len(NAMES) - 1:
            await node.drop([NAMES[(number + 1) % len(NAMES)]])
            await node.log.tidied()
    return node


def test_a_start_reads_the_newest_checkpoint_and_what_is_behind_it() -> None:
    async def play() -> None:
        objects = MemoryObjects()
        node = await filled(objects, 11)
        assert len(objects.keys("checkpoints")) == 2
        objects.requests.clear()
        late = Node(objects)
        assert await late.lengths() == await node.lengths()
        assert sum(request.startswith("get log/") for request in objects.requests) < 4

    run(play())


@pytest.mark.parametrize("content", [b"", b"garbage", None])
def test_a_damaged_checkpoint_is_passed_over(content: bytes | None, caplog: pytest.LogCaptureFixture) -> None:
    async def play() -> None:
        objects = MemoryObjects()
        node = await filled(objects, 11)
        newest = objects.keys("checkpoints")[-1]
        if content is None:
            del objects.contents[newest]
        else:
            objects.contents[newest] = content
        assert await Node(objects).lengths() == await node.lengths()

    run(play())
    assert ("damaged" in caplog.text) == (content is not None)


async def three_changes() -> tuple[MemoryObjects, Node]:
    """Names 0 to 2 with the lengths 1 to 3, and the node that added them."""
    objects = MemoryObjects()
    node = Node(objects)
    for number in range(3):
        await node.add([NAMES[number]], 1 + number)
    return objects, node


def test_a_damaged_change_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    async def play() -> None:
        objects, node = await three_changes()
        second = objects.keys("log")[1]
        objects.contents[second] = objects.contents[second][:-1]
        late = Node(objects)
        assert await late.lengths() == {NAMES[0]: 1, NAMES[2]: 3}
        assert await late.add([NAMES[1]], 9) == [NAMES[1]]
        assert await node.lengths() == await late.lengths() == {NAMES[0]: 1, NAMES[1]: 9, NAMES[2]: 3}

    run(play())
    assert "is damaged" in caplog.text


def test_a_missing_change_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    async def play() -> None:
        objects, _ = await three_changes()
        del objects.contents[objects.keys("log")[0]]
        assert await Node(objects).lengths() == {NAMES[1]: 2, NAMES[2]: 3}

    run(play())
    assert "changes 1 to 1 of the index are missing" in caplog.text


def test_a_node_that_slept_does_not_append_where_changes_were_deleted() -> None:
    async def play() -> None:
        objects = MemoryObjects()
        sleeper = Node(objects)
        await sleeper.add([NAMES[0]], 1)
        node = Node(objects)
        await node.log.refresh(0)
        await node.drop([NAMES[0]])
        awake = await filled(objects, 11)
        assert objects.keys("log")[0] > "log/00000000000000000002"
        sleeper.now += STALE_S + 1
        await sleeper.add([NAMES[11]], 99)
        assert await awake.lengths() == await sleeper.lengths()
        assert (await awake.lengths())[NAMES[11]] == 99

    run(play())


def test_runs_that_no_change_knows_are_deleted_when_they_are_old() -> None:
    async def play() -> None:
        objects = MemoryObjects()
        await objects.put("runs/" + "0" * 32, b"left by a crash")
        objects.pass_time(GARBAGE_AFTER + timedelta(minutes=1))
        await objects.put("runs/" + "1" * 32, b"being written")
        node = Node(objects, checkpoint_every=2)
        for number in range(4):
            await node.add([NAMES[number]], 1)
            await node.log.tidied()
        kept = objects.keys("runs")
        assert "runs/" + "0" * 32 not in kept
        assert "runs/" + "1" * 32 in kept
        assert len(kept) == 5

    run(play())


def test_a_young_index_costs_no_request() -> None:
    async def play() -> None:
        objects = MemoryObjects()
        node = Node(objects)
        await node.log.refresh(2)
        objects.requests.clear()
        node.now += 1.5
        await node.log.refresh(2)
        assert objects.requests == []
        node.now += 1
        await asyncio.gather(*(node.log.refresh(2) for _ in range(5)))
        assert objects.requests == ["list log"]

    run(play())
