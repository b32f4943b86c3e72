"""What is asked of an engine in a measurement: prompts in token ids and how much to generate.

Owns plain values, and the least that any engine has to compute for them. It never sends anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """`kind` groups requests whose latencies are reported apart, such as "short" and "long".

    `limit`: the most that is requested, where the answer ends by itself after `max_tokens`, unknown to the
    scheduler; 0: `max_tokens` is requested.
    """

    id: str
    tokens: Int32Array
    max_tokens: int
    kind: str = ""
    limit: int = 0


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order in which they are sent. `about`: one line for people."""

    name: str
    about: str
    requests: tuple[BenchRequest, ...]

    @property
    def longest_tokens(self) -> int:
        """What the longest request needs of a context."""
        return max(len(request.tokens) + request.max_tokens for request in self.requests)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.tokens) for request in self.requests)


def ideal_tokens(prompts: Iterable[Int32Array], block_tokens: int) -> int:
    """Prompt tokens that must be computed if each distinct block is computed once, for any request.

    A block is known by all the tokens up to its end. What does not fill a block is not shared, and of a prompt that
    is known to its end the last token is computed again, for its logits.
    """
    seen: set[bytes] = set()
    needed = 0
    for tokens in prompts:
        count, known = len(tokens), 0
        raw = np.ascontiguousarray(tokens, np.int32).tobytes()
        for end in range(block_tokens, count + 1, block_tokens):
            prefix = raw[: 4 * end]
            if prefix in seen:
                known = end
            seen.add(prefix)
        needed += max(1, count - known)
    return needed
