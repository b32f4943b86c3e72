"""The work of a step: the rows of tokens that are computed together.

The module has plain values. `batch_planner` decides what is in a batch.
"""

from dataclasses import dataclass, field

from kvstore_engine.batching.observer import SequencePart
from kvstore_engine.batching.sequence import Sequence
from kvstore_engine.graph import SequenceSlice


@dataclass(slots=True)
class BatchPart:
    """The share of one sequence in a step: its tokens from `begin` up to `end`. `is_decode` marks the next token of an
    answer. If set, `borrowed` is the number of a block that stands in for the sequence's own block at `begin`, and
    `borrowed_window` likewise for layers with a sliding window.
    """

    sequence: Sequence
    begin: int
    end: int
    is_decode: bool
    borrowed: int | None = None
    borrowed_window: int | None = None

    @property
    def has_output(self) -> bool:
        """True if the step must return logits for the part's last token, because it is the sequence's last known
        token.
        """
        return self.end == self.sequence.length

    def slice(self, block_tokens: int) -> SequenceSlice:
        """Return this part as the argument of `Compute.step`. `block_tokens` is the number of tokens in a block of the
        pool.
        """
        ids = self.sequence.held.ids
        if self.borrowed is not None:
            ids = ids.copy()
            ids[self.begin // block_tokens] = self.borrowed
        tokens = self.sequence.tokens[self.begin : self.end]
        windows = self.sequence.held.window_ids() if self.sequence.held.windows else None
        if windows is not None and self.borrowed_window is not None:
            windows[self.begin // block_tokens] = self.borrowed_window
        return SequenceSlice(tokens, self.begin, ids, "last" if self.has_output else "none", windows)


@dataclass(slots=True)
class Batch:
    """The parts of sequences that one step computes together, in the order of their rows. `budget_tokens` is the number
    of prompt tokens that the step had room for.
    """

    parts: list[BatchPart] = field(default_factory=list)
    budget_tokens: int = 0

    @property
    def decodes(self) -> list[tuple[int, int]]:
        """One pair (1, position of the token) for each sequence that computes the next token of its answer."""
        return [(1, part.begin) for part in self.parts if part.is_decode]

    @property
    def prefill_tokens(self) -> int:
        return sum(part.end - part.begin for part in self.parts if not part.is_decode)

    def record(self) -> tuple[SequencePart, ...]:
        """Return one entry for each part, in the form that observers get."""
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
