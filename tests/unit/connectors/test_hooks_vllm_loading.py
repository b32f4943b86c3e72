"""The vLLM connector loads as much as is faster than computing, layer by layer or beside the steps; loads may fail or
stall.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvstore_client.results import Lookup
from kvstore_connectors.vllm.host_pages import PageCopies, PagedLayers
from kvstore_connectors.vllm.model import describe_extras
from kvstore_connectors.vllm.orders import LoadOrder, LoadReport, Place, RequestPrefix, StepOrders, StepReport
from kvstore_connectors.vllm.scheduler import LoadRules, SchedulerSide
from kvstore_connectors.vllm.worker import Load, VllmWorkerSide
from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.identity import BlockKeys, pack_tokens
from kvstore_restore.choice import LoadChoice
from tests.reference.vllm_records import BLOCK_TOKENS, HeldBlocks, KeyedStore, Step, plain_groups, request

TOKENS = list(range(1, 23))
TABLE = [10, 11, 12, 13, 14, 15]
PATIENCE_S = 20.0


class SlowStore(KeyedStore):
    """Says of each block how long it takes."""

    load_s: tuple[float, ...] = ()

    def lookup(self, tokens: Any = None, *, keys: BlockKeys | None = None, **asked: Any) -> Lookup:
        found = super().lookup(tokens, keys=keys, **asked)
        load_s = self.load_s[: found.blocks]
        return replace(found, load_s=load_s, estimated_load_s=sum(load_s), tiers=("nvme",) * found.blocks)


def scheduler(load_s: tuple[float, ...], token_s: float | None) -> tuple[SchedulerSide, LoadChoice]:
    store, choice = SlowStore(), LoadChoice()
    store.load_s = load_s
    keys = store.keys(np.array(TOKENS))
    assert keys is not None
    store.blocks = {key: np.zeros(8, np.uint8) for key in list(keys)[: len(load_s)]}
    if token_s is not None:
        for tokens in (5, 10, 20, 40) * 5:
            choice.observe_compute(0, tokens, token_s * tokens)
    side = SchedulerSide(
        [store], lambda asked: describe_extras(asked, hashed_items=True), groups=plain_groups(), loads=True,
        saves=True, lookup_deadline_s=0.05, rules=LoadRules(choice, block_bytes=8),
    )  # fmt: skip
    return side, choice


@pytest.mark.parametrize(
    ("load_s", "token_s", "matched"),
    [
        ((1e-3,) * 5, 0.01, (20, False)),
        ((0.2,) * 5, 0.01, (0, False)),
        ((0.2,) * 5, None, (20, True)),  # nothing was computed yet
        ((1e-6,) * 3 + (0.2,) * 2, 0.01, (12, False)),
        ((0.1,) * 5, 1.0, (20, True)),
        ((3.0,) * 5, 100.0, (4, True)),  # of more than half of the deadline nothing is asked for
    ],
)
def test_as_much_is_loaded_as_is_faster_than_computing(
    load_s: tuple[float, ...], token_s: float | None, matched: tuple[int, bool]
) -> None:
    side, _ = scheduler(load_s, token_s)
    assert side.matched_tokens(request("r", TOKENS), 0) == matched


def test_what_is_computed_though_it_is_stored_is_not_stored_again() -> None:
    side, _ = scheduler((0.2,) * 5, 0.01)
    asked = request("r", TOKENS)
    assert side.matched_tokens(asked, 0) == (0, False)
    side.admitted(asked, 0, [TABLE])
    assert side.orders(Step(new={"r": (0, 22)}, tables={"r": TABLE}).output()).saves == ()


def test_a_load_beside_the_steps_is_ordered_once_and_its_request_is_computed_behind_it() -> None:
    side, _ = scheduler((0.1,) * 5, 1.0)
    asked = request("r", TOKENS)
    assert side.matched_tokens(asked, 4) == (16, True)
    side.admitted(asked, 16, [TABLE])
    orders = side.orders(Step().output())
    (order,) = orders.beside
    assert (order.first_block, order.block_ids, orders.loads) == (1, (11, 12, 13, 14), ())
    assert 0.4 < order.deadline_s <= 10.0
    side.admitted(asked, 0, [TABLE])  # vLLM's second call, once the load has ended
    after = side.orders(Step(new={"r": (20, 2)}, tables={"r": TABLE}).output())
    assert (after.beside, after.loads, after.saves) == ((), (), ())
    assert pickle.loads(pickle.dumps(orders)) == orders


def test_blocks_that_did_not_come_are_computed_and_not_asked_for_again() -> None:
    side, _ = scheduler((0.1,) * 5, 1.0)
    asked = request("r", TOKENS)
    side.matched_tokens(asked, 0)
    side.admitted(asked, 20, [TABLE])
    side.orders(Step().output())
    assert side.matched_tokens(asked, 0) == (0, False), "nothing came, and vLLM asks again"
    side.admitted(asked, 0, [TABLE])
    assert side.orders(Step(new={"r": (0, 22)}, tables={"r": TABLE}).output()).saves == (), "the store has them"


def test_reports_teach_the_choice() -> None:
    side, choice = scheduler((0.1,) * 5, 1.0)
    asked = request("r", TOKENS)
    side.matched_tokens(asked, 0)
    side.admitted(asked, 20, [TABLE])
    before_s = choice.compute_s(0, 1000)
    for _ in range(20):
        side.learn(StepReport(tokens=1000, attended=500_000.0, compute_s=0.1))
    assert choice.compute_s(0, 1000) < before_s / 100
    side.learn(StepReport((LoadReport("r", 0, 5.0), LoadReport("unknown", 3, 1.0))))
    assert side.matched_tokens(request("other", TOKENS), 0) == (0, False)


def test_of_two_ranks_the_slower_one_counts() -> None:
    one = StepReport((LoadReport("r", 5, 0.1), LoadReport("s", 1, 0.1)), 10, 50.0, 0.2)
    other = StepReport((LoadReport("r", 3, 0.2),), 10, 50.0, 0.1)
    assert one.joined(other) == StepReport((LoadReport("r", 3, 0.2), LoadReport("s", 1, 0.1)), 10, 50.0, 0.2)


class Stalling(KeyedStore):
    """A session whose blocks come when `opened` is set, or not at all if the deadline is nearer."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = threading.Event()

    def get(
        self, tokens: Any = None, *, keys: BlockKeys | None = None, max_blocks: int | None = None,
        deadline_s: float | None = None,
    ) -> HeldBlocks:  # fmt: skip
        came = self.opened.wait(deadline_s)
        return super().get(tokens, keys=keys, max_blocks=max_blocks if came else 0, deadline_s=deadline_s)


