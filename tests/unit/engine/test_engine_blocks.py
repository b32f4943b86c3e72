"""Corners of the block space that random walks seldom reach, and the figures of compaction."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore_engine.blocks.block_table import BlockTable
from kvstore_engine.blocks.compaction import Compactor
from kvstore_engine.blocks.host_pool import HostPool, swap_in, swap_out
from kvstore_engine.blocks.space import BlockSpace
from kvstore_engine.blocks.transfers import TransferCosts, count_runs
from kvstore_engine.pool import PoolExhausted
from tests.reference.block_invariants import check_blocks
from tests.reference.twin_compute import twin_pool

_A, _B, _C = ([letter] * 16 for letter in (1, 2, 3))


def _space(blocks: int) -> BlockSpace:
    return BlockSpace(twin_pool(blocks))


def _claim(space: BlockSpace, tokens: list[int], *, filled: int | None = None, tenant: str = "") -> BlockTable:
    """A block_table whose blocks are computed, each plane full of `filled`."""
    array = np.array(tokens, np.int32)
    block_table = space.claim(tenant, array)
    if filled is not None:
        new = [block for block, node in zip(block_table.blocks, block_table.nodes, strict=False) if not node.ready]
        space.pool.planes[:, [*new, *block_table.blocks[len(block_table.nodes) :]]] = filled
        space.seal(block_table, array, 0, len(tokens))
    return block_table


def test_a_used_block_is_never_given_up_and_the_least_recently_used_goes_first() -> None:
    space = _space(4)
    for tokens in (_A, _B, _C):
        space.release(_claim(space, tokens, filled=1))
    again = _claim(space, _A, filled=1)
    last = space.claim("", np.array([4] * 32, np.int32))  # the free block and _B's, the oldest unused
    assert space.statistics().evicted == 1
    assert space.price("", np.array(_C, np.int32)) == 1 and len(space.trie.match("", [bytes(64)])) == 0
    assert [node.users for node in space.trie.match("", space.keys(np.array(_B, np.int32)))] == []
    with pytest.raises(PoolExhausted):
        space.claim("", np.array([5] * 48, np.int32))
    check_blocks(space, [again, last])


def test_a_sequence_that_generates_what_another_waits_for_gives_it() -> None:
    space = _space(8)
    first = _claim(space, [9] * 20, filled=7)
    waiting = space.claim("", np.array([9] * 32 + [1], np.int32))
    assert space.ready_tokens(waiting, 0) == 16
    space.seal(first, np.array([9] * 32, np.int32), 20, 32)
    assert space.ready_tokens(waiting, 0) == 32
    assert (space.pool.planes[:, waiting.blocks[1]] == 7).all()
    assert first.blocks[1] == waiting.blocks[1]
    check_blocks(space, [first, waiting])


def test_a_swapped_sequence_gets_its_own_bits_back_although_others_computed_them_anew() -> None:
    space = _space(4)
    host = HostPool(space.pool, 4 * space.pool.payload_bytes(1))
    block_table = _claim(space, _A + _B + [1], filled=3)
    swapped = swap_out(space, host, block_table, 33, 33)
    space.release(_claim(space, _C * 4, filled=8))  # all that was cached is given up
    other = _claim(space, [*_A, 5], filled=4)
    tokens = np.array(_A + _B + [1, 2], np.int32)
    with pytest.raises(PoolExhausted):
        swap_in(space, host, swapped, tokens)
    assert host.used_blocks == 3
    space.release(other)
    back, copied = swap_in(space, host, swapped, tokens)
    assert copied == 3 and (space.pool.planes[:, back.blocks] == 3).all()
    assert host.used_blocks == 0
    check_blocks(space, [back])


def test_a_block_that_stayed_is_not_copied() -> None:
    space = _space(8)
    host = HostPool(space.pool, 8 * space.pool.payload_bytes(1))
    block_table = _claim(space, _A + _B + [1], filled=3)
    swapped = swap_out(space, host, block_table, 33, 33)
    back, copied = swap_in(space, host, swapped, np.array(_A + _B + [1], np.int32))
    assert copied == 1
    check_blocks(space, [back])


def test_host_memory_stays_between_swaps_and_goes_back_when_none_come() -> None:
    """The memory that a sequence has left is the next one's: fresh memory would have to be touched anew."""
    space = _space(64)
    one = space.pool.payload_bytes(1)
    host = HostPool(space.pool, 64 * one)
    assert host.resident_bytes == 0
    places = host.save(list(range(8)))
    resident = host.resident_bytes
    assert resident >= 8 * one
    host.free(places)
    for _ in range(31):
        host.trim_if_unused()
    host.free(host.save([1]))  # a request still needs it
    for _ in range(31):
        host.trim_if_unused()
    assert host.resident_bytes == resident
    host.trim_if_unused()
    assert host.resident_bytes == 0
    places = host.save([1])
    for _ in range(100):
        host.trim_if_unused()
    assert host.resident_bytes > 0  # it holds a request's K/V
    host.free(places)
    host.trim()
    assert host.resident_bytes == 0


