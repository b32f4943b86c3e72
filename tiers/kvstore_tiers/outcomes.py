"""The outcomes of transfers, and the functions that get them: one at a time, or many at once.

Invariant: a completion is called exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import NamedTuple

from kvstore_proto.arena import BlockHeader


class OutcomeKind(Enum):
    DONE = "done"
    CORRUPT = "corrupt"  # bytes came back and are wrong: quarantine
    MISSING = "missing"  # the tier has forgotten the block, as one that is addressed by key may
    UNREADABLE = "unreadable"  # the bytes are as they were stored, and this build does not have their codec
    FAILED = "failed"  # the medium refused: retry or shed the tier
    CANCELLED = "cancelled"  # closed before it ran


class Outcome(NamedTuple):
    """The result of a transfer of one block. `header` is the block's verified header after a successful read or write,
    `nbytes` the bytes moved, `message` the reason for a failure, `errno` the system's error number or 0.
    """

    kind: OutcomeKind
    header: BlockHeader | None = None
    nbytes: int = 0
    message: str = ""
    errno: int = 0

    @property
    def ok(self) -> bool:
        return self.kind is OutcomeKind.DONE


Completion = Callable[[Outcome], None]
RunCompletion = Callable[[Sequence[Outcome]], None]


def together(transfers: Sequence[Callable[[Completion], None]], done: RunCompletion) -> None:
    """Begin `transfers`, and call `done` once, with the outcomes in their order, when the last of them has ended."""
    outcomes: dict[int, Outcome] = {}
    left = list(range(len(transfers)))

    def ended(at: int, outcome: Outcome) -> None:
        outcomes[at] = outcome
        if not left.pop():  # one thread alone gets the last
            done([outcomes[position] for position in range(len(transfers))])

    for at, begin in enumerate(transfers):
        begin(partial(ended, at))
