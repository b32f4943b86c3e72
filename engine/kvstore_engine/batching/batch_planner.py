"""Puts a step together: every running answer's next token, and prompt tokens as far as the budget goes.

Owns the rules by which a prompt is cut, and the borrowed copies of a step. It never computes and never preempts by
itself: where blocks are short it asks for room.

Order of the rows: whole pieces of prompts, then the ends of prompts, then decodes. ggml may treat the last `n % 4` rows
of a step with another kernel (graph.plan), so that all but these few rows are computed alike however a prompt is cut;
pieces are cut at block boundaries, which are multiples of 4.

A sequence that is alone in its step also computes the end of its prompt, what follows the last whole block before the
end, in a step of its own: a product of very few rows is of yet another kernel, and with that rule an answer has the
same bits whether its prompt was computed, shared or restored, as in graph.plan. In company that cannot be had, and a
prompt is not delayed for it.

A prompt whose blocks are all there already still needs the logits of its last token. Its last rows are computed into a
borrowed copy of its last block, so that a shared block is never written again.
"""

from collections.abc import Callable
from collections.abc import Sequence as Series
from dataclasses import dataclass, field, replace

from kvstore_engine.batching.observer import SequencePart
from kvstore_engine.batching.sequence import Sequence
from kvstore_engine.blocks import BlockSpace, TrieNode
from kvstore_engine.graph import SequenceSlice
from kvstore_engine.policies import StepBudget
from kvstore_engine.pool import PoolExhausted

_ROW_GROUP = 4  # see above


