"""The connector bounds how much is loaded, and arranges blocks in memory."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_client.results import Lookup
from kvstore_connectors.moments import LayerProgress
from kvstore_connectors.vllm.host_pages import PageCopies, PagedLayers
from kvstore_connectors.vllm.load_bounds import loadable_blocks, restorable_at_most
from kvstore_cuda import side_thread
from kvstore_cuda.side_thread import NAME, SHARED_BYTES
from tests.reference.vllm_records import HeldBlocks


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 0), (128, 0), (129, 1), (256, 1), (257, 2), (1000, 7)])
def test_the_last_token_of_a_prompt_is_always_computed(tokens: int, blocks: int) -> None:
    assert restorable_at_most(tokens, 128) == blocks


def test_all_that_is_mapped_is_loaded() -> None:
    assert loadable_blocks(Lookup(9, 9, ("host",) * 9, 3.0), 7, 0.5) == 7


def test_slow_blocks_are_loaded_while_their_estimate_fits_half_the_deadline() -> None:
    assert loadable_blocks(Lookup(8, 8, ("nvme",) * 8, 0.2), 8, 0.5) == 8
    assert loadable_blocks(Lookup(8, 8, ("nvme",) * 8, 2.0), 8, 0.5) == 1  # 0.25 s a block, 0.25 s to spend
    assert loadable_blocks(Lookup(8, 8, ("nvme",) * 8, 4.0), 8, 0.5) == 0


def test_mapped_blocks_before_slow_ones_are_free() -> None:
    tiers = ("host", "host", "nvme", "nvme", "host", "nvme", "nvme")
    assert loadable_blocks(Lookup(7, 7, tiers, 1.0), 7, 1.0) == 5  # two of four slow ones


@given(st.lists(st.sampled_from(["host", "nvme"]), max_size=12), st.integers(0, 12), st.floats(0, 5))
def test_never_more_than_found_or_wanted(tiers: list[str], most: int, estimate_s: float) -> None:
    found = Lookup(len(tiers), len(tiers), tuple(tiers), estimate_s)
    assert 0 <= loadable_blocks(found, most, 0.5) <= min(len(tiers), most)


def test_a_block_gathered_and_scattered_elsewhere_is_the_same_in_every_layer() -> None:
    memory = np.random.default_rng(1).integers(0, 256, (3, 5, 16), dtype=np.uint8)
    pool = PagedLayers(list(memory))
    assert (pool.blocks, pool.block_bytes) == (5, 48)
    before = memory.copy()
    block = np.empty(48, np.uint8)
    pool.gather(3, block)
    assert len(pool) == 3
    for layer in range(3):
        pool.scatter(pool.copies([block], [1]), range(layer, layer + 1))
    assert np.array_equal(memory[:, 1], before[:, 3])
    assert np.array_equal(np.delete(memory, 1, axis=1), np.delete(before, 1, axis=1))


def test_blocks_of_several_pool_blocks_and_pool_blocks_that_are_not_there() -> None:
    memory = np.random.default_rng(1).integers(1, 256, (2, 6, 16), dtype=np.uint8)
    before, planes = memory.copy(), list(memory)
    pool = PagedLayers([planes[0], planes[0], planes[1], planes[1]], [0, 1, 0, 1])
    assert pool.runs == [range(2), range(2, 4)]
    blocks = np.empty((2, 64), np.uint8)
    for place, block in zip([(3, 0), (5, 4)], blocks, strict=True):
        pool.gather(place, block)
    parts = blocks.reshape(2, 2, 2, 16)
    assert not parts[0, :, 1].any() and np.array_equal(parts[0, :, 0], before[:, 3])
    assert np.array_equal(parts[1], before[:, [5, 4]])
    for layers in pool.runs:
        pool.scatter(pool.copies(list(blocks), [(1, 2), (0, 3)]), layers)
    assert np.array_equal(memory[:, [1, 3]], before[:, [3, 4]]) and not memory[:, 2].any()
    assert np.array_equal(memory[:, [0, 4, 5]], before[:, [0, 4, 5]]), "no other is written"


def test_a_layer_is_readable_once_all_before_it_are_copied() -> None:
    progress, read = LayerProgress(), list[int]()
    threads = [threading.Thread(target=lambda at=layer: (progress.wait(at), read.append(at))) for layer in range(3)]
    for thread in threads:
        thread.start()
    progress.copied(range(2, 3))
    progress.copied(range(1))
    threads[0].join(20.0)
    assert read == [0]
    progress.copied(range(1, 2))
    for thread in threads:
        thread.join(20.0)
    assert sorted(read) == [0, 1, 2]


class MeetingPool(PagedLayers):
    """A pool in which two threads are at work before either has copied. An `error` is raised by the side thread."""

    both: threading.Barrier
    error: Exception | None = None

    def scatter(self, copies: PageCopies, layers: range) -> None:
        if layers.start < 2:
            self.both.wait(20.0)
        if self.error is not None and threading.current_thread().name == NAME:
            raise self.error
        super().scatter(copies, layers)


@pytest.mark.parametrize("error", [None, IndexError("a layer is gone")])
def test_two_threads_load_many_bytes(error: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    page = SHARED_BYTES // 4
    blocks = np.random.default_rng(1).integers(0, 256, (2, 4 * page), np.uint8)
    memory = np.zeros((4, 3, page), np.uint8)
    pool = MeetingPool(list(memory))
    pool.both, pool.error = threading.Barrier(2), error
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    side_thread._queue.cache_clear()
    load = pool.load([(HeldBlocks(list(blocks), True), [2, 1])], pool.now())
    if error is None:
        load.finish()
        load.wait(3)
        assert np.array_equal(memory[:, [2, 1]], blocks.reshape(2, 4, page).swapaxes(0, 1)) and not memory[:, 0].any()
    else:
        with pytest.raises(IndexError, match="a layer is gone"):
            load.finish()
    side_thread._queue.cache_clear()


def test_no_byte_outside_a_pool_or_a_block_is_touched() -> None:
    pool = PagedLayers(list(np.zeros((2, 4, 16), np.uint8)))
    for place in (-1, 4):
        with pytest.raises(IndexError, match="pool blocks"):
            pool.gather(place, np.empty(32, np.uint8))
    for wrong in (np.empty(31, np.uint8), np.empty(64, np.uint8)[::2]):
        with pytest.raises(ValueError, match="32 bytes"):
            pool.copies([wrong], [1])
    with pytest.raises(ValueError, match="apart"):
        PagedLayers([np.zeros((4, 32), np.uint8)[:, ::2]])


@pytest.mark.parametrize("shapes", [[], [(4, 8), (4, 9)], [(4, 8, 2)]])
def test_layers_of_different_shapes_are_refused(shapes: list[tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="layers of one shape"):
        PagedLayers([np.zeros(shape, np.uint8) for shape in shapes])
