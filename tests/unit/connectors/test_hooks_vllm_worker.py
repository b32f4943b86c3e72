"""The worker's half: what is restored, what counts as failed, and when pool blocks may be used for something else."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest

from kvstore_client.device import LinkBudget
from kvstore_client.trace import TRACE
from kvstore_connectors.vllm.host_pages import PagedLayers
from kvstore_connectors.vllm.identity import Extras, derived_keys
from kvstore_connectors.vllm.model import describe_extras
from kvstore_connectors.vllm.orders import LoadOrder, RequestPrefix, SaveOrder, StepOrders
from kvstore_connectors.vllm.saver import Saver
from kvstore_connectors.vllm.scheduler import LoadRules, SchedulerSide
from kvstore_connectors.vllm.worker import VllmWorkerSide, open_worker
from kvstore_cuda.driver import DriverError
from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.identity import pack_tokens
from kvstore_proto.trace import TraceContext
from tests.reference.vllm_records import BLOCK_TOKENS, KeyedStore, Step, plain_groups, request

TOKENS = list(range(20))
PATIENCE_S = 20.0


class Engine:
    """A pool of two layers and 16 blocks, and the half that is tested. `said` collects its complaints."""

    def __init__(
        self,
        store: KeyedStore,
        *,
        saves: bool = True,
        reuse_wait_s: float = PATIENCE_S,
        pages: Callable[[Any], PagedLayers] = lambda memory: PagedLayers(list(memory)),
    ) -> None:
        self.store = store
        self.memory = np.random.default_rng(5).integers(1, 256, (2, 16, 4), dtype=np.uint8)
        self.said: list[str] = []
        pool = self.pages = pages(self.memory)
        self.saver = Saver(store, pool, deadline_s=5.0, say=self.said.append)
        self.side = VllmWorkerSide(
            store,
            pool,
            self.saver if saves else None,
            reuse_wait_s=reuse_wait_s,
            say=self.said.append,
        )

    def block(self, block_id: int) -> bytes:
        return self.memory[:, block_id].tobytes()

    def load(self, *orders: LoadOrder) -> None:
        """A step's load, and the step."""
        self.side.load(orders)
        self.side.save(())

    def save(self, *orders: SaveOrder) -> None:
        self.side.save(orders)
        assert self.saver.drain(PATIENCE_S)

    def stored(self, blocks: int, extras: Extras | None = None) -> list[bytes | None]:
        digests = (extras or Extras()).digests(blocks, BLOCK_TOKENS)
        named = self.store._named(None if digests else np.array(TOKENS[: blocks * BLOCK_TOKENS]), self._keys(digests))
        return [block.tobytes() if (block := self.store.blocks.get(key)) is not None else None for key in named]

    def _keys(self, digests: tuple[bytes, ...]) -> Any:
        plain = self.store.keys(np.array(TOKENS[: len(digests) * BLOCK_TOKENS]))
        return derived_keys(plain, digests) if digests and plain is not None else None


def prefix(blocks: int, extras: Extras | None = None) -> RequestPrefix:
    tokens = pack_tokens(TOKENS[: blocks * BLOCK_TOKENS])
    return RequestPrefix(tokens, (extras or Extras()).digests(blocks, BLOCK_TOKENS))


def save_of(first: int, *block_ids: int, name: str = "r", extras: Extras | None = None) -> SaveOrder:
    return SaveOrder(name, prefix(len(block_ids), extras), first, block_ids)


def load_of(first: int, *block_ids: int, extras: Extras | None = None) -> LoadOrder:
    return LoadOrder("r", prefix(first + len(block_ids), extras), first, block_ids, 0.5)


def test_what_one_engine_saved_another_loads_elsewhere() -> None:
    writer = Engine(KeyedStore())
    writer.save(save_of(0, 3, 4, 5))
    reader = Engine(writer.store)
    reader.load(load_of(0, 9, 8, 7))
    assert reader.side.take_failed() == set()
    assert [reader.block(block) for block in (9, 8, 7)] == [writer.block(block) for block in (3, 4, 5)]
    assert (reader.side.counts.loaded_blocks, reader.side.counts.failed_blocks) == (3, 0)


