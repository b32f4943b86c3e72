"""A kvstored session in memory: the plain model that the engine's restoring and storing is checked against.

Owns blocks by their exact token prefix, so that no hash can collide, and the ways a daemon can misbehave.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from kvstore_engine.restore.session import NextStep

Tokens = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class MemoryReceipt:
    statuses: list[str]


@dataclass
class MemoryLease:
    payloads: list[Bytes]
    valid: bool = True
    released: bool = False
    resident_blocks: int = 0
    estimated_load_s: float = 0.0
    reason: str = ""

    def __len__(self) -> int:
        return len(self.payloads)

    def payload(self, index: int) -> Bytes:
        assert not self.released, "read after release"
        view = self.payloads[index].view()
        view.flags.writeable = False
        return view

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.released = True


@dataclass
class MemorySession:
    """`mapped_blocks` (None: all) can be leased without promotion; `status_of(block)` decides what a put
    answers; `fail_with` is raised by every call while set.
    """

    block_bytes: int
    block_tokens: int = 64
    estimated_load_s: float = 0.0
    state: str = "connected"
    granted_blocks: int | None = None
    mapped_blocks: int | None = None
    leases_stay_valid: bool = True
    fail_with: Exception | None = None
    status_of: Callable[[int], str] = lambda block: "stored"
    blocks: dict[bytes, Bytes] = field(default_factory=dict)
    leases: list[MemoryLease] = field(default_factory=list)
    puts: list[tuple[int, int]] = field(default_factory=list)
    answer_hints: list[tuple[int, int]] = field(default_factory=list)  # of answers: leading resident blocks, tokens
    next_steps: list[NextStep | None] = field(default_factory=list)  # of all hints
    due: list[tuple[int, float]] = field(default_factory=list)  # of queued requests: blocks of the prompt, seconds

    def _key(self, tokens: Tokens, block: int) -> bytes:
        return np.asarray(tokens, np.int32)[: (block + 1) * self.block_tokens].tobytes()

    def _resident(self, tokens: Tokens) -> int:
        count = 0
        while (count + 1) * self.block_tokens <= len(tokens) and self._key(tokens, count) in self.blocks:
            count += 1
        return count

    def ping(self) -> float | None:
        return 0.0

    def wake(self) -> None:
        return None

    def get(self, tokens: Tokens, *, max_blocks: int, deadline_s: float, promote: bool) -> MemoryLease:
        self._maybe_fail()
        assert deadline_s > 0
        resident = min(self._resident(tokens), max_blocks)
        limits = [resident, self.granted_blocks if promote else self.mapped_blocks]
        count = min(limit for limit in limits if limit is not None)
        lease = MemoryLease(
            [self.blocks[self._key(tokens, block)] for block in range(count)],
            self.leases_stay_valid,
            resident_blocks=resident,
            estimated_load_s=self.estimated_load_s,
            reason="" if resident else "never_stored",
        )
        self.leases.append(lease)
        return lease

    def put(self, tokens: Tokens, *, first_block: int, payloads: Sequence[Callable[[Bytes], None]]) -> MemoryReceipt:
        self._maybe_fail()
        self.puts.append((first_block, len(payloads)))
        statuses = []
        for block, write in enumerate(payloads, first_block):
            key = self._key(tokens, block)
            assert len(key) == 4 * (block + 1) * self.block_tokens, "a put must name the block's whole prefix"
            status = "present" if key in self.blocks else self.status_of(block)
            if status == "stored":
                staging = np.full(self.block_bytes, 0xEE, np.uint8)
                write(staging)
                self.blocks[key] = staging
            statuses.append(status)
        return MemoryReceipt(statuses)

    def hint(
        self,
        tokens: Tokens,
        *,
        answer_tokens: int = 0,
        due_in_s: float | None = None,
        next_step: NextStep | None = None,
    ) -> int:
        self._maybe_fail()
        self.next_steps.append(next_step)
        if answer_tokens:
            self.answer_hints.append((self._resident(tokens), answer_tokens))
        if due_in_s is not None:
            self.due.append((len(tokens) // self.block_tokens, due_in_s))
        return self._resident(tokens)

    def close(self) -> None:
        self.state = "closed"

    def _maybe_fail(self) -> None:
        if self.fail_with is not None:
            raise self.fail_with
