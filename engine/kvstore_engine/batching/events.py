"""The engine's reports of its requests, one event after another.

The module has plain values. Invariant: an answer's events are any number of `Token`, then one `Finished`; the
concatenation of all their texts is the answer.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

Reason = Literal["end", "length", "context", "stop", "cancelled", "failed"]


@dataclass(frozen=True, slots=True)
class Usage:
    """The figures of one answer: token counts and times in seconds. Each prompt token counts once by the source of its
    K/V: `local_tokens` came from blocks of another request (for the further answers of n > 1, the whole prompt),
    `daemon_tokens` from the daemon, `computed_tokens` were computed. `recomputed_tokens` were computed again after a
    preemption. `generated_tokens` includes a stop string and excludes the end token. `queued_s` is the time from `add`
    to admission, `ttft_s` to the first token, `tpot_s` the time for each further token.
    """

    prompt_tokens: int = 0
    local_tokens: int = 0
    daemon_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    generated_tokens: int = 0
    queued_s: float = 0.0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    total_s: float = 0.0
    preemptions: int = 0
    swaps: int = 0


@dataclass(frozen=True, slots=True)
class Token:
    """An event: the next token of answer `index` of a request. `text` can be shown now; it has only whole characters
    and no part of a stop string. `logprob` is the token's log probability and `top` the likeliest tokens as (id, log
    probability), if the request asked for them.
    """

    request_id: str
    index: int
    token: int
    text: str
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """An event: the end of answer `index` of a request. `reason` is "end" (the model ended it), "length" (`max_tokens`
    reached), "context" (the context is full), "stop" (a stop string or the constraint ended it), "cancelled" or
    "failed"; `message` explains a failure. `text` is the last text to show, which was held back until now and is
    usually empty.
    """

    request_id: str
    index: int
    reason: Reason
    usage: Usage
    message: str = ""
    text: str = ""


Event: TypeAlias = Token | Finished
