"""The table of bulk keys finds what is in it and nothing else, however alike keys are, for every owner."""

from __future__ import annotations

import random
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_cuda import host_copies
from kvstore_proto.arena import BlockHeader
from kvstore_proto.identity import NO_PARENT
from kvstore_tiers.base import Slot
from kvstore_tiers.key_table import KeyTable
from kvstore_tiers.recovered import as_columns, as_words
from kvstored.store.blocks import Residency, RowKind
from kvstored.store.blocks.adoption import adopt
from kvstored.store.blocks.check import check
from kvstored.store.blocks.keys import BulkKeys
from kvstored.store.blocks.rows import RowColumns

NVME = 1
ALIKE = st.builds(  # few first words, fewer low halves of them
    lambda low, high, rest: (low + (high << 32)).to_bytes(8, "little") + rest.to_bytes(8, "little"),
    st.integers(0, 2), st.integers(0, 3), st.integers(0, 20),
)  # fmt: skip


@given(st.sets(ALIKE), st.lists(ALIKE), st.randoms(use_true_random=False))
def test_each_key_is_found_where_it_is(keys: set[bytes], others: list[bytes], order: random.Random) -> None:
    there = sorted(keys)
    order.shuffle(there)
    column = as_words(b"".join(there))
    chosen = np.array([position for position in range(len(there)) if order.random() < 0.7], np.int64)
    wanted = there + others
    for members in (None, chosen):
        expected = range(len(there)) if members is None else members.tolist()
        places = {there[position]: position for position in expected}
        table = KeyTable(column, members)
        found = table.find_each(column, as_words(b"".join(wanted)))
        assert found.tolist() == [places.get(key, -1) for key in wanted]
        none = table.find_each(column, as_words(b"".join(wanted)), lambda positions: positions < 0)
        assert set(none.tolist()) <= {-1}


@pytest.mark.parametrize("seed", range(5))
def test_blocks_of_several_tenants_in_any_order(seed: int) -> None:
    """Adopted in two parts, chains broken anywhere between them; the same keys under each tenant are other blocks."""
    order = random.Random(seed)
    residency = Residency(("host", "nvme"))
    tenants = [residency.tenant(name) for name in ("one", "two", "three")]
    keys = {(t, chain, depth): order.randbytes(16) for t in tenants for chain in range(5) for depth in range(6)}
    blocks = list(keys)
    order.shuffle(blocks)
    for part, container in ((blocks[:40], 1), (blocks[40:], 2)):
        listed = [
            (
                Slot(container, 8192 * at, 8192, 5),
                BlockHeader(
                    keys[tenant, chain, depth], keys[tenant, chain, depth - 1] if depth else NO_PARENT, bytes(32),
                    bytes([tenant]) * 16, 4096, depth=depth,
                ),
            )
            for at, (tenant, chain, depth) in enumerate(part)
        ]  # fmt: skip
        columns = as_columns(listed)
        kinds = [RowKind(origin.tenant[0], 7, 0) for origin in columns.origins]
        for at in adopt(residency, NVME, columns, kinds, 1):  # on which others hang already
            header, kind = listed[at][1], kinds[int(columns.origin[at])]
            row = residency.insert(
                kind.tenant, header.key, header.parent, fingerprint_id=7, group=0, depth=header.depth,
                payload_bytes=4096, now_ns=1,
            )  # fmt: skip
            residency.attach(row, NVME, listed[at][0], 1)
        assert check(residency) == []
    for tenant in tenants:
        for chain in range(5):
            run = [keys[tenant, chain, depth] for depth in range(6)]
            rows = residency.find_run(tenant, b"".join(run))
            assert [residency.key(row) for row in rows] == run
            assert [residency.rows.parent[row] for row in rows] == [-1, *rows[:-1]]
            assert all(residency.find_any(other, run[0]) == -1 for other in tenants if other != tenant)


@given(st.integers(1, 40), st.integers(0, 9), st.randoms(use_true_random=False))
def test_a_run_is_found_by_compiled_code_up_to_the_same_block(count: int, others: int, order: random.Random) -> None:
    """Some rows have woken or are free, some keys have two rows, some blocks are in the dictionary alone."""
    if host_copies.native.wait() is None:
        pytest.skip("no compiled code here")
    keys = [order.randbytes(16) for _ in range(count)]
    rows = RowColumns()
    listed = [*keys, *order.sample(keys, min(others, count))]
    order.shuffle(listed)
    rows.take_bulk(b"".join(listed))
    hot = {order.randbytes(16): 1000 + number for number in range(others)}
    for row, key in enumerate(listed):
        rows.mask[row] = order.random() < 0.95
        if order.random() < 0.05:
            rows.keys[row], hot[key] = key, row
    bulk = BulkKeys(rows, KeyTable(as_words(rows.bulk_keys)))
    asked = [*keys, *hot] * 9
    order.shuffle(asked)
    for first in range(0, len(asked), 7):
        run = asked[first:]
        found = bulk.find_run(run, hot.get)
        with mock.patch.object(host_copies.native, "library", None):
            expected = bulk.find_run(run, hot.get)
        assert len(found) == len(expected)
        named = [(key, row if key in hot else listed[row]) for key, row in zip(run, found, strict=False)]
        assert named == [(key, row if key in hot else listed[row]) for key, row in zip(run, expected, strict=False)]
        assert all(
            key in hot or (rows.mask[row] and rows.keys[row] is None) for key, row in zip(run, found, strict=False)
        )
