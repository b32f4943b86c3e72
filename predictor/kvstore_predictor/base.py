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

import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class NextStep(IntEnum):
    """The reason why an engine stopped, which says what the chain's next use may be. The numbers are those on the
    wire.
    """

    UNSPECIFIED = 0
    TOOL_CALL = 1  # a tool answers
    END_OF_TURN = 2  # a person answers
    CLOSED = 3  # nothing: the session is over


class PredictorRequest(NamedTuple):
    """A request that a predictor sees: the `keys` of its blocks (16 bytes each), from the first on, and the number of
    its `tenant`. `number` names the request in `answered`. 0 and "" mean not known.
    """

    tenant: int
    keys: Sequence[bytes]
    number: int = -1
    prompt_tokens: int = 0
    kind: str = ""


class Hint(NamedTuple):
    """An engine's expectation about a chain. `will_continue` is the probability that a later request continues the
    chain, `due_s` the time when a request will use it, and `next_step` the reason why the engine stopped. None and 0
    mean not given.
    """

    will_continue: float | None = None
    due_s: float | None = None
    next_step: NextStep = NextStep.UNSPECIFIED
    answer_tokens: int = 0


class Guess(NamedTuple):
    """A guess that the tenant number `tenant` will request the chain of `blocks` blocks that ends with block `key`.
    `probability` is the chance of a request within the horizon (seconds) for which `guesses` was called. Before the
    time `first_s` a request has a tenth of that chance, and before `due_s` half of it. `confidence`, from 0 to 1, says
    how much evidence there is; it is 1 if an engine announced the request.
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
    """The base of predictors. A predictor sees requests and guesses which chains will be requested, how likely, and
    when. All times are seconds on one clock of the caller.
    """

    name: str

    @abstractmethod
    def requested(self, request: PredictorRequest, now_s: float) -> None:
        """Note that `request` arrived at the time `now_s`, whether or not its blocks are stored."""

    def answered(self, number: int, output_tokens: int, now_s: float) -> None:  # noqa: B027  # optional
        """Note that the request with the number `number` has ended with an answer of `output_tokens` tokens."""

    def hinted(self, tenant: int, key: bytes, hint: Hint, now_s: float) -> None:  # noqa: B027  # optional
        """Note an engine's expectation `hint` about the chain of `tenant` that ends with block `key`."""

    @abstractmethod
    def guesses(self, now_s: float, horizon_s: float, limit: int) -> list[Guess]:
        """Return at most `limit` chains that may be requested within `horizon_s` seconds from `now_s`, the most
        probable first.
        """

    def sample(self, now_s: float, horizon_s: float, count: int, turn: int) -> list[Guess]:
        """Return about `count` of the guesses for the next `horizon_s` seconds, in any order. Each number `turn` gives
        another part of the guesses. The time of a call does not grow with the number of chains. A calibration learns
        from these samples.
        """
        return self.guesses(now_s, horizon_s, count)

    @abstractmethod
    def forget(self, tenant: int, keys: Iterable[bytes] | None) -> None:
        """Forget everything about the blocks `keys` of `tenant`, or about all of the tenant's blocks if `keys` is
        None.
        """

    @abstractmethod
    def export_state(self) -> Iterator[Piece]:
        """Yield the learned state as pairs of a table's name and a part of that table. Making one part takes at most
        half a millisecond. If events come between two parts, their changes may be included or not. Rows that belong to
        a tenant have its number in a column `tenant`; before `import_state` the caller may change these numbers, or
        leave rows out.
        """

    @abstractmethod
    def import_state(self, state: dict[str, Array], later_s: float) -> None:
        """Continue from `state`, the joined tables that another predictor of this name exported. `later_s` is the
        number of seconds by which this predictor's clock is ahead of the exporter's. Raises ValueError, and changes
        nothing, for a state that this version cannot use.
        """


def parts(rows: Iterable[tuple[Any, ...]], dtype: np.dtype[np.void], most: int) -> Iterator[Array]:
    """Yield `rows` as arrays of `dtype` with at most `most` rows; each array is made when it is requested. The first
    array is empty, so that a table without rows appears in the state too.
    """
    yield np.empty(0, dtype)
    left = iter(rows)
    while part := list(islice(left, most)):
        yield np.array(part, dtype)


def within(state: State, prefix: str) -> dict[str, Array]:
    """Return the tables of `state` whose names begin with `prefix`, with the prefix removed from their names."""
    return {name.removeprefix(prefix): table for name, table in state.items() if name.startswith(prefix)}


def untouched(*shape: int) -> npt.NDArray[np.float64]:
    """Return an array of zeros, whose pages take no memory until they are written. NumPy's own zeros do where the C
    library reuses freed memory, as it does after a start with many blocks.
    """
    memory = mmap.mmap(-1, 8 * math.prod(shape), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory).reshape(shape)
