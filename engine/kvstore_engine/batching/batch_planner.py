"""Makes a batch: the next token of each running answer, and prompt tokens as far as the budget allows.

The module owns the rules by which a prompt is cut, and a step's borrowed copies of blocks. It does not compute, and
does not preempt by itself: when blocks are short it calls `make_room`.

Order of the rows: whole pieces of prompts, then the ends of prompts, then decodes. ggml may compute the last `n % 4`
rows of a step with another kernel (graph.plan); with this order all other rows are computed alike however a prompt is
cut. Pieces are cut at block boundaries, which are multiples of 4.

If a sequence is alone in its step, the end of its prompt (the part after the last whole block) is computed in a step of
its own. A product of very few rows uses yet another kernel; with that rule an answer has equal bits whether its prompt
was computed, shared or restored, as in graph.plan. Beside other sequences this is not possible, and a prompt is not
delayed for it.

A prompt whose blocks are all ready still needs the logits of its last token. Its last rows are computed into a borrowed
copy of its last block, so that a shared block is never written again.
"""

import contextlib
from collections.abc import Callable
from collections.abc import Sequence as Series

from kvstore_engine.batching.batch import Batch, BatchPart
from kvstore_engine.batching.observer import Observer
from kvstore_engine.batching.restorer import Restorer
from kvstore_engine.batching.sequence import Sequence
from kvstore_engine.batching.step_budget import StepBudget
from kvstore_engine.blocks.space import BlockSpace
from kvstore_engine.blocks.trie import TrieNode
from kvstore_engine.page_selection import PageSelection
from kvstore_engine.pool import PoolExhausted

_ROW_GROUP = 4  # see above


