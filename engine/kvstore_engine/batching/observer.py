"""What the engine tells whoever measures it.

Owns the contract, with an observer that does nothing as its base. Times are those of the engine's clock, in seconds.
An observer is called from the engine's thread between steps: the implementation MUST return at once and MUST NOT
raise or call the engine; one that raises is told nothing more.
"""

from dataclasses import dataclass, field
from typing import Literal

from kvstore_engine.batching.events import Reason, Usage
from kvstore_engine.restore.report import RestoreReport


@dataclass(frozen=True, slots=True)
class SequencePart:
    """One sequence's share of a step: `tokens` rows from `position` on; `kind` says whether of its prompt."""

    request_id: str
    index: int
    kind: Literal["prefill", "decode"]
    tokens: int
    position: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step. `begin_s` to `end_s` is all of it, `compute_s` the forward pass alone.

    used_blocks:   engine blocks that running sequences hold (shared ones once).
    cached_blocks: further blocks that only the prefix trie holds.
    budget_tokens: how many prompt tokens the step might have computed beside the decodes.
    """

    number: int
    begin_s: float
    end_s: float
    compute_s: float
    running: int
    waiting: int
    prefill_tokens: int
    decode_tokens: int
    budget_tokens: int
    pool_blocks: int
    used_blocks: int
    cached_blocks: int
    parts: tuple[SequencePart, ...] = field(default=())


class Observer:
    """Does nothing: override what is wanted."""

    def queued(self, request_id: str, t: float) -> None:
        """`add` took a request in."""

    def admitted(self, request_id: str, index: int, t: float) -> None:
        """A sequence got its blocks, for the first time or after a preemption."""

    def restored(self, request_id: str, index: int, source: Literal["local", "daemon"], tokens: int, t: float) -> None:
        """`tokens` of the prompt need not be computed; local ones are told at admission and when others complete."""

    def store_answered(self, request_id: str, index: int, report: RestoreReport, t: float) -> None:
        """What the daemon had of a prompt, and what of it was restored; once for each time that it was asked."""

    def step(self, record: StepRecord) -> None:
        """A step has been done."""

    def preempted(self, request_id: str, index: int, how: Literal["swap", "recompute"], t: float) -> None:
        """A running sequence lost its blocks."""

    def swapped_out(self, request_id: str, index: int, nbytes: int, runs: int, begin_s: float, end_s: float) -> None:
        """A victim's blocks were copied to the host pool, in `runs` contiguous pieces."""

    def swapped_in(self, request_id: str, index: int, nbytes: int, runs: int, begin_s: float, end_s: float) -> None:
        """They are back."""

    def stored(self, request_id: str, index: int, tokens: int, reason: str, begin_s: float, end_s: float) -> None:
        """A put of `tokens` has ended: they are in the daemon now, or `reason` says why not. One put at a time."""

    def token(self, request_id: str, index: int, t: float) -> None:
        """A token was chosen."""

    def finished(self, request_id: str, index: int, reason: Reason, usage: Usage, t: float) -> None:
        """An answer has ended."""
