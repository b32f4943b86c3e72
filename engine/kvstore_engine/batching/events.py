"""The engine's reports of its requests, one event after another.

The module has plain values. Invariant: an answer's events are any number of `Token`, then one `Finished`; the
concatenation of all their texts is the answer.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

Reason = Literal["end", "length", "context", "stop", "cancelled", "failed"]


@dataclass(frozen=True, slots=True)
class Usage:
    """The cost of one answer. Prompt tokens are counted by the source of their K/V.

    local_tokens:    in blocks that another request of this engine computed, perhaps while it still ran.
    daemon_tokens:   restored from the daemon.
    computed_tokens: computed for this answer. Each prompt token is counted in one of the three; the further answers of
                     a request with n > 1 count all of the prompt as local.
    recomputed_tokens: computed again after a preemption.
    generated_tokens: with the tokens of a stop string, which are not shown, and without the end token.
    queued_s, ttft_s: from `add` to admission, and to the first token. tpot_s: per further token.
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
    """The next token of answer `index`. `text` is the text that can be shown now: whole characters, and nothing that
    could still become a stop string. `logprob` and `top` (id, log probability; likeliest first) if the request asks
    for them.
    """

    request_id: str
    index: int
    token: int
    text: str
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of answer `index`. `text` is the rest of it that had been held back, mostly empty.

    reason: the model ended it ("end"), `max_tokens` ("length"), the context is full ("context"), a stop string or the
    constraint ended it ("stop"), "cancelled", or "failed", which `message` explains.
    """

    request_id: str
    index: int
    reason: Reason
    usage: Usage
    message: str = ""
    text: str = ""


Event: TypeAlias = Token | Finished
