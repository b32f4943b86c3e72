"""Measures what a codec costs in probabilities: one window of text after another, a prefix and the tokens after it.

The prefix is computed once. Its K and V are copied, and one copy goes through the codec, block by block, as the store
would keep it. The tokens after the prefix are then computed on both copies, in equal steps, so that rounding in the
model is the same and the codec is the only difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore_engine.executors.base import StepExecutor
from kvstore_engine.graph import SequenceSlice

BLOCK_TOKENS, PREFIX_TOKENS = 64, 512
STEP_TOKENS = 64
Bytes = npt.NDArray[np.uint8]
Tokens = npt.NDArray[np.int32]
Through = Callable[[Bytes], tuple[Bytes, int]]  # a payload: as the store gives it back, and the bytes that it keeps


@dataclass
class Difference:
    """The counts of a measurement: sums over `positions`, greedy continuations that were equal, and the bytes of
    payloads as they were put and as they were stored.
    """

    positions: int = 0
    kl: float = 0.0
    agreed: int = 0
    continuations: int = 0
    equal: int = 0
    put_bytes: int = 0
    stored_bytes: int = 0
    kl_of_windows: list[float] = field(default_factory=list)

    def add(self, exact: npt.NDArray[np.float32], lossy: npt.NDArray[np.float32]) -> None:
        """Add the logits [position, vocabulary] of the same positions."""
        left, right = _log_softmax(exact), _log_softmax(lossy)
        divergence = np.sum(np.exp(left) * (left - right), axis=1)
        self.positions += len(divergence)
        self.kl += float(np.maximum(divergence, 0).sum())
        self.agreed += int((exact.argmax(axis=1) == lossy.argmax(axis=1)).sum())

    def join(self, other: Difference) -> None:
        """Add what another measurement counted."""
        self.positions += other.positions
        self.kl += other.kl
        self.agreed += other.agreed
        self.continuations += other.continuations
        self.equal += other.equal
        self.put_bytes += other.put_bytes
        self.stored_bytes += other.stored_bytes

    def report(self) -> dict[str, float]:
        """Return mean KL in nats, the share of positions with the same likeliest token in %, of equal greedy
        continuations in %, and the bytes put divided by the bytes stored."""
        return {
            "positions": self.positions,
            "kl": self.kl / max(1, self.positions),
            "top1_percent": 100 * self.agreed / max(1, self.positions),
            "greedy_percent": 100 * self.equal / self.continuations if self.continuations else 100.0,
            "ratio": self.put_bytes / self.stored_bytes if self.stored_bytes else 1.0,
        }


def _log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    shifted: npt.NDArray[np.float32] = logits - logits.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


class Comparison:
    """Compares on one executor, whose pool keeps all of each layer, and has room for two windows."""

    def __init__(self, executor: StepExecutor, next_tokens: int, greedy_tokens: int) -> None:
        self._executor, self._pool = executor, executor.pool
        self._next_tokens, self._greedy_tokens = next_tokens, greedy_tokens
        most = PREFIX_TOKENS + max(next_tokens, greedy_tokens)
        self.blocks = -(-most // self._pool.block_tokens)

    def window(self, tokens: Tokens, throughs: Iterable[Through]) -> list[Difference]:
        """Return the difference that each of `throughs` makes after the first `PREFIX_TOKENS` of `tokens`."""
        pool, found = self._pool, []
        exact, lossy = (np.array(pool.allocate(self.blocks), np.int32) for _ in range(2))
        try:
            self._compute_prefix(tokens, exact)
            firsts = range(PREFIX_TOKENS, PREFIX_TOKENS + self._next_tokens, STEP_TOKENS)
            expected = [self._logits(tokens[first : first + STEP_TOKENS], first, exact) for first in firsts]
            for through in throughs:
                difference = Difference()
                self._restore(exact, lossy, through, difference)
                for first, logits in zip(firsts, expected, strict=True):
                    difference.add(logits, self._logits(tokens[first : first + STEP_TOKENS], first, lossy))
                if self._greedy_tokens:
                    last = tokens[PREFIX_TOKENS : PREFIX_TOKENS + 1]
                    difference.continuations = 1
                    difference.equal = int(self._greedy(last, exact) == self._greedy(last, lossy))
                found.append(difference)
        finally:
            pool.free(exact.tolist())
            pool.free(lossy.tolist())
        return found

    def _compute_prefix(self, tokens: Tokens, table: Tokens) -> None:
        step = min(PREFIX_TOKENS, self._executor.limits.max_tokens)
        for first in range(0, PREFIX_TOKENS, step):
            piece = tokens[first : min(first + step, PREFIX_TOKENS)]
            self._executor.forward([SequenceSlice(piece, first, table, "last")])

    def _restore(self, exact: Tokens, lossy: Tokens, through: Through, counts: Difference) -> None:
        """Fill the blocks `lossy` of the prefix with what `through` makes of the blocks `exact`; add the bytes to
        `counts`.
        """
        each = BLOCK_TOKENS // self._pool.block_tokens
        payload = np.empty(self._pool.payload_bytes(each), np.uint8)
        for first in range(0, PREFIX_TOKENS // self._pool.block_tokens, each):
            self._pool.gather_block(exact[first : first + each], payload)
            back, stored_bytes = through(payload)
            self._pool.scatter_block(back, lossy[first : first + each])
            counts.put_bytes += payload.size
            counts.stored_bytes += stored_bytes

    def _logits(self, tokens: Tokens, start: int, table: Tokens) -> npt.NDArray[np.float32]:
        return self._executor.forward([SequenceSlice(tokens, start, table, "all")])

    def _greedy(self, last: Tokens, table: Tokens) -> list[int]:
        """Return the likeliest tokens after the prefix and `last`, one by one."""
        made: list[int] = []
        for number in range(self._greedy_tokens):
            logits = self._executor.forward([SequenceSlice(last, PREFIX_TOKENS + number, table, "last")])
            made.append(int(logits[0].argmax()))
            last = np.array(made[-1:], np.int32)
        return made


def windows_of(tokens: Tokens, next_tokens: int, most: int) -> Sequence[Tokens]:
    """Cut a text into windows of a prefix and the tokens after it, `most` of them at most."""
    size = PREFIX_TOKENS + next_tokens
    return [tokens[first : first + size] for first in range(0, len(tokens) - size + 1, size)][:most]
