"""Staging memory: extents never overlap, come back whole, and its size is nobody's to change."""

from __future__ import annotations

import fcntl
import mmap
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstored.dataplane.staging import Staging, StagingPool
from tests.reference.examples import examples

PAGE = 4096
PAGES = 16


def free_pages(staging: Staging) -> int:
    """How many single pages can be had, found out by taking them."""
    taken = []
    while (offset := staging.allocate(PAGE)) is not None:
        taken.append(offset)
    for offset in taken:
        staging.free(offset, PAGE)
    return len(taken)


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, PAGES), st.integers(0, 1 << 16)), max_size=60))
def test_extents_never_overlap_and_coalesce(steps: list[tuple[bool, int, int]]) -> None:
    staging = Staging(PAGES * PAGE, "property")
    out: dict[int, int] = {}
    for takes, pages, choice in steps:
        if takes or not out:
            offset = staging.allocate(pages * PAGE)
            holes = [page for page in range(PAGES) if not any(o <= page * PAGE < o + n for o, n in out.items())]
            longest = run = 0
            for page in range(PAGES):
                run = run + 1 if page in holes else 0
                longest = max(longest, run)
            assert (offset is None) == (longest < pages), "a hole that is large enough is found, no other"
            if offset is not None:
                assert all(offset + pages * PAGE <= o or o + n <= offset for o, n in out.items())
                out[offset] = pages * PAGE
        else:
            offset = sorted(out)[choice % len(out)]
            staging.free(offset, out.pop(offset))
        assert staging.used_bytes == sum(out.values())
    for offset, nbytes in out.items():
        staging.free(offset, nbytes)
    assert staging.allocate(PAGES * PAGE) == 0, "everything given back is one extent again"
    staging.forget_fd()


def test_a_double_free_is_a_broken_invariant() -> None:
    staging = Staging(PAGES * PAGE, "double")
    offset = staging.allocate(PAGE)
    assert offset is not None
    staging.free(offset, PAGE)
    with pytest.raises(RuntimeError, match="freed twice"):
        staging.free(offset, PAGE)


def test_nobody_can_resize_it_and_writes_are_seen() -> None:
    staging = Staging(PAGES * PAGE, "seal")
    for size in (0, PAGE, 2 * PAGES * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(staging.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(staging.fd, 1033, 0)  # F_ADD_SEALS: sealed against further sealing
    with mmap.mmap(staging.fd, staging.size_bytes) as client:
        client[5] = 77
        assert staging.view[5] == 77
    assert not staging.view.flags.writeable
    staging.forget_fd()
    staging.forget_fd()
    assert staging.fd == -1 and staging.view[5] == 77


def test_a_pool_gives_no_more_than_it_has() -> None:
    pool = StagingPool(10 * PAGE, per_client_bytes=4 * PAGE)
    assert pool.take(100 * PAGE) == 4 * PAGE
    assert pool.take(3 * PAGE + 5) == 3 * PAGE
    assert pool.take(4 * PAGE) == 3 * PAGE
    assert pool.take(PAGE) == 0
    pool.give_back(3 * PAGE)
    assert pool.take(PAGE) == PAGE
    assert pool.take(0) == 0