class BatchPlanner:
    """A planner that chooses the tokens of each step: the next token of each answer, and as many prompt tokens as
    `budget` allows, at most `most_tokens` in all. Tokens of answers read the pages that `selection` allows, if given.
    `make_room(sequence)` is called when pool blocks are short. It takes the blocks of one running sequence, perhaps of
    that one, and returns False if no other sequence runs.
    """

    def __init__(
        self,
        space: BlockSpace,
        budget: StepBudget,
        restorer: Restorer,
        *,
        most_tokens: int,
        selection: PageSelection | None,
        make_room: Callable[[Sequence], bool],
        observer: Observer,
        clock: Callable[[], float],
    ) -> None:
        self._space = space
        self._budget = budget
        self._restorer = restorer
        self._most_tokens = most_tokens
        self._selection = selection
        self._make_room = make_room
        self._observer = observer
        self._clock = clock

    def skip_ready(self, sequence: Sequence) -> None:
        """Advance `sequence` past the blocks of its prompt that other sequences have computed already, so that they are
        not computed again.
        """
        last = (sequence.length - 1) // _ROW_GROUP * _ROW_GROUP
        ready = self._space.resume(sequence.held, sequence.computed, last)
        if ready > sequence.computed:
            new = sequence.advance_to(ready, "local")
            if new:
                self._observer.restored(sequence.request.id, sequence.index, "local", new, self._clock())
        node = self._next_node(sequence)
        if self._space.windows is not None and node is not None and node.ready and ready < last:
            with contextlib.suppress(PoolExhausted):  # it waits for room
                self._space.unshare(sequence.held, sequence.computed // self._space.block_tokens)

    def is_requested(self, sequence: Sequence) -> bool:
        """Return True if the next block that `sequence` has to compute was requested from the daemon before, for any
        sequence.
        """
        node = self._next_node(sequence)
        return node is not None and node.requested

    def plan(self, decoding: Series[Sequence], prompts: Series[Sequence]) -> Batch:
        """Return the batch of the next step. `decoding` are the sequences with the next token of an answer to compute;
        the first of them is the last to lose its blocks. `prompts` are the sequences with prompt tokens to compute, in
        the order in which they are served.
        """
        decodes = [part for sequence in decoding if (part := self._decode(sequence)) is not None]
        budget = 0
        if prompts:
            pieces = [(1, part.begin) for part in decodes]
            waiting = [(1, sequence.computed) for sequence in prompts]
            budget = min(self._budget.tokens(pieces, waiting), self._most_tokens - len(decodes))
        left = budget
        is_alone = len(prompts) == 1 and not decodes
        whole: list[BatchPart] = []
        ends: list[BatchPart] = []
        busy: set[TrieNode] = set()
        for sequence in prompts:
            if left <= 0:
                break
            if self._space.windows is not None and not (decodes or whole or ends):
                self._unblock(sequence)
            part = self._prompt(sequence, left, busy, is_alone=is_alone)
            if part is not None:
                (ends if part.has_output else whole).append(part)
                left -= part.end - part.begin
        parts = []
        for part in (*whole, *ends, *decodes):
            if part.sequence.block_table is not None:
                parts.append(part)
            else:  # preempted to make room for a later part
                self._return_borrowed(part)
        return Batch(parts, budget)

    def release_borrowed(self, batch: Batch) -> None:
        """Free the temporary copies of blocks that `batch` used in its step, which is over."""
        for part in batch.parts:
            self._return_borrowed(part)

    def _return_borrowed(self, part: BatchPart) -> None:
        if part.borrowed is not None:
            self._space.references.release([part.borrowed])
        if part.borrowed_window is not None and self._space.windows is not None:
            self._space.windows.references.release([part.borrowed_window])
        part.borrowed = part.borrowed_window = None

    def _prepare(self, sequence: Sequence, begin: int, end: int) -> None:
        """Get the blocks of windowed layers for positions [begin, end). Raises PoolExhausted."""
        if self._space.windows is not None:
            self._space.windows.prepare(sequence.held, begin, end)

    def _decode(self, sequence: Sequence) -> BatchPart | None:
        while sequence.block_table is not None:
            try:
                self._space.extend(sequence.block_table, sequence.computed + 1)
                self._space.make_writable(sequence.block_table, sequence.computed)
                self._prepare(sequence, sequence.computed, sequence.computed + 1)
            except PoolExhausted:
                if not self._make_room(sequence):
                    return None
            else:
                pages = self._selection.read_pages(sequence.length) if self._selection is not None else 0
                return BatchPart(sequence, sequence.computed, sequence.length, is_decode=True, read_pages=pages)
        return None

    def _prompt(self, sequence: Sequence, most: int, busy: set[TrieNode], *, is_alone: bool) -> BatchPart | None:
        if sequence.block_table is None:
            return None
        self.skip_ready(sequence)
        limit = sequence.length
        if sequence.is_restoring:
            limit = min(limit, self._restorer.computable(sequence))
            if limit <= sequence.computed:
                return None
        node, size = self._next_node(sequence), self._space.block_tokens
        begin = sequence.computed
        if node is not None and node.ready:
            is_last = self._space.windows is None or sequence.left <= _ROW_GROUP
            return self._borrowing(sequence) if is_last and sequence.left <= most else None
        if node is not None and (node in busy or node.loader not in (None, sequence)):
            return None
        end = min(limit, begin + most)
        if end < sequence.length:
            end = end // size * size
        elif is_alone:
            tail = (end - 1) // size * size
            end = tail if begin < tail else end
        for node in sequence.held.nodes[begin // size : end // size]:
            if node.loader not in (None, sequence):
                end = sequence.held.nodes.index(node) * size
                break
            busy.add(node)
        return self._part(sequence, begin, end) if end > begin else None

    def _unblock(self, sequence: Sequence) -> None:
        """Make room for blocks of its own, if `sequence` needs them and the step is empty so far: prompts that share
        blocks whose windows are gone would wait for each other.
        """
        while sequence.block_table is not None:
            self.skip_ready(sequence)
            node = self._next_node(sequence)
            is_blocked = node is not None and node.ready
            if not is_blocked or sequence.left <= _ROW_GROUP or not self._make_room(sequence):
                return

    def _part(self, sequence: Sequence, begin: int, end: int) -> BatchPart | None:
        """Return a part of a prompt, once there is room for its windows."""
        while sequence.block_table is not None:
            try:
                self._prepare(sequence, begin, end)
            except PoolExhausted:
                if not self._make_room(sequence):
                    return None
            else:
                return BatchPart(sequence, begin, end, is_decode=False)
        return None

    def _borrowing(self, sequence: Sequence) -> BatchPart | None:
        """Return a part that computes the last rows into a copy: all blocks are ready. None if there is no room."""
        index = sequence.computed // self._space.block_tokens
        windows = self._space.windows
        while sequence.block_table is not None:
            borrowed = borrowed_window = None
            try:
                if windows is not None:
                    borrowed_window = windows.copy(windows.block(sequence.held, index))
                borrowed = self._space.borrow_copy(int(sequence.held.ids[index]))
            except PoolExhausted:
                if windows is not None and borrowed_window is not None:
                    windows.references.release([borrowed_window])
                    borrowed_window = None
                if self._make_room(sequence):
                    continue
                # Alone, with every block in use: no other sequence reads the block, and the rows get the same values.
                if sequence.held.nodes[index].users > 1:
                    return None
            end = sequence.length
            return BatchPart(sequence, sequence.computed, end, False, borrowed, borrowed_window)
        return None

    def _next_node(self, sequence: Sequence) -> TrieNode | None:
        nodes, index = sequence.held.nodes, sequence.computed // self._space.block_tokens
        return nodes[index] if index < len(nodes) else None
