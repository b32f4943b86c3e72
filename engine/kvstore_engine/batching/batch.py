"""The work of a step: the rows of tokens that are computed together.

The module has plain values. `batch_planner` decides what is in a batch.
"""

from dataclasses import dataclass, field
from typing import Literal

from kvstore_engine.batching.observer import SequencePart
from kvstore_engine.batching.sequence import Sequence
from kvstore_engine.graph import SequenceSlice


@dataclass(slots=True)
class BatchPart:
    """The tokens of one sequence that a step computes, from position `begin` up to `end`. `is_decode` is True for the
    next token of an answer. If `borrowed` is set, this pool block is used in place of the sequence's own block at
    `begin`; `borrowed_window` likewise replaces the block for layers with a sliding window. `read_pages`: see
    `SequenceSlice`.
    """

    sequence: Sequence
    begin: int
    end: int
    is_decode: bool
    borrowed: int | None = None
    borrowed_window: int | None = None
    read_pages: int = 0

    @property
    def has_output(self) -> bool:
        """True if the step must return logits for the last token of this part, because the next token of the sequence
        is chosen from them.
        """
        return self.end == self.sequence.length

    def slice(self, block_tokens: int) -> SequenceSlice:
        """Return this part in the form that `Compute.step` takes. `block_tokens` is the number of tokens in a pool
        block.
        """
        ids = self.sequence.held.ids
        if self.borrowed is not None:
            ids = ids.copy()
            ids[self.begin // block_tokens] = self.borrowed
        tokens = self.sequence.tokens[self.begin : self.end]
        windows = self.sequence.held.window_ids() if self.sequence.held.windows else None
        if windows is not None and self.borrowed_window is not None:
            windows[self.begin // block_tokens] = self.borrowed_window
        outputs: Literal["last", "none"] = "last" if self.has_output else "none"
        return SequenceSlice(tokens, self.begin, ids, outputs, windows, self.read_pages)


@dataclass(slots=True)
class Batch:
    """The parts of sequences that one step computes together, in the order of their rows. `budget_tokens` is the most
    prompt tokens that this step was allowed to have.
    """

    parts: list[BatchPart] = field(default_factory=list)
    budget_tokens: int = 0

    @property
    def decodes(self) -> list[tuple[int, int]]:
        """A pair (1, position of the token) for each sequence of the batch that computes the next token of its
        answer.
        """
        return [(1, part.begin) for part in self.parts if part.is_decode]

    @property
    def prefill_tokens(self) -> int:
        return sum(part.end - part.begin for part in self.parts if not part.is_decode)

    def record(self) -> tuple[SequencePart, ...]:
        """Return the parts in the form that observers of the engine get, one entry for each."""
        return tuple(
            SequencePart(
                part.sequence.request.id,
                part.sequence.index,
                "decode" if part.is_decode else "prefill",
                part.end - part.begin,
                part.begin,
            )
            for part in self.parts
        )
