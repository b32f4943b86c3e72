"""Blocks taken over in bulk behave as blocks that came one by one."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator
from itertools import count
from queue import SimpleQueue
from types import SimpleNamespace
from typing import cast
from unittest import mock
from weakref import finalize

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_cuda import host_copies
from kvstore_proto.arena import BlockHeader
from kvstore_proto.identity import NO_PARENT
from kvstore_tiers.base import Slot, Tier
from kvstore_tiers.recovered import RecoveredBlocks, as_columns
from kvstored.clients.tenants import TenantDirectory
from kvstored.clock import ManualClock
from kvstored.lifecycle import Cause
from kvstored.lifetime import recovery
from kvstored.store.blocks import Residency, RowKind
from kvstored.store.blocks.adoption import adopt
from kvstored.store.blocks.check import check
from kvstored.store.blocks.removal import TakenCopy
from kvstored.store.policies import create
from kvstored.store.policies.lru import Lru

HOST, NVME = 0, 1
CHAIN = 12
_containers = count(1)


def key_of(number: int) -> bytes:
    return np.random.default_rng(number).bytes(16)


def chains(*lengths: int) -> Iterator[tuple[int, int | None, int]]:
    """(number, parent, depth) of each block of some chains."""
    for chain, length in enumerate(lengths):
        for depth in range(length):
            number = chain * 1000 + depth
            yield number, number - 1 if depth else None, depth


def columns(blocks: list[tuple[int, int | None, int]], tenant: int = 0) -> RecoveredBlocks:
    container = next(_containers)
    return as_columns(
        (
            Slot(container, 8192 * position, 8192, 5),
            BlockHeader(
                key_of(number), NO_PARENT if parent is None else key_of(parent), bytes(32), bytes([tenant]) * 16,
                4096, depth=depth,
            ),
        )
        for position, (number, parent, depth) in enumerate(blocks)
    )  # fmt: skip


def tell_thread(told: SimpleQueue[str]) -> None:
    told.put(threading.current_thread().name)


def test_a_thread_gives_the_memory_of_many_back_and_no_block_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_MANY", 3)
    tenants = cast("TenantDirectory", SimpleNamespace(fingerprint_number=lambda _: 1))
    for lengths, gives_back in (((2,), threading.current_thread().name), ((4, 3), "let-go")):
        found, gone = columns(list(chains(*lengths))), SimpleQueue[str]()
        finalize(found.key, tell_thread, gone)
        nvme = cast("Tier", SimpleNamespace(recover_columns=[found].pop))
        del found
        residency = Residency(("host", "nvme"), ghost_keys=100)
        residency.durable = NVME
        assert recovery.recover_blocks(nvme, residency, tenants, ManualClock()) == sum(lengths)
        assert gone.get(timeout=60) == gives_back
        assert all(residency.find(0, key_of(number)) >= 0 for number, _, _ in chains(*lengths))
        check(residency)


def adopted(blocks: list[tuple[int, int | None, int]], ghost_keys: int = 100) -> Residency:
    residency = Residency(("host", "nvme"), ghost_keys=ghost_keys)
    residency.tenant("one")
    assert adopt(residency, NVME, columns(blocks), [RowKind(0, 7, 0)], 1) == []
    return residency


def one_by_one(blocks: list[tuple[int, int | None, int]]) -> Residency:
    residency = Residency(("host", "nvme"))
    residency.tenant("one")
    found = columns(blocks)
    for position, (number, parent, depth) in enumerate(blocks):
        above = NO_PARENT if parent is None else key_of(parent)
        row = residency.insert(
            0, key_of(number), above, fingerprint_id=7, group=0, depth=depth, payload_bytes=4096, now_ns=1
        )
        residency.attach(row, NVME, found.slot_of(position), 1)
    return residency


def keys_of(chain: int, length: int) -> bytes:
    return b"".join(key_of(chain * 1000 + depth) for depth in range(length))


def test_a_chain_is_found_whole_and_by_its_key_alone() -> None:
    residency = adopted(list(chains(CHAIN, 3)))
    assert len(residency.find_run(0, keys_of(0, CHAIN) + key_of(77))) == CHAIN
    assert residency.find_each(0, key_of(77) + key_of(1002)) == [-1, residency.find(0, key_of(1002))]
    assert residency.find(0, key_of(1003)) == residency.find_any(0, key_of(77)) == -1
    assert (len(residency), residency.tenant_blocks(0), residency.tier_blocks(NVME)) == (CHAIN + 3,) * 3
    assert check(residency) == []


def test_another_tenant_does_not_find_them() -> None:
    residency = adopted(list(chains(3)))
    other = residency.tenant("two")
    assert residency.find(other, key_of(0)) == residency.find_any(other, key_of(0)) == -1
    assert adopt(residency, NVME, columns(list(chains(2)), tenant=1), [RowKind(other, 7, 0)], 1) == []
    rows = residency.find_run(other, keys_of(0, 3))
    assert len(rows) == 2 and {residency.tenant_of(row) for row in rows} == {other}
    assert len(residency.find_run(0, keys_of(0, 3))) == 3
    assert check(residency) == []


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.randoms())
@pytest.mark.parametrize("policy", ["lru", "lfu-ttl"])
def test_eviction_takes_them_in_the_same_order_as_one_by_one(policy: str, lengths: list[int], random: object) -> None:
    blocks = list(chains(*lengths))
    random.shuffle(blocks)  # type: ignore[attr-defined]
    orders: list[list[bytes]] = []
    for residency in (adopted(blocks), one_by_one(blocks)):
        chosen = create(policy, residency, NVME)
        assert len(chosen) == len(blocks)
        evicted: list[bytes] = []
        while (row := chosen.next_victim(2)) >= 0:
            evicted.append(residency.key(row))
            (taken,) = residency.remove(row, Cause.EVICTED, 2)
            assert taken == TakenCopy(NVME, taken.slot)
            assert check(residency) == []
        assert (residency.rows.live, len(residency), residency.tenant_bytes(0, NVME)) == (0, 0, 0)
        orders.append(evicted)
    depths = {key_of(number): depth for number, _, depth in blocks}
    assert [depths[key] for key in orders[0]] == [depths[key] for key in orders[1]]
    assert sorted(orders[0]) == sorted(orders[1])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.randoms(), st.integers(0, 2**32))
def test_compiled_code_keeps_the_same_books(lengths: list[int], random: object, used: int) -> None:
    """And where stamps are too large for it."""
    if host_copies.native.wait() is None:
        pytest.skip("no compiled code here")
    blocks = list(chains(*lengths))
    random.shuffle(blocks)  # type: ignore[attr-defined]
    books: list[list[object]] = []
    for library in (host_copies.native.library, None):
        with mock.patch.object(host_copies.native, "library", library):
            residency = adopted(blocks)
            policy = Lru(residency, NVME)
            policy.accesses = used
            policy.adopt(np.array([*range(1, len(blocks)), 0]))
        rows, copies, links = residency.rows, residency.copies[NVME], policy.queues.links
        books.append([rows.parent, rows.links, copies.kids, policy.stamp, policy.where, links.before, links.after])
        assert [*policy.queues.of[0]] == [*range(1, len(blocks)), 0]
    assert books[0] == books[1]
    parents = [int(row) for row in books[0][0] if row >= 0]  # type: ignore[attr-defined]
    assert [*rows.links][: len(blocks)] == [parents.count(row) for row in range(len(blocks))]


def test_what_leaves_dram_again_is_a_bulk_row_as_before() -> None:
    residency = adopted(list(chains(3)))
    row = residency.find(0, key_of(2))
    residency.attach(row, HOST, Slot(1 << 20, 0, 8192, 1), 2, filling=True)
    assert residency.find(0, key_of(2)) == row and residency.tenants[0].bulk_blocks == 2
    residency.publish(row, HOST, 2)
    assert residency.tier_mask(row) == 0b11
    residency.detach(row, HOST)
    assert residency.tenants[0].bulk_blocks == 3 and not residency.tenants[0].readable
    assert residency.find(0, key_of(2)) == row and residency.key(row) == key_of(2)
    assert check(residency) == []


def test_tokens_hold_across_waking_and_end_with_the_block() -> None:
    residency = adopted(list(chains(2)))
    row = residency.find(0, key_of(1))
    token = residency.token(row)
    residency.attach(row, HOST, Slot(1 << 20, 0, 8192, 1), 2)
    assert residency.current(token) == row
    residency.remove(row, Cause.DROPPED, 2)
    assert residency.current(token) == -1
    assert residency.why_missing(0, key_of(1)).cause is Cause.DROPPED
    with pytest.raises(RuntimeError, match="removed twice"):
        residency.remove(row, Cause.DROPPED, 2)


def test_a_missing_parent_is_a_placeholder_until_it_is_stored() -> None:
    residency = adopted([(2, 1, 2), (3, 2, 3)])
    assert residency.find(0, key_of(1)) == -1
    above = residency.find_any(0, key_of(1))
    assert residency.children(above) == 1 and residency.depth(above) == 1
    row = residency.insert(0, key_of(1), NO_PARENT, fingerprint_id=7, group=0, depth=1, payload_bytes=4096, now_ns=3)
    residency.attach(row, NVME, Slot(1 << 20, 0, 8192, 1), 3)
    assert row == above and len(residency.find_run(0, key_of(1) + key_of(2) + key_of(3))) == 3
    assert check(residency) == []


def test_new_blocks_hang_on_adopted_ones() -> None:
    residency = adopted(list(chains(3)))
    row = residency.insert(0, key_of(3), key_of(2), fingerprint_id=7, group=0, depth=3, payload_bytes=4096, now_ns=3)
    residency.attach(row, HOST, Slot(1 << 20, 0, 8192, 1), 3)
    parent = residency.find(0, key_of(2))
    assert residency.parent(row) == parent and not residency.is_evictable(parent, NVME)
    assert len(residency.find_run(0, keys_of(0, 4))) == 4
    assert check(residency) == []


def test_cycles_and_keys_that_are_there_already_are_left_out() -> None:
    residency = adopted(list(chains(2)))
    circle = [(10, 12, 4), (11, 10, 5), (12, 11, 6), (13, 13, 1), (0, None, 0), (14, 1, 2)]
    assert adopt(residency, NVME, columns(circle), [RowKind(0, 7, 0)], 1) == [0, 3, 4]
    assert len(residency.find_run(0, keys_of(0, 2) + key_of(14))) == 3
    assert check(residency) == []


def test_access_counts_come_back_from_the_ghost() -> None:
    residency = adopted([(1, None, 0)])
    residency.touch_run([residency.find(0, key_of(1))] * 5, 2)
    residency.remove(residency.find(0, key_of(1)), Cause.DROPPED, 2)
    adopt(residency, NVME, columns([(1, None, 0)]), [RowKind(0, 7, 0)], 3)
    assert residency.accesses(residency.find(0, key_of(1))) == 5
    assert check(residency) == []


def test_a_block_that_many_follow_is_adopted_with_all_its_children() -> None:
    """Some of them in a second part, which hangs on the first."""
    heads: list[tuple[int, int | None, int]] = [(0, None, 0), *((number, 0, 1) for number in range(1, 200))]
    residency = adopted(heads)
    later: list[tuple[int, int | None, int]] = [(number, 0, 1) for number in range(200, 400)]
    assert adopt(residency, NVME, columns(later), [RowKind(0, 7, 0)], 1) == []
    top = residency.find(0, key_of(0))
    assert residency.children(top) == residency.children(top, NVME) == 399
    assert not check(residency)


def test_a_block_at_rest_takes_few_bytes_of_the_index() -> None:
    """Columns of zeros take none (test_residency_columns.py)."""
    residency = adopted(list(chains(*[100] * 20)))
    copies, index = residency.copies[NVME], residency.tenants[0].bulk
    assert index is not None
    held: list[object] = [*vars(residency.rows).values(), *vars(copies).values(), index.members.__self__.table]
    sizes = [
        each.itemsize if isinstance(each, array) else 1
        for each in held
        if isinstance(each, array | bytearray) and any(each)
    ]
    assert sum(sizes) + 0.5 * 4 <= 50, "the keys apart"


def test_nothing_to_adopt() -> None:
    residency = Residency(("host", "nvme"))
    assert adopt(residency, NVME, columns([]), [], 1) == []
    assert (residency.rows.live, check(residency)) == (0, [])
