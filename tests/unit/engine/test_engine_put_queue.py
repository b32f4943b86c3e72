"""The queue of puts: one at a time, with the hints between them."""

from collections.abc import Callable

import numpy as np
import pytest

from kvstore_engine.restore.put_queue import PutQueue, QueuedHint, QueuedPut
from tests.reference.memory_session import Bytes, MemorySession

ENGINE_TOKENS, BLOCK_TOKENS, BYTES_PER_TOKEN = 16, 64, 4
BLOCK_BYTES = BLOCK_TOKENS * BYTES_PER_TOKEN


class PlainPool:
    """Engine blocks as rows of bytes: what the real pool does, without layers."""

    def __init__(self, blocks: int = 64) -> None:
        self.rows = np.zeros((blocks, ENGINE_TOKENS * BYTES_PER_TOKEN), np.uint8)

    def payload(self, table: list[int]) -> Callable[[Bytes], None]:
        def write(dest: Bytes) -> None:
            dest[:] = self.rows[table].reshape(-1)

        return write


@pytest.fixture
def session() -> MemorySession:
    return MemorySession(BLOCK_BYTES)


def _tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, count).astype(np.int32)


def test_one_put_is_handed_over_at_a_time_with_the_hints_around_it(session: MemorySession) -> None:
    queue = PutQueue(PlainPool())
    for block in range(3):
        tokens = _tokens(64 * (block + 1))
        queue.hint(QueuedHint(session, tokens, answer_tokens=block + 1))
        queue.offer(QueuedPut(session, tokens, block, [[4 * block, 4 * block + 1, 4 * block + 2, 4 * block + 3]]))
    assert (queue.outstanding, session.puts, session.answer_hints) == (3, [], [])
    queue.settle(60.0)
    assert (session.puts, session.answer_hints) == ([(0, 1)], [(0, 1), (1, 2)]), "a hint after a put needs no turn"
    queue.settle(60.0)
    assert (session.puts, [tokens for _, tokens in session.answer_hints]) == ([(0, 1), (1, 1)], [1, 2, 3])
    assert (len(queue.finished()), queue.outstanding) == (2, 1)
    (rest,) = queue.close()
    assert (rest.first_block, rest.reason[:8]) == (2, "given up")
    assert queue.outstanding == 0


def test_hints_take_no_place_of_puts(session: MemorySession) -> None:
    queue, tokens = PutQueue(PlainPool()), _tokens(64)
    for _ in range(300):
        queue.hint(QueuedHint(session, tokens, due_in_s=3.0))
    assert not queue.is_full and queue.outstanding == 0
    for answer in range(300):
        queue.hint(QueuedHint(session, tokens, answer_tokens=1 + answer))
    queue.settle(60.0, everything=True)
    assert queue.close() == []
    assert (len(session.due), len(session.answer_hints)) == (64, 256 - 64)