class TracedStore(KeyedStore):
    """A store that notes the span of each request."""

    def __init__(self) -> None:
        super().__init__()
        self.spans: list[tuple[str, bytes]] = []

    def lookup(self, *args: Any, **named: Any) -> Any:
        self.spans.append(("lookup", TRACE.get()))
        return super().lookup(*args, **named)

    def get(self, *args: Any, **named: Any) -> Any:
        self.spans.append(("get", TRACE.get()))
        return super().get(*args, **named)

    def put(self, *args: Any, **named: Any) -> Any:
        self.spans.append(("put", TRACE.get()))
        return super().put(*args, **named)


def test_what_is_asked_for_a_request_is_below_its_span() -> None:
    """vLLM hands on its caller's headers; scheduler and workers are processes of their own."""
    header = f"00-{1:032x}-{2:016x}-01"
    store, names, table = TracedStore(), [], [3, 4, 5, 6, 7]
    side = SchedulerSide(
        [store], lambda asked: describe_extras(asked, hashed_items=True), groups=plain_groups(), loads=True,
        saves=True, lookup_deadline_s=0.05, rules=LoadRules(None, block_bytes=8),
    )  # fmt: skip
    for trace in ({"trace_headers": {"traceparent": header}}, {"trace_headers": None}, {}):
        asked, engine = request("r", TOKENS, **trace), Engine(store)
        matched, _ = side.matched_tokens(asked, 0)
        side.admitted(asked, matched, [table])
        orders = pickle.loads(
            pickle.dumps(side.orders(Step(new={"r": (matched, 20 - matched)}, tables={"r": table}).output()))
        )
        engine.load(*orders.loads)
        engine.save(*orders.saves)
        side.finished(asked)
        span = TraceContext(1, 2, True).packed() if trace.get("trace_headers") else b""
        assert {each for _, each in store.spans} == {span}
        names += [name for name, _ in store.spans]
        store.spans.clear()
    assert {"lookup", "get", "put"} <= set(names)


def test_a_load_in_the_middle_of_a_prefix() -> None:
    writer = Engine(KeyedStore())
    writer.save(save_of(0, 3, 4, 5, 6))
    reader = Engine(writer.store)
    untouched = reader.block(9)
    reader.load(load_of(2, 8, 7))
    assert [reader.block(block) for block in (8, 7)] == [writer.block(block) for block in (5, 6)]
    assert reader.block(9) == untouched


def test_blocks_with_a_salt_are_found_with_it_alone() -> None:
    salted = Extras(salt="one")
    writer = Engine(KeyedStore())
    writer.save(save_of(0, 3, 4, extras=salted))
    assert writer.stored(2, salted) == [writer.block(3), writer.block(4)]
    writer.load(load_of(0, 9, 8))
    assert writer.side.take_failed() == {9, 8}
    writer.load(load_of(0, 9, 8, extras=salted))
    assert writer.side.take_failed() == set()


def test_a_missing_block_and_those_behind_it_count_as_failed_once() -> None:
    engine = Engine(KeyedStore())
    engine.save(save_of(0, 3, 4))
    engine.load(load_of(0, 7, 8, 9, 10))
    assert engine.side.take_failed() == {9, 10}
    assert engine.side.take_failed() == set()


def test_a_lease_that_ended_while_copying_fails_all_its_blocks() -> None:
    engine = Engine(KeyedStore())
    engine.save(save_of(0, 3, 4))
    engine.store.leases_hold = False
    engine.load(load_of(0, 7, 8))
    assert engine.side.take_failed() == {7, 8}


def test_without_a_daemon_or_with_one_that_refuses_all_blocks_fail_and_nothing_is_raised() -> None:
    engine = Engine(KeyedStore(connected=False))
    engine.load(load_of(1, 7, 8))
    assert engine.side.take_failed() == {7, 8}
    refusing = Engine(KeyedStore(fail_with=KVStoreError(ErrorKind.FORBIDDEN, "not yours")))
    refusing.load(load_of(0, 7))
    assert refusing.side.take_failed() == {7}
    assert refusing.said == ["blocks are not restored: not yours"]


def test_what_was_computed_on_a_failed_load_is_not_stored() -> None:
    engine = Engine(KeyedStore())
    engine.load(load_of(0, 7, 8))
    engine.save(save_of(2, 7, 8, 9), save_of(0, 1, 2, name="other"))
    assert engine.stored(3) != [None, None, None]
    assert engine.stored(3)[2] is None
    engine.side.take_failed()
    engine.save(save_of(0, 7, 8, 9))  # the next step computed them again
    assert engine.stored(3)[2] == engine.block(9)