def test_sequences_that_grow_side_by_side_share_out_what_is_free() -> None:
    space = _space(1024)
    block_tables = [space.claim("", np.full(16, n, np.int32)) for n in range(8)]
    for count in range(2, 33):
        for block_table in block_tables:
            space.extend(block_table, count * 16)
    pieces = [count_runs(block_table.ids) for block_table in block_tables]
    assert max(pieces) <= 4 and sum(pieces) <= 20, pieces
    check_blocks(space, block_tables)


def _scattered(space: BlockSpace, count: int) -> tuple[BlockTable, list[int]]:
    """A block_table of `count` blocks, every other one of the pool, each full of its number; the others are free."""
    array = np.arange(count * 16, dtype=np.int32) % 50
    gaps = []
    block_table = space.claim("", array[:16])
    for index in range(1, count):
        gaps += space.allocate(1, int(block_table.ids[-1]))
        space.extend(block_table, (index + 1) * 16)
    for index, block in enumerate(block_table.blocks):
        space.pool.planes[:, block] = index
    space.references.release(gaps)
    return block_table, gaps


def test_compaction_moves_only_what_pays_and_keeps_every_byte() -> None:
    space, costs = _space(64), TransferCosts()
    block_table, _ = _scattered(space, 16)
    assert count_runs(block_table.ids) == 16
    compactor = Compactor(space, costs)
    assert compactor.compact(block_table, 0.0).moved_blocks == 0
    done = compactor.compact(block_table, 1e6)
    assert done.runs_before == 16 and done.runs_after == 1 and done.gain_s > 0
    for index, block in enumerate(block_table.blocks):
        assert (space.pool.planes[:, block] == index).all()
    check_blocks(space, [block_table])


def test_a_compaction_that_cannot_pay_does_not_look_for_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compaction is asked every few steps, and would else cost more than it ever saves."""
    space, costs = _space(64), TransferCosts()
    block_table, _ = _scattered(space, 16)
    even = costs.move_s(16 * space.pool.payload_bytes(1), 17) / (15 * costs.run_s)  # transfers that pay for a move

    def fail(blocks: list[int]) -> None:
        raise AssertionError("it looked for places")

    monkeypatch.setattr("kvstore_engine.blocks.compaction.split_runs", fail)
    for transfers in (0.0, 0.1 * even, 0.4 * even):
        assert Compactor(space, costs).compact(block_table, transfers).moved_blocks == 0
    with pytest.raises(AssertionError, match="looked"):
        Compactor(space, costs).compact(block_table, 2 * even)


def test_compaction_follows_costs_that_change() -> None:
    """The shortest way to decline is by costs as they were; not for long."""
    space, costs = _space(64), TransferCosts()
    block_table, _ = _scattered(space, 16)
    compactor, nbytes = Compactor(space, costs), 16 * space.pool.payload_bytes(1)
    for runs in (1, 16) * 200:
        costs.observe(nbytes, runs, 0.001)  # pieces cost nothing
    assert not compactor.compact(block_table, 30.0).moved_blocks
    for runs in (1, 16) * 200:
        costs.observe(nbytes, runs, 0.001 * runs)
    asked = next((at for at in range(32) if compactor.compact(block_table, 30.0).moved_blocks), None)
    assert asked is not None and asked <= 16 and count_runs(block_table.ids) == 1


def test_compaction_leaves_shared_blocks_where_they_are() -> None:
    space, costs = _space(64), TransferCosts()
    block_table, _ = _scattered(space, 6)
    child = space.fork(block_table)
    assert Compactor(space, costs).compact(block_table, 1e6).moved_blocks == 0
    space.release(child)
    assert Compactor(space, costs).compact(block_table, 1e6).runs_after == 1
    check_blocks(space, [block_table])


def test_the_cost_of_a_move_is_learnt_from_moves_and_forgotten_with_time() -> None:
    costs, nbytes = TransferCosts(), 8 << 20
    for _ in range(50):
        costs.observe(nbytes, 3, 0.001)
    as_expected, transfer_s = costs.move_s(nbytes, 3), costs.copy_s(nbytes, 3)
    assert as_expected == pytest.approx(4 * transfer_s, rel=0.01)
    for _ in range(8):
        costs.observe_move(nbytes, 3, 0.006)
    assert costs.move_s(nbytes, 3) == pytest.approx(0.006, rel=0.05)
    costs.observe_move(nbytes, 3, 60.0)  # interrupted
    assert costs.move_s(nbytes, 3) <= 0.02
    for _ in range(5000):
        costs.observe(nbytes, 3, 0.001)
    assert costs.move_s(nbytes, 3) == pytest.approx(as_expected, rel=0.1)


def test_the_cost_of_a_piece_is_learnt_from_transfers() -> None:
    costs = TransferCosts()
    randoms = np.random.default_rng(1)
    for _ in range(400):
        nbytes, runs = int(randoms.integers(1, 64) << 20), int(randoms.integers(1, 300))
        costs.observe(nbytes, runs, 1e-5 + nbytes / 4e9 + runs * 2e-5)
    assert costs.run_s == pytest.approx(2e-5, rel=0.2)
    assert costs.copy_s(32 << 20, 1) == pytest.approx((32 << 20) / 4e9, rel=0.2)
