"""Stores the computed blocks of running sequences in the daemon, each block once, and sends it hints.

The module owns which blocks are being stored, and pins them until they are. It waits for the daemon only as long as its
caller allows. If the daemon is slow or gone, blocks are not stored, and nothing else suffers.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from kvstore_engine.batching.observer import Observer
from kvstore_engine.batching.sequence import Sequence
from kvstore_engine.blocks.space import BlockSpace
from kvstore_engine.blocks.trie import TrieNode
from kvstore_engine.restore.put_queue import MOST_BLOCKS, BlockSender, PutQueue, QueuedHint, QueuedPut
from kvstore_engine.restore.session import KvSession, NextStep

_GIVEN_UP = -1  # Sequence.offered_blocks: a block was not stored, and later ones would not be found


@dataclass(slots=True, eq=False)
class _SequencePut(QueuedPut):
    """A put with its sequence and the trie nodes of its blocks."""

    sequence: Sequence = field(kw_only=True)
    marks: list[TrieNode | None] = field(kw_only=True)
    window_blocks: list[int] = field(kw_only=True)


class Storer:
    """The part of the engine that sends computed blocks of `space` to the daemon for storing, each once, and hints.
    `copies` reads the blocks. A thread of its own talks to the daemon.
    """

    def __init__(self, space: BlockSpace, copies: BlockSender, observer: Observer, clock: Callable[[], float]) -> None:
        self._space = space
        self._observer = observer
        self._queue = PutQueue(copies, clock)
        self.counts = self._queue.counts  # blocks by the status that their put gave them

    @property
    def outstanding(self) -> int:
        """The number of puts (requests to store blocks) that have not ended."""
        return self._queue.outstanding

    def offer(self, sequence: Sequence, *, is_last: bool = False) -> None:
        """Queue the whole storage blocks that `sequence` has computed since the last call, with all of attention, to be
        stored in the daemon.
        `is_last` says that the sequence has ended.
        """
        session = sequence.session
        if session is None or not sequence.request.settings.store or sequence.offered_blocks == _GIVEN_UP:
            return
        full = sequence.exact // session.block_tokens
        first = sequence.offered_blocks
        if first >= full or session.state != "connected":
            return
        block_table = sequence.held
        per_block = session.block_tokens // self._space.block_tokens
        nodes, blocks = block_table.nodes, block_table.blocks
        while first < full:
            last_node = _node(nodes, (first + 1) * per_block - 1)
            if last_node is not None and last_node.stored:
                first += 1
                continue
            windows = self._space.windows
            if self._queue.is_full or (windows is not None and windows.is_pinned and not is_last):
                break
            end = min(first + MOST_BLOCKS, full)
            self._put(sequence, session, first, end, blocks, nodes)
            first = end
        sequence.offered_blocks = first

    def hint_end(self, sequence: Sequence, *, by_itself: bool) -> None:
        """Send the daemon a hint that the answer of `sequence` has ended, with the answer's length. If the answer ended
        `by_itself`, the hint also says which request of the conversation follows. The daemon uses it for eviction.
        """
        is_first = not sequence.index  # one of several answers to a prompt
        if is_first and sequence.generated and sequence.request.settings.store:
            next_step = sequence.answer.next_step if by_itself else None
            self._hint(sequence, sequence.exact, answer_tokens=sequence.generated, next_step=next_step)

    def hint_due(self, sequence: Sequence, wait_s: float) -> None:
        """Send the daemon a hint that `sequence` will run in about `wait_s` seconds, so that it keeps the stored blocks
        of the prompt.
        """
        self._hint(sequence, sequence.prompt_tokens, due_in_s=wait_s)

    def _hint(
        self,
        sequence: Sequence,
        tokens: int,
        *,
        answer_tokens: int = 0,
        due_in_s: float | None = None,
        next_step: Callable[[], NextStep | None] | None = None,
    ) -> None:
        session = sequence.session
        if session is not None and session.state == "connected" and tokens >= session.block_tokens:
            whole = np.array(sequence.tokens[: tokens // session.block_tokens * session.block_tokens], np.int32)
            self._queue.hint(QueuedHint(session, whole, answer_tokens, due_in_s, next_step))

    def settle(self, patience_s: float, *, everything: bool = False) -> None:
        """Release the blocks of puts (requests to store blocks) that have ended, and give the thread the next put. With
        `everything` it gets all puts. Wait up to `patience_s` seconds until it can take them.
        """
        self._collect(self._queue.finished())
        self._queue.settle(patience_s, everything=everything)
        self._collect(self._queue.finished())

    def wait(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` seconds until the daemon has answered the puts (requests to store blocks) that the
        thread has got.
        """
        self._queue.wait(timeout_s)
        self._collect(self._queue.finished())

    def close(self) -> None:
        """Finish the queued puts (requests to store blocks), each of which has a time limit, and stop the thread."""
        self._queue.settle(0.0, everything=True)
        self._collect(self._queue.close())

    def _put(
        self, sequence: Sequence, session: KvSession, first: int, end: int, blocks: list[int], nodes: list[TrieNode]
    ) -> None:
        per_block = session.block_tokens // self._space.block_tokens
        tables = [blocks[index * per_block : (index + 1) * per_block] for index in range(first, end)]
        tokens = np.array(sequence.tokens[: end * session.block_tokens], np.int32)
        marks = [_node(nodes, (index + 1) * per_block - 1) for index in range(first, end)]
        for node in marks:
            if node is not None:
                node.stored = True  # or will be: no other sequence offers it
        self._space.pin(block for table in tables for block in table)
        put = _SequencePut(session, tokens, first, tables, sequence=sequence, marks=marks, window_blocks=[])
        put.trace = sequence.request.settings.trace
        self._add_windows(put, range(first, end), per_block)
        self._queue.offer(put)

    def _add_windows(self, put: _SequencePut, numbers: range, per_block: int) -> None:
        """Pin the storage blocks `numbers` of windowed layers that are still there, and add them to `put`."""
        windows, sequence = self._space.windows, put.sequence
        if windows is None:
            return
        for number in numbers:
            places = [windows.block(sequence.held, number * per_block + index) for index in range(per_block)]
            blocks = [block for block in places if block is not None]
            if len(blocks) == per_block:
                windows.pin(blocks)
                put.window_blocks += blocks
                put.windows[number] = partial(windows.pool.gather_block, blocks)

    def _collect(self, puts: list[QueuedPut]) -> None:
        for put in puts:
            self._space.unpin(block for table in put.tables for block in table)
            assert isinstance(put, _SequencePut)
            if self._space.windows is not None:
                self._space.windows.unpin(put.window_blocks)
            request, tokens = put.sequence.request, len(put.tables) * put.session.block_tokens
            self._observer.stored(request.id, put.sequence.index, tokens, put.reason, put.begin_s, put.end_s)
            if put.reason:
                put.sequence.offered_blocks = _GIVEN_UP
                for node in put.marks:
                    if node is not None:
                        node.stored = False


def _node(nodes: list[TrieNode], index: int) -> TrieNode | None:
    return nodes[index] if index < len(nodes) else None
