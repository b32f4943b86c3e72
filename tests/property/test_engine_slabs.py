"""Slabs of several classes against a plain account of bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_engine.blocks import BlockClass, SlabPool
from kvstore_engine.pool import PoolExhausted

_CLASSES = [BlockClass("full", 2, 3000), BlockClass("window", 6, 1000), BlockClass("small", 1, 100)]
_LIMIT, _SLAB = 200_000, 24_000


@settings(max_examples=80)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from([kind.name for kind in _CLASSES]), st.booleans(), st.integers(0, 40)), max_size=40
    )
)
def test_blocks_of_all_classes_share_one_budget(steps: list[tuple[str, bool, int]]) -> None:
    pool = SlabPool(_CLASSES, _LIMIT, _SLAB)
    sizes = {kind.name: kind.block_bytes for kind in _CLASSES}
    held: dict[str, list[tuple[list[int], int]]] = {name: [] for name in sizes}
    for serial, (name, allocate, count) in enumerate(steps, 1):
        if allocate:
            room = pool.available(name)
            if count > room:
                with pytest.raises(PoolExhausted):
                    pool.allocate(name, count)
                assert pool.available(name) == room
            else:
                blocks = pool.allocate(name, count)
                pool.planes(name)[:, blocks] = serial
                held[name].append((blocks, serial))
        elif held[name]:
            blocks, mark = held[name].pop(count % len(held[name]))
            assert (pool.planes(name)[:, blocks] == mark).all()
            pool.free(name, blocks)
        given_bytes = 0
        for other, groups in held.items():
            taken = [block for blocks, _ in groups for block in blocks]
            assert len(set(taken)) == len(taken) == pool.used(other)
            given_bytes += len(taken) * sizes[other]
            for blocks, mark in groups:
                assert (pool.planes(other)[:, blocks] == mark).all(), "memory was taken from a block in use"
        assert given_bytes <= pool.used_bytes <= _LIMIT


def test_what_one_class_leaves_serves_another() -> None:
    pool = SlabPool(_CLASSES, _LIMIT, _SLAB)
    full = pool.allocate("full", pool.available("full"))
    assert len(full) == 32 and pool.available("window") == 0
    pool.free("full", full[:4])
    assert pool.available("window") == 4, "a slab is empty"
    window = pool.allocate("window", 4)
    assert pool.available("full") == 0
    pool.free("window", window)
    pool.free("full", full[4:])
    pool.trim()
    assert pool.used_bytes == 0


def test_memory_that_was_given_back_is_gone() -> None:
    pool = SlabPool([BlockClass("page", 1, 4096)], 64 * 4096, 16 * 4096)
    blocks = pool.allocate("page", 64)
    pool.planes("page")[:, blocks] = 7
    pool.free("page", blocks)
    pool.trim()
    assert not np.any(pool.planes("page"))


def test_classes_that_make_no_sense_are_refused() -> None:
    for classes in ([BlockClass("a", 0, 1)], [BlockClass("a", 1, 0)], [BlockClass("a", 1, 1)] * 2):
        with pytest.raises(ValueError):
            SlabPool(classes, 100)
    assert SlabPool([BlockClass("a", 1, 1)], 0).available("a") == 0
