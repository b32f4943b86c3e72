"""Staging memory: its size cannot be changed, and a pool bounds what all clients have of it."""

from __future__ import annotations

import fcntl
import mmap
import os

import pytest

from kvstored.clients.staging import StagingMemory, StagingPool

PAGE = 4096
PAGES = 16


def test_it_cannot_be_resized_and_writes_are_seen() -> None:
    staging = StagingMemory(PAGES * PAGE, "seal")
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
