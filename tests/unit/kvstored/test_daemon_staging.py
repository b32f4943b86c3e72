"""Staging memory: its size cannot be changed, and a pool bounds what all clients have of it."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os

import pytest

from kvstore_proto.arena import MAX_TOKENS, TOKEN_COUNT_OFFSET, TOKENS_OFFSET
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


def test_token_ids_are_read_as_far_as_a_header_has_room() -> None:
    staging = StagingMemory(PAGES * PAGE, "tokens")
    counts = {3: 4, 1: 0, 7: MAX_TOKENS + 5, 2: 4}  # by page
    with mmap.mmap(staging.fd, staging.size_bytes) as client:
        client[:] = bytes(range(256)) * (staging.size_bytes // 256)
        for page, count in counts.items():
            client[page * PAGE : page * PAGE + 4] = bytes([page]) * 4
            at = page * PAGE + TOKEN_COUNT_OFFSET
            client[at : at + 4] = count.to_bytes(4, "little")
        ids = [client[page * PAGE + TOKENS_OFFSET :][: 4 * min(counts[page], MAX_TOKENS)] for page in counts]
    assert staging.tokens_of([page * PAGE for page in counts]) == ids
    addresses, _ = staging.payloads_at([3 * PAGE, PAGE])
    assert addresses[0] - addresses[1] == 2 * PAGE
    assert ctypes.string_at(addresses[1] - PAGE, 4) == b"\1\1\1\1", "the payload follows the header"