@dataclass(slots=True)
class BatchPart:
    """One sequence's rows in a step: [begin, end) of its tokens; `borrowed` replaces the block of `begin`."""

    sequence: Sequence
    begin: int
    end: int
    is_decode: bool
    borrowed: int | None = None

    @property
    def has_output(self) -> bool:
        """Its last token's logits are wanted."""
        return self.end == self.sequence.length

    def slice(self, block_tokens: int) -> SequenceSlice:
        """As the compute object wants it."""
        table = self.sequence.held.ids
        if self.borrowed is not None:
            table = table.copy()
            table[self.begin // block_tokens] = self.borrowed
        tokens = self.sequence.tokens[self.begin : self.end]
        return SequenceSlice(tokens, self.begin, table, "last" if self.has_output else "none")


@dataclass(slots=True)
class Batch:
    """The parts of a step, in the order of its rows."""

    parts: list[BatchPart] = field(default_factory=list)
    budget_tokens: int = 0

    @property
    def decodes(self) -> list[tuple[int, int]]:
        return [(1, part.begin) for part in self.parts if part.is_decode]

    @property
    def prefill_tokens(self) -> int:
        return sum(part.end - part.begin for part in self.parts if not part.is_decode)

    def record(self) -> tuple[SequencePart, ...]:
        """For observers: one for each answer. The beams of a search are one, with the rows of all."""
        found: dict[tuple[str, int], SequencePart] = {}
        for part in self.parts:
            key, rows = (part.sequence.request.id, part.sequence.index), part.end - part.begin
            if (known := found.get(key)) is not None:
                found[key] = replace(known, tokens=known.tokens + rows)
            else:
                found[key] = SequencePart(*key, "decode" if part.is_decode else "prefill", rows, part.begin)
        return tuple(found.values())


class BatchPlanner:
    """Plans steps over one space. `make_room(sequence)` preempts somebody, maybe `sequence` itself; False if nobody is
    left to.
    """

    def __init__(
        self,
        space: BlockSpace,
        budget: StepBudget,
        *,
        most_tokens: int,
        make_room: Callable[[Sequence], bool],
        found: Callable[[Sequence, int], None],
    ) -> None:
        """`found(sequence, tokens)` is told of prompt tokens that others have computed."""
        self._space = space
        self._budget = budget
        self._most_tokens = most_tokens
        self._make_room = make_room
        self._found = found

    def skip_ready(self, sequence: Sequence) -> None:
        """Go past what others have put into the sequence's blocks."""
        ready = self._space.ready_tokens(sequence.held, sequence.computed)
        if ready > sequence.computed:
            last = (sequence.length - 1) // _ROW_GROUP * _ROW_GROUP
            self._found(sequence, sequence.reach(max(sequence.computed, min(ready, last)), "local"))

    def is_asked(self, sequence: Sequence) -> bool:
        """Somebody has asked the daemon for the next block: it is coming, or has to be computed by one of those that
        want it.
        """
        node = self._next_node(sequence)
        return node is not None and node.asked

    def plan(self, decoding: Series[Sequence], prompts: Series[Sequence]) -> Batch:
        """The next step: `decoding` in the order in which they keep their blocks, `prompts` by whose turn it is."""
        planned = {sequence: part for sequence in decoding if (part := self._decode(sequence)) is not None}
        # Beams go on together: those of a unit of which one has no block left wait with it.
        decodes = [part for sequence, part in planned.items() if all(beam in planned for beam in sequence.unit)]
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
            part = self._prompt(sequence, left, busy, is_alone=is_alone)
            if part is not None:
                (ends if part.has_output else whole).append(part)
                left -= part.end - part.begin
        parts = []
        for part in (*whole, *ends, *decodes):
            if part.sequence.block_table is not None:
                parts.append(part)
            elif part.borrowed is not None:  # making room for a later one has preempted it
                self._space.references.release([part.borrowed])
        return Batch(parts, budget)

    def release_borrowed(self, plan: Batch) -> None:
        """The step is over."""
        for part in plan.parts:
            if part.borrowed is not None:
                self._space.references.release([part.borrowed])
                part.borrowed = None

    def _decode(self, sequence: Sequence) -> BatchPart | None:
        while sequence.block_table is not None:
            try:
                self._space.extend(sequence.block_table, sequence.computed + 1)
                self._space.make_writable(sequence.block_table, sequence.computed)
            except PoolExhausted:
                if not self._make_room(sequence):
                    return None
            else:
                return BatchPart(sequence, sequence.computed, sequence.length, is_decode=True)
        return None

    def _prompt(self, sequence: Sequence, most: int, busy: set[TrieNode], *, is_alone: bool) -> BatchPart | None:
        if sequence.block_table is None or sequence.is_restoring:
            return None
        self.skip_ready(sequence)
        node, size = self._next_node(sequence), self._space.block_tokens
        begin = sequence.computed
        if node is not None and node.ready:
            return self._borrowing(sequence) if sequence.left <= most else None
        if node is not None and (node in busy or node.loader not in (None, sequence)):
            return None
        end = min(sequence.prefill_end, begin + most)
        if end < sequence.prefill_end:
            end = end // size * size
        elif is_alone:
            tail = (end - 1) // size * size
            end = tail if begin < tail else end
        for node in sequence.held.nodes[begin // size : end // size]:
            if node.loader not in (None, sequence):
                end = sequence.held.nodes.index(node) * size
                break
            busy.add(node)
        return BatchPart(sequence, begin, end, is_decode=False) if end > begin else None

    def _borrowing(self, sequence: Sequence) -> BatchPart | None:
        """All blocks are there: compute the last rows into a copy."""
        index = sequence.computed // self._space.block_tokens
        while sequence.block_table is not None:
            borrowed = None
            try:
                borrowed = self._space.borrow_copy(int(sequence.held.ids[index]))
            except PoolExhausted:
                if self._make_room(sequence):
                    continue
                # Alone, with every block in use: nobody else reads the block, and the rows become what they are.
                if sequence.held.nodes[index].users > 1:
                    return None
            return BatchPart(sequence, sequence.computed, sequence.length, is_decode=False, borrowed=borrowed)
        return None

    def _next_node(self, sequence: Sequence) -> TrieNode | None:
        nodes, index = sequence.held.nodes, sequence.computed // self._space.block_tokens
        return nodes[index] if index < len(nodes) else None
