"""The parts of a linker that need no SGLang: where device pages are, which page is before which, and in what order it
waits.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import Empty
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore_connectors.sglang.layer_loads import (
    HeldPages,
    LayerBatch,
    LayerCounter,
    Offloads,
    PageCopies,
    SglangDevicePages,
)
from kvstore_connectors.sglang.pages import BackendMisconfigured
from kvstore_connectors.sglang.stored_pages import PageChains
from tests.reference.device_pool import pieces

PAGE, PAGES, ROW = 4, 5, 32
MAPPING = {0: (0, 2), 2: (1, 3)}  # K and V of the model's layers 0 and 2


def entry(
    *,
    mapping: dict[int, Any] = MAPPING,
    rows_are_pages: bool = False,
    stride: int = ROW,
    dtype: str = "bf16",
    kept_as: str = "",
) -> Any:
    """Return an entry as SGLang's DevicePoolEntry: buffers of tokens or of pages, one after another from address 1000
    on.
    """
    rows, row = (PAGES, ROW * PAGE) if rows_are_pages else (PAGES * PAGE, ROW)
    tensors = [SimpleNamespace(shape=(rows, row // 2), nbytes=rows * row, dtype=dtype) for _ in range(4)]
    places = [(1000 + at * rows * row, row if rows_are_pages else stride, ROW * PAGE) for at in range(4)]
    return SimpleNamespace(
        name="kv", layer_mapping=mapping, kv_buffer=tensors, components=[tensors], buffer_meta=[places], page_size=PAGE,
        device_pool=SimpleNamespace(kv_cache_layout="nhd", dtype=kept_as),
        prepare_locations=lambda indices: [index // PAGE if rows_are_pages else index for index in indices[::PAGE]],
    )  # fmt: skip


@pytest.mark.parametrize("rows_are_pages", [False, True])
def test_a_page_has_the_buffers_of_each_layer_one_after_another(rows_are_pages: bool) -> None:
    pages, whole = SglangDevicePages(entry(rows_are_pages=rows_are_pages)), PAGES * PAGE * ROW
    assert (pages.layers, pages.pool.pages, pages.pool.block_bytes) == ((0, 2), PAGES, 4 * PAGE * ROW)
    assert pieces(pages.pool, 0, 3) == [
        (1000 + 3 * PAGE * ROW, 0, PAGE * ROW), (1000 + 2 * whole + 3 * PAGE * ROW, PAGE * ROW, PAGE * ROW)
    ]  # fmt: skip
    assert pieces(pages.pool, 1, 0)[0].address == 1000 + whole
    tokens = [token for page in (3, 1) for token in range(page * PAGE, (page + 1) * PAGE)]
    assert pages.pages(tokens) == [3, 1]


def test_layers_of_a_draft_make_the_first_layers_larger() -> None:
    pages = SglangDevicePages(entry(mapping={0: (0, 3), 1: 1, 2: 2}))
    assert [pages.pool.extent(layer)[1] for layer in range(3)] == [2 * PAGE * ROW, PAGE * ROW, PAGE * ROW]
    assert pieces(pages.pool, 1, 0) == [(1000 + PAGES * PAGE * ROW, 2 * PAGE * ROW, PAGE * ROW)]


@pytest.mark.parametrize(
    "wrong",
    [
        {"mapping": {0: (0, 2)}},  # two buffers would be left out
        {"mapping": {0: (0, 2), 1: (1, 2)}},  # one twice, and one left out
        {"stride": 2 * ROW},
    ],
)
def test_a_pool_that_would_not_be_copied_whole_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(BackendMisconfigured):
        SglangDevicePages(entry(**wrong))


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "f16"},
        {"kept_as": "fp8_e5m2"},
        {"rows_are_pages": True},
        {"mapping": {0: (0, 2), 1: (1, 3)}},
        {"mapping": {0: (2, 0), 2: (1, 3)}},
    ],
)
def test_another_form_of_pool_has_other_names(other: dict[str, Any]) -> None:
    assert SglangDevicePages(entry(**other)).form != SglangDevicePages(entry()).form


def test_a_pool_of_another_draft_model_has_other_names() -> None:
    forms = [SglangDevicePages(entry(), draft).form for draft in ("", "draft eagle@None", "draft eagle@v2")]
    assert len(set(forms)) == 3 and forms[0] == SglangDevicePages(entry()).form


def test_the_page_before_is_known_where_it_was_seen() -> None:
    chains = PageChains(most=3)
    chains.saw(["a", "b", "c"])
    assert [chains.before(page) for page in "abcx"] == [None, "a", "b", None]
    chains.saw(["b", "d", "e"])
    assert [chains.before(page) for page in "bcde"] == [None, "b", "b", "d"], "the oldest is forgotten"


def test_results_of_stores_come_in_their_order_and_one_that_raises_has_failed() -> None:
    offloads, order = Offloads(), list[int]()

    def store(number: int, is_stored: bool) -> bool:
        order.append(number)
        if number == 1:
            raise OSError("the device is gone")
        return is_stored

    for number, is_stored in enumerate([True, True, False, True]):
        offloads.put(lambda number=number, is_stored=is_stored: store(number, is_stored))
    offloads._work.join()
    assert (order, offloads.completed()) == ([0, 1, 2, 3], 4)
    assert [offloads.pop() for _ in range(4)] == [True, False, False, True]
    offloads.put(lambda: True)
    offloads.settle()
    with pytest.raises(Empty):
        offloads.pop()
    offloads.close()
    offloads.close()


@dataclass
class Load:
    """A load of one pool: which of its layers which stream was made to wait for."""

    fails: bool = False
    landed: bool = True
    waits: list[tuple[int, int]] = field(default_factory=list)
    is_finished: bool = False

    def wait_quietly(self, layer: int, stream: int) -> None:
        self.waits.append((layer, stream))

    def finish(self) -> bool:
        self.is_finished = True
        if self.fails:
            raise OSError("the device is gone")
        return self.landed


@dataclass
class HeldLease:
    pages: int
    load: Load | None = None
    was_released: bool = False

    def __len__(self) -> int:
        return self.pages

    def release(self) -> None:
        assert self.load is None or self.load.is_finished, "its bytes are being read"
        self.was_released = True


@dataclass
class Pool:
    """Stands for a device pool and its transfers."""

    layers: tuple[int, ...]
    load: Load
    placed: list[Any] = field(default_factory=list)

    def pages(self, indices: Sequence[int]) -> list[int]:
        return list(indices)

    def load_all(self, leases: Any) -> Load:
        self.placed += leases
        return self.load


def batch(*pools: Pool, ready: Any = None, pages: int = 3) -> tuple[LayerBatch, list[HeldLease]]:
    """Each pool is loaded from two leases, the first on two pages."""
    leases = [HeldLease(count, pool.load) for pool in pools for count in (2, pages - 2)]
    held = [HeldPages(str(at), leases[2 * at : 2 * at + 2], list(range(pages))) for at in range(len(pools))]  # type: ignore[arg-type]
    copies: Any = {str(at): PageCopies(pool, pool) for at, pool in enumerate(pools)}  # type: ignore[arg-type]
    return LayerBatch(held, copies, ready or SimpleNamespace(synchronize=lambda: None)), leases


def counter_of(loads: LayerBatch, stream: int = 7) -> LayerCounter:
    counter = LayerCounter(4, lambda: stream)
    counter.set_consumer(counter.add(loads))
    return counter


def test_a_stream_waits_for_the_layers_of_every_pool_up_to_the_one_it_computes() -> None:
    full, sliding = Pool((0, 2), Load()), Pool((1, 3), Load())
    loads, leases = batch(full, sliding)
    counter = counter_of(loads)
    for layer in (0, 0, 2, 1, 3):
        counter.wait_until(layer)
    assert full.load.waits == [(0, 7), (1, 7), (1, 7)]
    assert sliding.load.waits == [(0, 7), (1, 7)]
    assert full.placed == [(leases[0], 0, [0, 1]), (leases[1], 0, [2])], "each lease has the pages that follow"
    assert counter.finish(0) and all(lease.was_released for lease in leases)


def test_a_stream_that_begins_late_waits_for_all_that_is_before() -> None:
    """The stream waits as the replay of a graph does, which asks for the last layer alone."""
    pool = Pool((0, 1, 2), Load())
    loads, _ = batch(pool)
    counter_of(loads).wait_until(3)
    assert pool.load.waits == [(2, 7)]


def test_nothing_is_waited_for_without_a_batch_or_after_its_end() -> None:
    pool = Pool((0,), Load())
    loads, leases = batch(pool)
    counter = counter_of(loads)
    counter.set_consumer(-1)
    counter.wait_until(0)
    counter.set_consumer(0)
    assert not any(lease.was_released for lease in leases)
    assert counter.finish(0) and counter.finish(0) and counter.finish(5)
    counter.wait_until(0)
    loads.wait(0, 7)
    assert pool.load.waits == []


@pytest.mark.parametrize("what", ["the event", "the listing", "the copies", "the lease"])
def test_a_failure_reaches_no_forward_and_is_reported_at_the_end(what: str) -> None:
    def fail() -> None:
        raise OSError("the device is gone")

    pool, other = Pool((0, 1), Load(fails=what == "the copies", landed=what != "the lease")), Pool((0,), Load())
    if what == "the listing":
        pool.load_all = lambda _: fail()  # type: ignore[method-assign]
    ready = SimpleNamespace(synchronize=fail if what == "the event" else lambda: None)
    loads, leases = batch(other, pool, ready=ready)
    for lease in leases:
        lease.load = None
    counter = counter_of(loads)
    for layer in (0, 1):
        counter.wait_until(layer)
    assert not counter.finish(0)
    assert all(lease.was_released for lease in leases)
    assert other.load.is_finished == (what != "the event"), "its copies have ended, too"


def test_a_forward_waits_until_the_copies_are_queued() -> None:
    gate, pool = threading.Event(), Pool((0,), Load())
    loads, _ = batch(pool, ready=SimpleNamespace(synchronize=gate.wait))
    counter, waited = counter_of(loads), threading.Event()

    def forward() -> None:
        counter.wait_until(0)
        waited.set()

    thread = threading.Thread(target=forward)
    thread.start()
    assert not waited.wait(0.05)
    gate.set()
    thread.join(10.0)
    assert waited.is_set() and pool.load.waits == [(0, 7)]
