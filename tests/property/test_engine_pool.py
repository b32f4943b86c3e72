"""The block pool against a set of free ids, and its copies against plain numpy."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_engine.kernels import select_kernels
from kvstore_engine.model.config import ModelConfig
from kvstore_engine.model.rope import RopeConfig
from kvstore_engine.pool import BlockPool, PoolExhausted
from tests.reference.examples import examples

_ROPE = RopeConfig(16, 10000.0, 1.0, 512, 0.0, 1.0, 32.0, 1.0)
_CONFIG = ModelConfig("tiny", "llama", 2, 32, 64, 2, 1, 16, 1e-5, 512, 32, True, _ROPE)


@settings(deadline=None, max_examples=examples(60))
@given(steps=st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=40))
def test_blocks_are_given_once_and_come_back(steps: list[tuple[bool, int]]) -> None:
    pool = BlockPool(_CONFIG, 24, block_tokens=8, kernels=select_kernels("reference"))
    held: list[list[int]] = []
    for allocate, count in steps:
        free = 24 - sum(map(len, held))
        assert pool.free_blocks == free
        if not allocate and held:
            pool.free(held.pop(count % len(held)))
        elif count > free:
            with pytest.raises(PoolExhausted):
                pool.allocate(count)
        else:
            ids = pool.allocate(count)
            taken = {block for run in held for block in run}
            assert len(set(ids)) == count and taken.isdisjoint(ids) and all(0 <= i < 24 for i in ids)
            held.append(ids)


def test_runs_are_preferred_and_the_smallest_that_fits() -> None:
    pool = BlockPool(_CONFIG, 16, block_tokens=8, kernels=select_kernels("reference"))
    everything = pool.allocate(16)
    pool.free([everything[i] for i in (1, 2, 3, 5, 6, 8, 9, 10, 11, 12)])
    assert pool.allocate(2) == [5, 6]
    assert pool.allocate(4) == [8, 9, 10, 11]
    assert pool.allocate(4) == [1, 2, 3, 12]  # no run of 4 is left: the largest first


def test_freeing_twice_or_out_of_range_is_a_broken_invariant() -> None:
    pool = BlockPool(_CONFIG, 4, block_tokens=8, kernels=select_kernels("reference"))
    ids = pool.allocate(2)
    for wrong in ([ids[0], ids[0]], [3], [-1], [4]):
        with pytest.raises(RuntimeError):
            pool.free(wrong)
    pool.free(ids)
    assert pool.free_blocks == 4


@pytest.mark.parametrize("kernels", ["cpp", "reference"])
@settings(deadline=None, max_examples=examples(25))
@given(data=st.data())
def test_payloads_are_layer_major_and_survive_the_way_through_the_pool(kernels: str, data: st.DataObject) -> None:
    layers, per_payload = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    count, threads = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    config = replace(_CONFIG, layers=layers)
    pool = BlockPool(config, 16, block_tokens=8, kernels=select_kernels(kernels))
    ids = data.draw(st.permutations(range(16)))[: count * per_payload]
    tables = [ids[i * per_payload : (i + 1) * per_payload] for i in range(count)]
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    sources = [random.integers(0, 256, pool.payload_bytes(per_payload), np.uint8) for _ in range(count)]
    before = pool.planes.copy()
    pool.scatter_blocks(sources, tables, threads=threads)
    for source, table in zip(sources, tables, strict=True):
        planes = source.reshape(2 * layers, per_payload, pool.block_bytes)
        np.testing.assert_array_equal(pool.planes[:, table], planes)
        gathered = np.zeros_like(source)
        pool.gather_block(table, gathered)
        np.testing.assert_array_equal(gathered, source)
    untouched = sorted(set(range(16)) - set(ids))
    np.testing.assert_array_equal(pool.planes[:, untouched], before[:, untouched])


def test_wrong_copies_are_refused_before_memory_is_touched() -> None:
    pool = BlockPool(_CONFIG, 4, block_tokens=8)
    right = np.zeros(pool.payload_bytes(2), np.uint8)
    for payload, table in (
        (right[:-1], [0, 1]),
        (right, [0, 4]),
        (right, [-1, 0]),
        (right.reshape(2, -1)[:, ::2], [0]),
    ):
        with pytest.raises(ValueError):
            pool.scatter_block(payload, table)
    right.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        pool.gather_block([0, 1], right)


@pytest.mark.parametrize("kernels", ["cpp", "reference"])
@settings(deadline=None, max_examples=examples(40))
@given(data=st.data())
def test_moved_blocks_are_where_they_were_sent_and_no_other_changes(kernels: str, data: st.DataObject) -> None:
    planes_count, blocks = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 24))
    block_bytes, threads = data.draw(st.integers(1, 200)), data.draw(st.integers(1, 3))
    spare = data.draw(st.integers(0, 64))  # planes need not be contiguous
    random = np.random.default_rng(data.draw(st.integers(0, 9)))
    memory = random.integers(0, 256, (planes_count, blocks * block_bytes + spare), np.uint8)
    planes = np.lib.stride_tricks.as_strided(
        memory, (planes_count, blocks, block_bytes), (memory.strides[0], block_bytes, 1)
    )
    start, count = data.draw(st.integers(0, blocks // 2)), data.draw(st.integers(0, blocks // 2))
    ids = data.draw(st.one_of(st.permutations(range(blocks)), st.just(list(np.roll(range(blocks), -start)))))
    sources, targets = (np.array(part, np.int32) for part in (ids[:count], ids[len(ids) - count :]))
    expected = planes.copy()
    expected[:, targets] = expected[:, sources]
    rest = memory[:, blocks * block_bytes :].copy()
    select_kernels(kernels).move_blocks(planes, sources, targets, threads=threads)
    np.testing.assert_array_equal(planes, expected)
    np.testing.assert_array_equal(memory[:, blocks * block_bytes :], rest)
