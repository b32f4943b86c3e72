"""A kvstored session in memory: the plain model that the engine's restoring and storing is checked against.

Owns blocks by their exact token prefix, so that no hash can collide, and the ways a daemon can misbehave.
"""

from collections.abc import Callable, Iterator, Sequence
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
    reason: str = ""


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


@dataclass(frozen=True)
class MemoryPoint:
    blocks: int
    reason: str


@dataclass(frozen=True)
class MemoryLookup:
    tiers: tuple[str, ...]
    load_s: tuple[float, ...] = ()


class MemoryStream:
    """Runs of (first block, lease); `blocks`: the blocks that come. Each is granted when it is taken."""

    def __init__(self, session: "MemorySession", tokens: Tokens, tiers: tuple[str, ...], runs: list[range]) -> None:
        self.tiers, self.reason, self.is_closed = tiers, "", False
        self.leases: list[MemoryLease] = []
        self._session, self._tokens, self._runs = session, tokens, runs

    def __iter__(self) -> Iterator[tuple[int, MemoryLease]]:
        for run in self._runs:
            if self.is_closed:
                return
            self._session.maybe_fail()
            self.leases.append(self._session.grant(self._tokens, run))
            yield run.start, self.leases[-1]

    def close(self) -> None:
        self.is_closed = True
        for lease in self.leases:
            lease.released = True


@dataclass
class MemorySession:
    """`mapped_blocks` (None: all) can be leased without promotion, `granted_blocks` at all, `vanishing` ones not,
    though a lookup names them; `status_of(block)` decides what a put answers; `fail_with` is raised by every call while
    set. Group 1 is of layers with a window of `window_tokens`; a block of it can be taken out of `windows`.
    """

    block_bytes: int
    block_tokens: int = 64
    estimated_load_s: float = 0.0
    state: str = "connected"
    granted_blocks: int | None = None
    mapped_blocks: int | None = None
    vanishing: frozenset[int] = frozenset()
    leases_stay_valid: bool = True
    fail_with: Exception | None = None
    status_of: Callable[[int], str] = lambda block: "stored"
    window_tokens: int = 0
    blocks: dict[bytes, Bytes] = field(default_factory=dict)
    windows: dict[bytes, Bytes] = field(default_factory=dict)
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

    def resume_point(self, tokens: Tokens, *, max_blocks: int, deadline_s: float) -> MemoryPoint:
        self.maybe_fail()
        assert self.window_tokens and deadline_s > 0
        resident = min(self._resident(tokens), max_blocks)
        while any(self._key(tokens, block) not in self.windows for block in self._needed(resident)):
            resident -= 1
        return MemoryPoint(resident, "" if resident == max_blocks else "never_stored")

    def _needed(self, blocks: int) -> range:
        return range(max(0, blocks * self.block_tokens - self.window_tokens + 1) // self.block_tokens, blocks)

    def get(
        self,
        tokens: Tokens,
        *,
        first_block: int = 0,
        max_blocks: int,
        group: int | None = None,
        deadline_s: float,
        promote: bool,
    ) -> MemoryLease:
        self.maybe_fail()
        assert deadline_s > 0
        if group:
            keys = [self._key(tokens, block) for block in range(first_block, first_block + max_blocks)]
            found = [self.windows[key] for key in keys if key in self.windows]
            self.leases.append(MemoryLease(found, self.leases_stay_valid, resident_blocks=len(found)))
            return self.leases[-1]
        resident = min(self._resident(tokens), max_blocks)
        lease = self.grant(tokens, range(self._granted(resident) if promote else self._mapped(resident)))
        lease.resident_blocks, lease.estimated_load_s = resident, self.estimated_load_s
        lease.reason = "" if resident else "never_stored"
        return lease

    def lookup(self, tokens: Tokens, *, deadline_s: float) -> MemoryLookup:
        self.maybe_fail()
        resident = self._resident(tokens)
        tiers = self._tiers(resident) + ("absent",) * (len(tokens) // self.block_tokens - resident)
        return MemoryLookup(tiers, (self.estimated_load_s / max(1, resident),) * resident)

    def get_stream(self, tokens: Tokens, *, order: str, max_blocks: int, deadline_s: float) -> MemoryStream:
        self.maybe_fail()
        assert deadline_s > 0
        resident = min(self._resident(tokens), max_blocks)
        mapped = self._mapped(resident)
        runs = [range(mapped)] * bool(mapped)
        later = [range(at, at + 1) for at in range(mapped, self._granted(resident)) if at not in self.vanishing]
        runs += later if order == "front" else later[::-1]
        return MemoryStream(self, tokens, self._tiers(resident), runs)

    def grant(self, tokens: Tokens, run: range) -> MemoryLease:
        payloads = [self.blocks[self._key(tokens, block)] for block in run]
        self.leases.append(MemoryLease(payloads, self.leases_stay_valid))
        return self.leases[-1]

    def _mapped(self, resident: int) -> int:
        return resident if self.mapped_blocks is None else min(resident, self.mapped_blocks)

    def _granted(self, resident: int) -> int:
        return resident if self.granted_blocks is None else min(resident, self.granted_blocks)

    def _tiers(self, resident: int) -> tuple[str, ...]:
        mapped = self._mapped(resident)
        return ("host",) * mapped + ("nvme",) * (resident - mapped)

    def put(
        self,
        tokens: Tokens,
        *,
        first_block: int,
        payloads: Sequence[Callable[[Bytes], None]],
        group: int | None = None,
    ) -> MemoryReceipt:
        self.maybe_fail()
        blocks, statuses = self.windows if group else self.blocks, []
        if not group:
            self.puts.append((first_block, len(payloads)))
        for block, write in enumerate(payloads, first_block):
            key = self._key(tokens, block)
            assert len(key) == 4 * (block + 1) * self.block_tokens, "a put must name the block's whole prefix"
            status = "present" if key in blocks else self.status_of(block)
            if status == "stored":
                staging = np.full(self.block_bytes, 0xEE, np.uint8)
                write(staging)
                blocks[key] = staging
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
        self.maybe_fail()
        self.next_steps.append(next_step)
        if answer_tokens:
            self.answer_hints.append((self._resident(tokens), answer_tokens))
        if due_in_s is not None:
            self.due.append((len(tokens) // self.block_tokens, due_in_s))
        return self._resident(tokens)

    def close(self) -> None:
        self.state = "closed"

    def maybe_fail(self) -> None:
        if self.fail_with is not None:
            raise self.fail_with
