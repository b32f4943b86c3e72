"""Restoring and storing: the right bytes under the right prefix, and no failure that reaches generation."""

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from kvstore_engine.restore import BlockStore, CostModel, RestoreReport, restore_prefix
from kvstore_engine.restore.putting import Put, PutQueue, Telling
from tests.reference.memory_session import Bytes, MemorySession

ENGINE_TOKENS, BLOCK_TOKENS, BYTES_PER_TOKEN = 16, 64, 4
BLOCK_BYTES = BLOCK_TOKENS * BYTES_PER_TOKEN


class PlainPool:
    """Engine blocks as rows of bytes: what the real pool does, without layers."""

    block_tokens = ENGINE_TOKENS

    def __init__(self, blocks: int = 64) -> None:
        self.rows = np.zeros((blocks, ENGINE_TOKENS * BYTES_PER_TOKEN), np.uint8)

    def fill(self, table: Sequence[int], tokens: np.ndarray) -> None:
        """Write each token's id where its K/V would be."""
        flat = np.zeros(len(table) * ENGINE_TOKENS, np.int32)
        flat[: len(tokens)] = tokens
        self.rows[list(table)] = flat.view(np.uint8).reshape(len(table), -1)

    def read(self, table: Sequence[int], count: int) -> np.ndarray:
        return self.rows[list(table)].reshape(-1).view(np.int32)[:count]

    def gather_block(self, block_ids: Sequence[int], dest: Bytes) -> None:
        dest[:] = self.rows[list(block_ids)].reshape(-1)

    def scatter_blocks(self, sources: Sequence[Bytes], tables: Sequence[Sequence[int]]) -> None:
        for source, table in zip(sources, tables, strict=True):
            self.rows[list(table)] = source.reshape(len(table), -1)


@pytest.fixture
def session() -> MemorySession:
    return MemorySession(BLOCK_BYTES)


@pytest.fixture
def store(session: MemorySession) -> Iterator[tuple[BlockStore, PlainPool]]:
    pool = PlainPool()
    store = BlockStore(session, pool)
    yield store, pool
    store.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "kvengine-store"]


def _tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, count).astype(np.int32)


def _slow_compute() -> CostModel:
    costs = CostModel()
    costs.compute.restore(1, [1.0, 1.0, 0.0])
    return costs


def _restore(
    session: MemorySession, tokens: np.ndarray, pool: PlainPool, table: Sequence[int], costs: CostModel | None = None
) -> RestoreReport:
    return restore_prefix(
        session,
        tokens,
        pool,
        table,
        block_bytes=BLOCK_BYTES,
        step_tokens=512,
        costs=costs or _slow_compute(),
    )


def _store_all(store: BlockStore, pool: PlainPool, tokens: np.ndarray, table: Sequence[int]) -> None:
    pool.fill(table, tokens)
    store.begin(table, 0)
    store.advance(tokens)
    store.finish()


def test_what_was_stored_is_restored_into_other_blocks(
    session: MemorySession, store: tuple[BlockStore, PlainPool]
) -> None:
    tokens, table = _tokens(300), [9, 3, 5, 1, 8, 2, 4, 0, 7, 6, 11, 10, 15, 13, 14, 12, 20, 21, 22]
    _store_all(*store, tokens, table)
    other, new_table = PlainPool(), list(range(40, 59))
    report = _restore(session, tokens, other, new_table)
    assert report.tokens == 256
    assert report.bytes == 4 * BLOCK_BYTES
    assert np.array_equal(other.read(new_table, 256), tokens[:256])
    assert not other.rows[new_table[16:]].any()
    assert all(lease.released for lease in session.leases)


def test_a_prompt_that_is_wholly_stored_leaves_its_last_block_to_compute(
    session: MemorySession, store: tuple[BlockStore, PlainPool]
) -> None:
    tokens, table = _tokens(128), list(range(8))
    _store_all(*store, tokens, table)
    assert _restore(session, tokens, PlainPool(), table).tokens == 64
    assert _restore(session, tokens[:64], PlainPool(), table).tokens == 0


def test_only_the_common_prefix_is_restored(session: MemorySession, store: tuple[BlockStore, PlainPool]) -> None:
    tokens, table = _tokens(256), list(range(16))
    _store_all(*store, tokens, table)
    other = tokens.copy()
    other[130] += 1
    report = _restore(session, other, PlainPool(), table)
    assert report.tokens == 128