def worker(store: KeyedStore, pages: type[PagedLayers] = PagedLayers) -> tuple[VllmWorkerSide, np.ndarray, list[str]]:
    keys = store.keys(np.array(TOKENS))
    assert keys is not None
    store.blocks = {key: np.full(8, 10 + at, np.uint8) for at, key in enumerate(keys)}
    memory, said = np.zeros((2, 16, 4), np.uint8), list[str]()
    return VllmWorkerSide(store, pages(list(memory)), None, reuse_wait_s=0.1, say=said.append), memory, said


def order_of(name: str, *block_ids: int, deadline_s: float = PATIENCE_S) -> LoadOrder:
    return LoadOrder(
        name, RequestPrefix(pack_tokens(TOKENS[: len(block_ids) * BLOCK_TOKENS])), 0, block_ids, deadline_s
    )


def ended(side: VllmWorkerSide, name: str) -> None:
    until = time.monotonic() + PATIENCE_S
    while name not in side.take_ended():
        assert time.monotonic() < until


def test_a_load_beside_the_steps_holds_none_up_and_is_reported_when_it_ends() -> None:
    store = Stalling()
    side, memory, _ = worker(store)
    orders = StepOrders(beside=(order_of("r", 3, 4),))
    side.before_step(orders)
    side.load_beside(orders.beside)
    side.save(())
    assert side.take_ended() == set() and side.take_failed() == set() and side.take_report() is None
    side.before_step(StepOrders(tokens=7, attended=24.5))
    side.save(())
    report = side.take_report()
    assert report is not None and (report.loads, report.tokens, report.attended) == ((), 7, 24.5)
    store.opened.set()
    side.before_step(StepOrders())
    ended(side, "r")
    assert side.take_failed() == set()
    assert memory[:, [3, 4]].tolist() == [[[10] * 4, [11] * 4]] * 2
    report = side.take_report()
    assert report is not None and [(load.request_id, load.blocks) for load in report.loads] == [("r", 2)]


def test_what_has_not_come_by_the_deadline_has_failed_and_is_not_written_later() -> None:
    store = Stalling()
    side, memory, _ = worker(store)
    side.before_step(StepOrders())
    side.load_beside([order_of("r", 3, 4, deadline_s=0.05)])
    ended(side, "r")
    assert side.take_failed() == {3, 4}
    store.opened.set()
    assert not memory.any()
    assert side.take_report() is not None


