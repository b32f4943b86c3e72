"""The bound on unary calls at once, and puts whose bytes came in the message."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest

from kvstore_proto.arena import slot_bytes
from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.identity import NO_PARENT
from kvstore_proto.terms import Terms
from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstore_proto.v1 import unary_pb2 as unary
from kvstored.clients.pressure import Work
from kvstored.clients.staging import InlineBlocks
from kvstored.rpc.unary import CallLimit
from kvstored.rpc.verbs import Verbs
from kvstored.rpc.verbs.inline import InlineCalls
from kvstored.rpc.verbs.naming import NamedBlocks
from kvstored.store.operations import Operations
from kvstored.telemetry import DeletionLog, RecentMisses
from tests.reference.tiers import HOST
from tests.reference.unary_client import names
from tests.unit.kvstored.test_daemon_intake import STORED, Store, fail_once, key_of, run


def test_no_more_calls_than_allowed_and_each_end_makes_room() -> None:
    limit = CallLimit(2)
    with limit.hold("a"):
        with limit.hold("a"):
            with pytest.raises(KVStoreError) as caught, limit.hold("b"):
                pytest.fail("a third call")
            assert caught.value.kind is ErrorKind.THROTTLED and caught.value.retry_after_ms > 0
        with limit.hold("a"):
            pass
    with pytest.raises(ZeroDivisionError), limit.hold("a"):
        _ = 1 // 0
    with limit.hold("a"), limit.hold("a"):
        pass


def test_calls_are_left_for_gets_of_other_tenants() -> None:
    limit, held = CallLimit(8), ExitStack()
    with held:
        for work, most in ((Work.PREFETCH, 4), (Work.PUT, 6)):
            for _ in range(most):
                with contextlib.suppress(KVStoreError):
                    held.enter_context(limit.hold("greedy", work))
            with pytest.raises(KVStoreError, match=f"{most} unary calls are under way"):
                held.enter_context(limit.hold("other", work))
        with pytest.raises(KVStoreError, match="of this tenant"):
            held.enter_context(limit.hold("greedy"))
        held.enter_context(limit.hold("other"))


def test_inline_blocks_are_where_their_bytes_are() -> None:
    payload = bytes(range(256)) * 4
    staged = InlineBlocks([b"", b"tokens"], [b"another", payload])
    assert staged.tokens_of([1, 0]) == [b"tokens", b""]
    (address,), owner = staged.payloads_at([1])
    del payload, staged
    assert owner and ctypes.string_at(address, 1024) == bytes(range(256)) * 4, "the owner keeps its bytes"


class Calls:
    """Unary puts over the verbs of a small store. The blocks are of a group whose blocks need no block before them."""

    def __init__(self, store: Store) -> None:
        self.store = store
        small, nothing = store.small, cast(Any, None)
        operations: Any = Operations(small.store, DeletionLog(small.clock))
        operations.put = store.puts
        verbs = Verbs(small.store, operations, RecentMisses(8, small.clock), nothing, nothing, nothing)
        self._calls = InlineCalls(verbs, nothing, small.store, message_bytes=1 << 20)

    async def put(self, *blocks: tuple[str, bytes, int]) -> unary.UnaryPutReply:
        """Blocks as (name, parent, size of the payload)."""
        keys = [key_of(name) for name, _, _ in blocks]
        named = NamedBlocks(1, keys, [parent for _, parent, _ in blocks], [b""] * len(keys), [bytes(16)] * len(keys))
        request = unary.UnaryPutRequest(payloads=[bytes(nbytes) for _, _, nbytes in blocks])
        return await self._calls.put(self.store.client(), named, request)

    async def get(self, *blocks: str) -> unary.UnaryGetReply:
        keys = [key_of(name) for name in blocks]
        named = NamedBlocks(1, keys, [NO_PARENT] * len(keys), [b""] * len(keys), [bytes(16)] * len(keys))
        return await self._calls.get(self.store.client(), named, unary.UnaryGetRequest())


def over_calls(tmp_path: Path, test: Callable[[Calls], Any]) -> None:
    run(tmp_path, lambda store: test(Calls(store)))


def test_a_block_that_another_client_is_writing_is_pending(tmp_path: Path) -> None:
    async def test(calls: Calls) -> None:
        under_way = calls.store.begin([key_of("a")])
        reply = await calls.put(("a", NO_PARENT, 100))
        assert (names(reply.statuses), reply.retry_after_ms > 0) == (["PENDING"], True)
        assert [list(reply.store.statuses) async for reply in under_way] == [[STORED]]
        reply = await calls.put(("a", NO_PARENT, 100))
        assert (names(reply.statuses), reply.retry_after_ms) == (["PRESENT"], 0)

    over_calls(tmp_path, test)


def test_a_mistake_in_a_put_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(calls: Calls) -> None:
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="a mistake of ours"):
            fail_once(patch, calls.store.small.residency, "insert", 2)
            await calls.put(("a", NO_PARENT, 100), ("b", NO_PARENT, 100))
        calls.store.assert_nothing_left()
        assert names((await calls.put(("a", NO_PARENT, 100), ("b", NO_PARENT, 100))).statuses) == ["STORED"] * 2

    over_calls(tmp_path, test)


@pytest.mark.parametrize("sizes", [(3000, 50_000), (50_000, 3000)])
def test_the_slot_of_a_refused_block_is_not_the_next_ones_unless_it_fits(
    tmp_path: Path, sizes: tuple[int, int]
) -> None:
    """A block that would be its own ancestor is refused when it has a slot; the next one has another size."""

    async def test(calls: Calls) -> None:
        assert names((await calls.put(("child", key_of("parent"), 5000))).statuses) == ["STORED"]
        reply = await calls.put(("parent", key_of("child"), sizes[0]), ("other", NO_PARENT, sizes[1]))
        assert names(reply.statuses) == ["MISS", "STORED"]
        small = calls.store.small
        row = small.residency.find(calls.store.session.tenant_id, key_of("other"))
        assert small.residency.slot(row, HOST).nbytes == slot_bytes(sizes[1])
        assert small.store.host.statistics().blocks == 2

    over_calls(tmp_path, test)


def test_an_expired_block_that_is_not_removed_yet_is_a_miss_that_says_so(tmp_path: Path) -> None:
    async def test(calls: Calls) -> None:
        small = calls.store.small
        await calls.put(("a", NO_PARENT, 100), ("b", NO_PARENT, 100))
        row = small.residency.find(calls.store.session.tenant_id, key_of("b"))
        small.store.retention.change((row,), Terms(ttl_s=1))
        small.clock.advance(s=1)
        reply = await calls.get("a", "b")
        assert names(reply.statuses) == ["SENT", "MISS"]
        assert list(reply.miss_reasons) == [pb.MISS_REASON_UNSPECIFIED, pb.MISS_REASON_EXPIRED]

    over_calls(tmp_path, test)
