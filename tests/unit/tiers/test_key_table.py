"""Tables of keys by compiled code and by NumPy: place by place the same, and the same positions found."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_cuda import host_copies
from kvstore_tiers.key_table import Column, KeyTable

FIRST = 70_000
few_words = st.integers(0, 3) | st.integers(0, 2**64 - 1)
keys_of_two_words = st.lists(st.tuples(few_words, few_words), max_size=60)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    if host_copies.native.wait() is None:
        pytest.skip("no compiled code here")


@contextmanager
def by_numpy() -> Iterator[None]:
    with mock.patch.object(host_copies.native, "library", None):
        yield


def column(keys: list[tuple[int, int]]) -> Column:
    return np.array(keys, "<u8").reshape(-1, 2)


def both(make: Callable[[], KeyTable], multiplier: int) -> tuple[KeyTable, KeyTable]:
    with mock.patch.object(secrets, "randbits", lambda _: multiplier):
        native = make()
        with by_numpy():
            return native, make()


def same(one: KeyTable, other: KeyTable) -> bool:
    return (one.table, one.size, one.may_repeat) == (other.table, other.size, other.may_repeat)


@given(keys_of_two_words, st.integers(0, 2**32 - 1), st.sampled_from([0, FIRST]), st.randoms(use_true_random=False))
def test_few_keys_some_of_them_alike(keys: list[tuple[int, int]], multiplier: int, first: int, random: object) -> None:
    held = column(keys)
    members = np.array([at for at in range(len(keys)) if random.random() < 0.6], np.int64)  # type: ignore[attr-defined]
    for chosen in (None, members):
        native, numpy = both(lambda chosen=chosen: KeyTable(held, chosen, first), multiplier)  # type: ignore[misc]
        assert same(native, numpy)
        listed = keys if chosen is None else [keys[at] for at in chosen]
        assert native.may_repeat or len(set(listed)) == len(listed)
        wanted = column([*keys, (5, 5), (0, 0)])
        found = native.find_each(held, wanted)
        with by_numpy():
            assert found.tolist() == numpy.find_each(held, wanted).tolist()
        assert [tuple(key) in listed for key in wanted.tolist()] == (found >= 0).tolist()
        assert all((held[at] == key).all() for at, key in zip(found.tolist(), wanted, strict=True) if at >= 0)


def test_many_keys() -> None:
    """More than one part of the table, and crowds: keys that a tenant chose to be of one home."""
    held = np.random.default_rng(1).integers(0, 2**64, (90_000, 2), dtype=np.uint64)
    held[1000:1900, 0] = 77
    held[2000:2100] = (78, 5 << 32)
    held[2000:2100, 1] += np.arange(100, dtype=np.uint64)
    native, numpy = both(lambda: KeyTable(held), 0x9E3779B1)
    assert same(native, numpy)
    assert native.may_repeat, "too many alike to compare each with each"
    everyone = np.arange(len(held))
    assert (native.find_each(held, held) == everyone).all()
    native, numpy = both(lambda: KeyTable(held, everyone[3000:], FIRST), 0x9E3779B1)
    assert same(native, numpy)
    assert not native.may_repeat
    held[50_000] = held[80_000]
    native, numpy = both(lambda: KeyTable(held, everyone[3000:]), 0x9E3779B1)
    assert same(native, numpy)
    assert native.may_repeat


@pytest.mark.parametrize("count", [*range(1022, 1028), 3000])
def test_a_table_with_many_entries_behind_its_end(count: int) -> None:
    """All keys have the last home: compiled code has no room for more than a thousand, and a search ends there."""
    held = np.zeros((count, 2), np.uint64)
    held[:, 0] = 2**32 - 1
    held[:, 1] = np.arange(count)
    native, numpy = both(lambda: KeyTable(held), 1)
    assert same(native, numpy)
    assert (native.find_each(held, held) == np.arange(count)).all()
    assert native.table[-1] == -1, "else a search would leave the table"
