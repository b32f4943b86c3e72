"""A request: a prompt in token ids and its settings. The module has plain values, and the checks that need no model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore_engine.batching.constraint import Constraint
from kvstore_engine.errors import UsageError
from kvstore_engine.restore.session import NextStep
from kvstore_engine.sampler import SamplingSettings

Int32Array = npt.NDArray[np.int32]
MAX_ANSWERS = 64
MAX_LOGPROBS = 64


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """Says how to answer. `max_tokens` applies to each of the `n` answers, which differ only by their random numbers.

    stop:       strings that end an answer; no part of them is ever shown.
    ignore_end: do not stop at an end-of-text token; for measurements of a fixed length.
    logprobs:   None for none; k for the chosen token's and the k likeliest tokens' log probabilities, of the
                distribution as the model gave it (before temperature, top-k, top-p and constraint).
    store:      put computed blocks into the daemon, if there is one.
    next_step:  returns what follows an answer that has ended by itself, from its tokens; None if that is not known.
                It is a hint for the daemon, and is called in the thread that sends it.
    constraint: makes one constraint for each answer.
    """

    max_tokens: int = 256
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    n: int = 1
    stop: tuple[str, ...] = ()
    ignore_end: bool = False
    logprobs: int | None = None
    store: bool = True
    next_step: Callable[[Sequence[int]], NextStep | None] | None = None
    constraint: Callable[[], Constraint] | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise UsageError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not 1 <= self.n <= MAX_ANSWERS:
            raise UsageError(f"n must be 1 to {MAX_ANSWERS} answers, got {self.n}")
        if any(not text for text in self.stop):
            raise UsageError("a stop string must not be empty")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise UsageError(f"logprobs must be 0 to {MAX_LOGPROBS}, got {self.logprobs}")


@dataclass(frozen=True, slots=True)
class Request:
    """`id` is the caller's and unique among the requests under way; `tokens` int32 [n] is the prompt.

    Requests of different tenants never share a block and are served in turns; a higher `priority` goes first.
    """

    id: str
    tokens: Int32Array
    settings: RequestSettings = field(default_factory=RequestSettings)
    tenant: str = ""
    priority: int = 0
