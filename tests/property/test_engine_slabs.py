"""Slabs against a plain account of blocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_engine.blocks.host_pool import Slabs
from kvstore_engine.pool import PoolExhausted
from tests.reference.examples import examples

_BLOCK, _LIMIT, _SLAB = 3000, 200_000, 24_000


@settings(max_examples=examples(80))
@given(steps=st.lists(st.tuples(st.sampled_from(["allocate", "free", "trim"]), st.integers(0, 40)), max_size=40))
def test_blocks_keep_their_bytes_and_memory_its_limit(steps: list[tuple[str, int]]) -> None:
    slabs = Slabs(_BLOCK, _LIMIT, _SLAB)
    held: list[tuple[list[int], int]] = []
    for serial, (what, count) in enumerate(steps, 1):
        if what == "trim":
            slabs.trim()
            assert slabs.used or not slabs.backed_bytes
        elif what == "allocate":
            room = slabs.available
            if count > room:
                with pytest.raises(PoolExhausted):
                    slabs.allocate(count)
                assert slabs.available == room
            else:
                blocks = slabs.allocate(count)
                slabs.memory[blocks] = serial % 251
                held.append((blocks, serial % 251))
        elif held:
            slabs.free(held.pop(count % len(held))[0])
        taken = [block for blocks, _ in held for block in blocks]
        assert len(set(taken)) == len(taken) == slabs.used
        for blocks, mark in held:
            assert (slabs.memory[blocks] == mark).all(), "memory was taken from a block in use"
        assert len(taken) * _BLOCK <= slabs.backed_bytes <= _LIMIT


def test_memory_that_was_given_back_is_gone() -> None:
    slabs = Slabs(4096, 64 * 4096, 16 * 4096)
    blocks = slabs.allocate(64)
    slabs.memory[blocks] = 7
    slabs.free(blocks)
    slabs.trim()
    assert not np.any(slabs.memory) and not slabs.backed_bytes


def test_sizes_that_make_no_sense_are_refused() -> None:
    for block_bytes, limit_bytes in ((0, 100), (1, -1)):
        with pytest.raises(ValueError):
            Slabs(block_bytes, limit_bytes)
    assert Slabs(1, 0).available == 0 and Slabs(200, 100).available == 0