@pytest.mark.parametrize("error", [KVStoreError(ErrorKind.FORBIDDEN, "not yours"), RuntimeError("a bug")])
def test_a_load_that_raises_has_failed_and_keeps_no_step_waiting(error: Exception) -> None:
    side, _, said = worker(KeyedStore(fail_with=error))
    side.load([order_of("r", 3, 4)])
    side.wait_layer(1)
    side.save(())
    side.load_beside([order_of("s", 5)])
    side.before_step(StepOrders())
    ended(side, "s")
    assert side.take_failed() == {3, 4, 5}
    assert said == [f"blocks are not restored: {error}"] * 2


class GatedPool(PagedLayers):
    """Lets a layer pass when it may."""

    may: threading.Semaphore

    def scatter(self, copies: PageCopies, layers: range) -> None:
        assert self.may.acquire(timeout=PATIENCE_S)
        super().scatter(copies, layers)


def test_a_layer_may_be_read_before_the_next_one_is_there() -> None:
    store = KeyedStore()
    worker(store)  # fills it
    memory = np.zeros((2, 16, 4), np.uint8)
    pool = GatedPool(list(memory))
    pool.may = threading.Semaphore(1)
    load = Load(store, pool, [order_of("r", 3)], say=print).start()
    load.wait_layer(0)
    assert memory[:, 3].tolist() == [[10] * 4, [0] * 4]
    pool.may.release()
    assert load.join() == [1] and not load.failed()
    assert memory[:, 3].tolist() == [[10] * 4] * 2


class BreakingPool(PagedLayers):
    """Cannot copy the second layer of pool block 5; `read` says when the first layer was read."""

    read: threading.Event
    block_ids: Sequence[Place] = ()

    def copies(self, payloads: Sequence[np.ndarray], block_ids: Sequence[Place]) -> PageCopies:
        self.block_ids = block_ids
        return super().copies(payloads, block_ids)

    def scatter(self, copies: PageCopies, layers: range) -> None:
        if layers.start and 5 in self.block_ids:
            assert self.read.wait(PATIENCE_S)
            raise RuntimeError("a layer is gone")
        super().scatter(copies, layers)


def test_a_layer_that_fails_behind_one_that_was_computed_fails_all_requests_of_the_step_and_holds_none_up() -> None:
    store = KeyedStore()
    worker(store)  # fills it
    memory, said = np.zeros((2, 16, 4), np.uint8), list[str]()
    pool = BreakingPool(list(memory))
    pool.read = threading.Event()
    side = VllmWorkerSide(store, pool, None, reuse_wait_s=0.1, say=said.append)
    orders = StepOrders(loads=(order_of("r", 3), order_of("s", 4, 5)), tokens=3, attended=9.0)
    side.before_step(orders)
    side.load(orders.loads)
    side.wait_layer(0)
    assert memory[0, 3:6].tolist() == [[10] * 4, [10] * 4, [11] * 4], "the step computes the first layer"
    pool.read.set()
    side.wait_layer(1)  # returns, though the layer never comes
    side.save(())
    assert side.take_failed() == {3, 4, 5} and side.take_failed() == set()
    report = side.take_report()
    assert report is not None and [(load.request_id, load.blocks) for load in report.loads] == [("r", 0), ("s", 0)]
    assert said == ["blocks are not restored: a layer is gone"]


def test_the_time_that_a_step_waits_is_not_counted_as_computing() -> None:
    store = Stalling()
    side, _, _ = worker(store)
    orders = StepOrders(loads=(order_of("r", 3),), tokens=5, attended=12.5)
    side.before_step(orders)
    side.load(orders.loads)
    threading.Timer(0.3, store.opened.set).start()
    side.wait_layer(0)
    side.save(())
    report = side.take_report()
    assert report is not None and report.compute_s < 0.2
    assert report.loads[0].blocks == 1 and report.loads[0].seconds >= 0.25


class QueuedPages(PagedLayers):
    """A pool of which the engine's work is only queued when it says that a step has run."""

    is_on_device = True


def test_on_a_device_a_step_is_reported_two_steps_later_and_one_that_loads_is_not_measured() -> None:
    side, _, _ = worker(KeyedStore(), QueuedPages)
    measured = []
    for tokens in range(1, 7):
        loads = (order_of("r", 3),) if tokens == 2 else ()
        side.before_step(StepOrders(loads=loads, tokens=tokens, attended=tokens / 2))
        if loads:
            side.load(loads)
        side.save(())
        report = side.take_report()
        measured.append(report and (report.tokens, report.attended, [load.blocks for load in report.loads]))
    assert measured == [None, (0, 0.0, [1]), None, (1, 0.5, []), (3, 1.5, []), (4, 2.0, [])]


def test_a_step_that_one_of_two_ranks_has_not_measured_teaches_nothing() -> None:
    one, other = StepReport((), 10, 50.0, 0.2), StepReport((LoadReport("r", 3, 0.2),))
    assert one.joined(other) == StepReport((LoadReport("r", 3, 0.2),))
