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
    """The settings of one request: how its answers are sampled and when they end. max_tokens: the most tokens of each
    of the `n` answers. stop: strings that end an answer and are never shown. ignore_end: go on after an end-of-text
    token. logprobs: None, or k to report the log probabilities of the chosen and the k likeliest tokens, before
    sampling settings apply. store: put computed blocks into the daemon. next_step: a function that says which request
    will follow an answer, given the answer's token ids; the daemon gets it as a hint. constraint: a function that makes
    the constraint (such as a grammar) of an answer. trace: the W3C traceparent of the caller's span, "" for none.
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
    trace: str = ""

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
    """A prompt to be answered. `id` is the caller's, unique among unfinished requests; `tokens` are the prompt's token
    ids, int32 [n]. Requests of different tenants never share a block. A higher `priority` goes first under the policy
    "priority".
    """

    id: str
    tokens: Int32Array
    settings: RequestSettings = field(default_factory=RequestSettings)
    tenant: str = ""
    priority: int = 0