def test_present_blocks_are_not_stored_again_and_later_ones_are() -> None:
    engine = Engine(KeyedStore())
    engine.save(save_of(0, 1, 2))
    engine.save(save_of(0, 4, 5, 6))
    assert engine.stored(3) == [engine.block(1), engine.block(2), engine.block(6)]


class Gate:
    """Holds the saver's thread before a copy, after `free` others, until it is opened."""

    def __init__(self, store: KeyedStore, free: int = 0) -> None:
        self.free = free
        self.reached, self.opened = threading.Event(), threading.Event()
        store.before_fill = self._pass

    def _pass(self) -> None:
        if self.free:
            self.free -= 1
            return
        self.reached.set()
        assert self.opened.wait(PATIENCE_S)


def test_blocks_of_an_ended_request_are_copied_before_the_next_step_may_write() -> None:
    store = KeyedStore()
    gate, engine = Gate(store, free=1), Engine(store)
    expected = [engine.block(3), engine.block(4)]
    engine.side.save([save_of(0, 3, 4)])
    assert gate.reached.wait(PATIENCE_S)
    threading.Timer(0.05, gate.opened.set).start()
    engine.side.before_step(StepOrders(ended=("r",)))  # waits for the second copy
    engine.memory[:] = 0
    assert engine.saver.drain(PATIENCE_S)
    assert engine.stored(2) == expected


def test_a_daemon_that_does_not_answer_is_not_waited_for() -> None:
    store = KeyedStore()
    gate, engine = Gate(store), Engine(store, reuse_wait_s=1e6)
    engine.side.save([save_of(0, 3)])
    assert gate.reached.wait(PATIENCE_S)
    engine.side.before_step(StepOrders(ended=("r",)))  # the gate is shut, and this returns
    engine.memory[:] = 0
    gate.opened.set()
    assert engine.saver.drain(PATIENCE_S)
    assert engine.stored(1) == [None]


def test_a_copy_that_does_not_come_is_cut_off_and_never_reads_reused_memory() -> None:
    store = KeyedStore()
    gate, engine = Gate(store), Engine(store)
    engine.side.save([save_of(0, 3, 4), save_of(0, 5, name="other")])
    assert gate.reached.wait(PATIENCE_S)
    engine.saver.let_go(("r",), 0.0)
    engine.memory[:] = 0
    gate.opened.set()
    assert engine.saver.drain(PATIENCE_S)
    assert engine.saver.dropped_blocks == 2
    assert engine.stored(2) == [bytes(8), None]  # what "other" holds under the same key, in memory that it still owns


def test_running_requests_are_not_waited_for() -> None:
    store = KeyedStore()
    gate, engine = Gate(store), Engine(store)
    engine.side.save([save_of(0, 3)])
    assert gate.reached.wait(PATIENCE_S)
    engine.side.before_step(StepOrders(ended=("another",)))
    gate.opened.set()
    assert engine.saver.drain(PATIENCE_S)
    assert engine.saver.stored_blocks == 1


def test_what_could_not_be_stored_is_tried_again_with_the_next_order() -> None:
    store = KeyedStore(fail_with=KVStoreError(ErrorKind.INVALID, "no"))
    engine = Engine(store)
    engine.save(save_of(0, 1, 2))
    store.fail_with = None
    engine.save(save_of(2, 1, 2, 3))
    assert engine.stored(3) == [engine.block(1), engine.block(2), engine.block(3)]


def test_a_gap_ends_with_its_request() -> None:
    store = KeyedStore(fail_with=KVStoreError(ErrorKind.INVALID, "no"))
    engine = Engine(store)
    engine.save(save_of(0, 1, 2))
    engine.side.before_step(StepOrders(ended=("r",)))
    store.fail_with = None
    engine.save(save_of(2, 7, 8, 3))  # other memory under the same request's name
    assert engine.stored(3) == [None, None, None]