def test_a_slow_store_is_not_waited_for(session: MemorySession, store: tuple[BlockStore, PlainPool]) -> None:
    tokens, table = _tokens(256), list(range(16))
    _store_all(*store, tokens, table)
    session.estimated_load_s, session.mapped_blocks = 1e6, 0
    report = _restore(session, tokens, PlainPool(), table)
    assert report.tokens == 0
    assert report.resident_blocks == 3, "the fourth holds the last token, which is computed in any case"
    assert report.estimated_load_s > report.estimated_compute_s
    assert [len(lease) for lease in session.leases] == [0]
    assert all(lease.released for lease in session.leases)


def test_fewer_blocks_than_planned_are_still_used(session: MemorySession, store: tuple[BlockStore, PlainPool]) -> None:
    tokens, table = _tokens(300), list(range(19))
    _store_all(*store, tokens, table)
    session.granted_blocks, session.mapped_blocks = 2, 1
    report = _restore(session, tokens, PlainPool(), table)
    assert report.tokens == 128
    assert "2 of 4" in report.reason


def test_bytes_whose_lease_was_lost_while_copying_do_not_count(
    session: MemorySession, store: tuple[BlockStore, PlainPool]
) -> None:
    tokens, table = _tokens(300), list(range(19))
    _store_all(*store, tokens, table)
    session.leases_stay_valid = False
    assert _restore(session, tokens, PlainPool(), table).tokens == 0


def test_payloads_of_another_size_do_not_count(session: MemorySession, store: tuple[BlockStore, PlainPool]) -> None:
    tokens, table = _tokens(256), list(range(16))
    _store_all(*store, tokens, table)
    for key, payload in session.blocks.items():
        session.blocks[key] = payload[:-8]
    assert _restore(session, tokens, PlainPool(), table).tokens == 0
    assert all(lease.released for lease in session.leases)


def test_what_is_mapped_takes_one_question_and_what_is_not_a_second(
    session: MemorySession, store: tuple[BlockStore, PlainPool]
) -> None:
    tokens, table = _tokens(300), list(range(19))
    _store_all(*store, tokens, table)
    assert _restore(session, tokens, PlainPool(), table).tokens == 256
    assert [len(lease) for lease in session.leases] == [4]
    session.leases.clear()
    session.mapped_blocks = 1
    other = PlainPool()
    assert _restore(session, tokens, other, table).tokens == 256
    assert [len(lease) for lease in session.leases] == [1, 4]
    assert np.array_equal(other.read(table, 256), tokens[:256])
    assert all(lease.released for lease in session.leases)


def test_a_miss_says_why(session: MemorySession) -> None:
    assert _restore(session, _tokens(200), PlainPool(), list(range(13))).reason == "never_stored"
    session.state = "degraded"
    assert "cannot be reached" in _restore(session, _tokens(200), PlainPool(), list(range(13))).reason


def test_loads_teach_the_cost_model(session: MemorySession, store: tuple[BlockStore, PlainPool]) -> None:
    tokens, table = _tokens(300), list(range(19))
    _store_all(*store, tokens, table)
    costs = _slow_compute()
    _restore(session, tokens, PlainPool(), table, costs)
    assert costs.load.samples == 1


def test_blocks_are_stored_as_they_fill(session: MemorySession, store: tuple[BlockStore, PlainPool]) -> None:
    writer, pool = store
    tokens, table = _tokens(300), list(range(19))
    pool.fill(table, tokens)
    writer.begin(table, 0)
    for count in range(100, 301):
        writer.advance(tokens[:count])
    report = writer.finish()
    assert (report.stored, report.present, report.reason) == (4, 0, "")
    assert sum(count for _, count in session.puts) == 4
    assert len(session.blocks) == 4


def test_restored_blocks_are_not_stored_again(session: MemorySession, store: tuple[BlockStore, PlainPool]) -> None:
    writer, pool = store
    tokens, table = _tokens(300), list(range(19))
    pool.fill(table, tokens)
    writer.begin(table, 128)
    writer.advance(tokens)
    assert writer.finish().stored == 2
    assert session.puts == [(2, 2)]


def test_a_throttled_block_ends_the_storing_of_its_request(
    session: MemorySession, store: tuple[BlockStore, PlainPool]
) -> None:
    writer, pool = store
    session.status_of = lambda block: "throttled" if block == 1 else "stored"
    tokens, table = _tokens(2000), list(range(125))
    pool.rows = np.zeros((125, ENGINE_TOKENS * BYTES_PER_TOKEN), np.uint8)
    writer.begin(table, 0)
    writer.advance(tokens[:640])
    report = writer.finish()
    assert report.throttled == 1
    assert "block 1 was throttled" in report.reason
    assert len(session.puts) == 1
    # The next request starts afresh.
    session.status_of = lambda block: "stored"
    writer.begin(table, 0)
    writer.advance(tokens[:128])
    assert writer.finish().reason == ""


