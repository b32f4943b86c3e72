"""The interface of a kvstored session that the engine needs, as types.

`kvstore_client.connect` returns objects with this interface. Obligations: with a dead or absent daemon nothing raises,
lookups miss and puts are dropped; bytes under a lease stay readable and unchanged until it is released; `put` returns
only when it no longer needs the payload callables; the daemon may ignore a `hint`.
"""

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Literal, Protocol, Self

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]
Payload = Callable[[Bytes], Callable[[], None] | None]
"""Writes a whole payload; or begins to, and returns what waits until it is there."""

NextStep = Literal["tool_call", "end_of_turn", "closed"]
"""What would have to happen before an answer is continued: a tool answers, a person answers, nothing."""


class KvLease(Protocol):
    """A right to read the first `len(lease)` of the requested storage blocks in the daemon's memory; if there are none,
    `reason` says why. If the request did not ask for loading from slower tiers, `resident_blocks` is the number of
    leading blocks that are stored in some tier, and loading them all would take about `estimated_load_s` seconds.
    """

    @property
    def valid(self) -> bool: ...
    @property
    def resident_blocks(self) -> int: ...
    @property
    def estimated_load_s(self) -> float: ...
    @property
    def reason(self) -> object: ...
    def __len__(self) -> int: ...
    def payload(self, index: int, /) -> Bytes: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None, /
    ) -> object: ...


class KvResumePoint(Protocol):
    """The longest stored prefix, of `blocks` storage blocks, after which layers of every kind can go on computing.
    `reason` says why it is not longer.
    """

    @property
    def blocks(self) -> int: ...
    @property
    def reason(self) -> object: ...


class KvLookup(Protocol):
    """The tiers in which the blocks of a prefix are stored: `tiers` names one for each requested block, "absent" if it
    is not stored. `load_s` has the daemon's estimate of the seconds that each stored leading block adds to loading; it
    is empty if the daemon does not know.
    """

    @property
    def tiers(self) -> tuple[str, ...]: ...
    @property
    def load_s(self) -> tuple[float, ...]: ...


class KvStream(Protocol):
    """An iterator over pairs (number of the first block, lease), one pair whenever further blocks have become readable.
    `tiers` says where each block was; at the end `reason` says why blocks are missing. Another thread may call `close`,
    which releases all leases and ends the iteration.
    """

    @property
    def tiers(self) -> tuple[str, ...]: ...
    @property
    def reason(self) -> str: ...
    def __iter__(self) -> Iterator[tuple[int, KvLease]]: ...
    def close(self) -> None: ...


class KvReceipt(Protocol):
    """The result of a put (a request to store blocks): for each block "stored", "present", or why it was not stored.
    `reason` says more in words, if more is known.
    """

    @property
    def statuses(self) -> Sequence[str]: ...
    @property
    def reason(self) -> str: ...


class KvSession(Protocol):
    """A connection of one engine, for one model, to the daemon on this machine."""

    @property
    def block_tokens(self) -> int: ...
    @property
    def state(self) -> str: ...
    def ping(self) -> float | None: ...
    def wake(self) -> None: ...
    def get(
        self,
        tokens: Tokens,
        /,
        *,
        first_block: int = 0,
        max_blocks: int,
        group: int | None = None,
        deadline_s: float,
        promote: bool,
    ) -> KvLease: ...
    def resume_point(self, tokens: Tokens, /, *, max_blocks: int, deadline_s: float) -> KvResumePoint: ...
    def lookup(self, tokens: Tokens, /, *, deadline_s: float) -> KvLookup: ...
    def get_stream(
        self, tokens: Tokens, /, *, order: Literal["front", "back"], max_blocks: int, deadline_s: float
    ) -> KvStream: ...
    def put(
        self, tokens: Tokens, /, *, first_block: int, payloads: Sequence[Payload], group: int | None = None
    ) -> KvReceipt: ...
    def hint(
        self,
        tokens: Tokens,
        /,
        *,
        answer_tokens: int = 0,
        due_in_s: float | None = None,
        next_step: NextStep | None = None,
    ) -> int: ...
    def close(self) -> None: ...
