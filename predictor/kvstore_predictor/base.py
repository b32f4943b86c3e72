"""The contract of a predictor: events in, ranked guesses out. No clock, no I/O, no threads.

A *chain* is the path of blocks that one request used, named by the key of its last block. A predictor says which known
chains will be requested, how likely that is, and when.

Obligations
- The caller passes every request of a tenant once, with `now_s` that never goes back. Times are seconds of a clock
  of the caller's choice.
- The implementation MUST be deterministic, MUST bound its memory by the limits it was made with, MUST never name a
  chain of one tenant in a guess for another one, and MUST name no chain that `forget` was called for.
- An event SHOULD cost 10 us on the mean, however many chains there are (docs/prediction.md says which predictors cost
  more); `guesses` costs O(chains that may be due).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt


class NextStep(IntEnum):
    """The reason why an engine stopped; the values are those on the wire."""

    UNSPECIFIED = 0
    TOOL_CALL = 1  # a tool answers
    END_OF_TURN = 2  # a person answers
    CLOSED = 3  # nothing: the session is over


@dataclass(frozen=True, slots=True)
class PredictorRequest:
    """One request: `keys` of its blocks (16 bytes each), head first. 0 and "": not known. `number` names it in
    `answered`.
    """

    tenant: int
    keys: Sequence[bytes]
    number: int = -1
    prompt_tokens: int = 0
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Hint:
    """An engine's expectation about a chain; None and 0: not given. `due_s`: the time when an expected request uses
    it.
    """

    will_continue: float | None = None
    due_s: float | None = None
    next_step: NextStep = NextStep.UNSPECIFIED
    answer_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Guess:
    """A guess: tenant `tenant` will request the chain that ends with block `key` and is `blocks` long.

    `probability`: the probability of a request within the given horizon, given all events until now. `first_s`: before
    this time a request has a tenth of that probability; `due_s`: half of it. `confidence`: 0 to 1, how much evidence of
    its own the guess has; 1 if an engine said so.
    """

    tenant: int
    key: bytes
    blocks: int
    probability: float
    first_s: float
    due_s: float
    confidence: float


Array = npt.NDArray[Any]
Piece = tuple[str, Array]  # pieces of one name are joined
State = Mapping[str, Array]


class Predictor(ABC):
    """A predictor; the module's text is its contract."""

    name: str

    @abstractmethod
    def requested(self, request: PredictorRequest, now_s: float) -> None:
        """Note that a request for these blocks has arrived, whether or not they are stored."""

    def answered(self, number: int, output_tokens: int, now_s: float) -> None:  # noqa: B027  # optional
        """Note that the request `number` has ended with an answer of `output_tokens` tokens."""

    def hinted(self, tenant: int, key: bytes, hint: Hint, now_s: float) -> None:  # noqa: B027  # optional
        """Note an engine's expectation about the chain that ends with block `key`."""

    @abstractmethod
    def guesses(self, now_s: float, horizon_s: float, limit: int) -> list[Guess]:
        """Return at most `limit` chains that may be requested within `horizon_s` from now, the most probable first."""

    def sample(self, now_s: float, horizon_s: float, count: int, turn: int) -> list[Guess]:
        """Return about `count` of the guesses, in any order, another part of them with each `turn`. The time does not
        grow with the number of chains. A calibration learns from these samples.
        """
        return self.guesses(now_s, horizon_s, count)

    @abstractmethod
    def forget(self, tenant: int, keys: Iterable[bytes] | None) -> None:
        """Keep nothing that names blocks `keys` of `tenant` (None: any)."""

    @abstractmethod
    def export_state(self) -> Iterator[Piece]:
        """Yield the learned state, in pieces that take at most half a millisecond each. Events may come between two
        pieces: their changes may be included or not. Rows that belong to a tenant have its number in a column
        `tenant`; before `import_state` the caller may change these numbers, or leave rows out.
        """

    @abstractmethod
    def import_state(self, state: dict[str, Array], later_s: float) -> None:
        """Go on from the joined pieces of a predictor of this name whose clock is `later_s` behind. Raises ValueError,
        having changed nothing, for a state that this version cannot use.
        """


def parts(rows: Iterable[tuple[Any, ...]], dtype: np.dtype[np.void], most: int) -> Iterator[Array]:
    """Yield `rows` as arrays of `dtype` and at most `most` rows, each made when it is asked for. The first array is
    empty, so that a table without rows appears too.
    """
    yield np.empty(0, dtype)
    left = iter(rows)
    while part := list(islice(left, most)):
        yield np.array(part, dtype)


def within(state: State, prefix: str) -> dict[str, Array]:
    """Return the tables of `state` whose names begin with `prefix`, by the rest of their names."""
    return {name.removeprefix(prefix): table for name, table in state.items() if name.startswith(prefix)}