def test_a_client_that_raises_only_costs_the_storing(
    session: MemorySession, store: tuple[BlockStore, PlainPool]
) -> None:
    writer, pool = store
    session.fail_with = ConnectionResetError("gone")
    tokens, table = _tokens(300), list(range(19))
    pool.fill(table, tokens)
    writer.begin(table, 0)
    writer.advance(tokens)
    assert "ConnectionResetError" in writer.finish().reason
    session.fail_with = None
    _store_all(writer, pool, tokens, table)
    assert len(session.blocks) == 4


def test_nothing_is_read_from_the_pool_after_finish(session: MemorySession) -> None:
    """`advance` must not wait for a put, and `finish` must: then a freed block can be reused at once."""
    pool, entered, go = PlainPool(), threading.Event(), threading.Event()
    gather = pool.gather_block

    def slow_gather(block_ids: Sequence[int], dest: Bytes) -> None:
        entered.set()
        assert go.wait(60)
        gather(block_ids, dest)

    pool.gather_block = slow_gather  # type: ignore[method-assign]
    tokens, table = _tokens(64), [0, 1, 2, 3]
    pool.fill(table, tokens)
    writer = BlockStore(session, pool)
    writer.begin(table, 0)
    writer.advance(tokens)  # returns although the put hangs
    assert entered.wait(60)
    assert not session.blocks
    threading.Timer(0.05, go.set).start()
    assert writer.finish().stored == 1
    pool.rows[:] = 0xAA
    assert np.array_equal(next(iter(session.blocks.values())).view(np.int32), tokens)
    writer.close()


def test_a_request_that_fills_no_block_starts_no_thread(session: MemorySession) -> None:
    writer = BlockStore(session, PlainPool())
    writer.begin([0], 0)
    writer.advance(_tokens(10))
    assert writer.finish().stored == 0
    assert not session.puts
    writer.close()


@pytest.mark.parametrize("restored", [0, 64])
def test_the_end_of_an_answer_is_told_of_all_whole_blocks(session: MemorySession, restored: int) -> None:
    """Also where it fills none that was not restored: that is how most turns of a conversation end."""
    pool, tokens, table = PlainPool(), _tokens(120), list(range(8))
    first = BlockStore(session, pool)
    first.begin(table, 0)
    first.advance(tokens[:64])
    first.finish()
    first.close()
    writer = BlockStore(session, pool)
    writer.begin(table, restored)
    writer.advance(tokens[:100])
    writer.advance(tokens)
    writer.finish(20)
    writer.finish(20)
    writer.close()
    assert session.told == [(1, 20)]


def test_a_session_that_cannot_be_told_costs_no_answer(session: MemorySession) -> None:
    writer = BlockStore(session, PlainPool())
    writer.begin([0, 1, 2, 3], 0)
    writer.advance(_tokens(64))
    session.hint = lambda *_, **__: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    assert writer.finish(9).stored == 1
    writer.close()


def test_one_put_is_handed_over_at_a_time_with_what_is_told_around_it(session: MemorySession) -> None:
    queue = PutQueue(PlainPool())
    for block in range(3):
        tokens = _tokens(64 * (block + 1))
        queue.tell(Telling(session, tokens, answer_tokens=block + 1))
        queue.offer(Put(session, tokens, block, [[4 * block, 4 * block + 1, 4 * block + 2, 4 * block + 3]]))
    assert (queue.outstanding, session.puts, session.told) == (3, [], [])
    queue.settle(60.0)
    assert (session.puts, session.told) == ([(0, 1)], [(0, 1), (1, 2)]), "what is told after a put needs no turn"
    queue.settle(60.0)
    assert (session.puts, [tokens for _, tokens in session.told]) == ([(0, 1), (1, 1)], [1, 2, 3])
    assert (len(queue.finished()), queue.outstanding) == (2, 1)
    assert [put.first_block for put in queue.close()] == [2], "given up"
    assert queue.outstanding == 0


def test_what_is_told_takes_no_place_of_what_is_stored(session: MemorySession) -> None:
    queue, tokens = PutQueue(PlainPool()), _tokens(64)
    for _ in range(300):
        queue.tell(Telling(session, tokens, due_in_s=3.0))
    assert not queue.is_full and queue.outstanding == 0
    for answer in range(300):
        queue.tell(Telling(session, tokens, answer_tokens=1 + answer))
    queue.settle(60.0, everything=True)
    assert queue.close() == []
    assert (len(session.due), len(session.told)) == (64, 256 - 64)