def test_a_refusing_daemon_is_complained_of_once_and_the_thread_lives_on() -> None:
    store = KeyedStore(fail_with=KVStoreError(ErrorKind.INVALID, "a block of 8 bytes is over the limit"))
    engine = Engine(store)
    for _ in range(3):
        engine.save(save_of(0, 1))
    assert engine.said == ["blocks are not stored: a block of 8 bytes is over the limit"]
    store.fail_with = RuntimeError("a bug")
    engine.save(save_of(0, 1))
    assert engine.said[1:] == ["blocks are not stored: RuntimeError: a bug"]
    store.fail_with = None
    engine.save(save_of(0, 1))
    assert engine.stored(1) == [engine.block(1)]


def test_an_engine_that_only_reads_stores_nothing() -> None:
    engine = Engine(KeyedStore(), saves=False)
    engine.side.save([save_of(0, 1)])
    engine.side.before_step(StepOrders(ended=("r",)))
    assert engine.side.close(1.0) == "0 blocks restored in 0.000 s, 0 could not be"
    assert not engine.store.blocks


def test_closing_stores_what_waits_and_refuses_what_comes_later() -> None:
    engine = Engine(KeyedStore())
    engine.side.save([save_of(0, 1), save_of(1, 1, 2)])
    assert engine.side.close(PATIENCE_S).endswith("; 2 stored, 0 dropped")
    assert engine.stored(2) == [engine.block(1), engine.block(2)]
    engine.side.save([save_of(0, 1, 2, 3)])
    assert engine.saver.dropped_blocks == 3


@pytest.mark.parametrize(
    "error", [DriverError("cuMemHostRegister", 2, "CUDA_ERROR_OUT_OF_MEMORY"), RuntimeError("can't start new thread")]
)
def test_an_engine_whose_memory_cannot_be_copied_goes_on_without_a_worker(error: Exception) -> None:
    def fail(_: KeyedStore) -> PagedLayers:
        raise error

    reasons: list[str] = []
    options: dict[str, Any] = {"save_deadline_s": 5.0, "reuse_wait_s": 5.0, "say": reasons.append}
    assert open_worker(KeyedStore(), fail, refuse=reasons.append, **options) is None
    assert reasons == [f"its KV memory cannot be copied: {error}"]


class BudgetedPages(PagedLayers):
    """Blocks are copied out at a rate that never allows a second one."""

    def __init__(self, memory: Any) -> None:
        super().__init__(list(memory))
        self.waits = threading.Event()
        self.budget = LinkBudget(1, clock=lambda: 0.0, wait=self._wait)

    def _wait(self, changed: threading.Condition, timeout_s: float) -> None:
        self.waits.set()
        changed.wait()

    def decoding(self, is_decoding: bool) -> None:
        self.budget.decoding(is_decoding)

    def hurried(self) -> AbstractContextManager[None]:
        return self.budget.lifted("stores")

    def gather(self, block_id: int, destination: Any) -> None:
        self.budget.wait("stores", 1 << 30)
        super().gather(block_id, destination)


def waiting_engine() -> tuple[Engine, BudgetedPages]:
    """Return an engine that decodes; the second of two blocks that it stores waits for its rate."""
    engine = Engine(KeyedStore(), pages=BudgetedPages)
    pages = engine.pages
    assert isinstance(pages, BudgetedPages)
    engine.side.before_step(StepOrders(tokens=1, decodes=1))
    engine.side.save([save_of(0, 3, 4)])
    assert pages.waits.wait(PATIENCE_S)
    return engine, pages


@pytest.mark.parametrize("end", ["a step that decodes no more", "the request has ended"])
def test_stores_that_wait_for_their_rate_hold_no_step_up(end: str) -> None:
    engine, _ = waiting_engine()
    assert engine.stored(2) == [engine.block(3), None]
    ended = end == "the request has ended"
    engine.side.before_step(StepOrders(tokens=1, decodes=int(ended), ended=("r",) if ended else ()))
    if ended:
        assert engine.stored(2) == [engine.block(3), engine.block(4)], "in time: the step waited, and so not the copies"
    assert engine.saver.drain(PATIENCE_S)
    assert engine.stored(2) == [engine.block(3), engine.block(4)]


def test_an_engine_that_ends_stores_without_a_rate() -> None:
    engine, pages = waiting_engine()
    ending = threading.Thread(target=engine.side.close, args=(1.0,), daemon=True)
    ending.start()
    ending.join(PATIENCE_S)
    is_over = not ending.is_alive()
    pages.budget.close()
    assert is_over and engine.stored(2) == [engine.block(3), engine.block(4)]
    assert engine.saver.dropped_blocks == 0
